"""Pieces of Gradio that every screen is laid out with: HTML, figures, notices."""

import re
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any

import plotly.graph_objects as go
from plotly.io.json import to_json_plotly

from bilens.lazy_imports import gradio as gr
from bilens.reading import Fact
from bilens.reading import shown as shown_fact
from bilens.report.page import CONFIG
from bilens.residual import ResidualModel
from bilens.residual.trace import prepare_text

BAR = """
<button type="button">Copy the address of this view</button>
<span role="status"></span>
<p class="bilens-notice">${note}</p>
"""


class AddressBar:
    """The address of the view, kept in the browser, and a button that copies it."""

    def __init__(self) -> None:
        self.component = html(
            "address",
            html_template=BAR,
            js_on_load=Path(__file__).with_name("address_bar.js").read_text(encoding="utf-8"),
            note="",
        )

    def update(self, query: str, left_out: Sequence[str]) -> Any:
        """Return an update of the component for a query, and a note on fields that are too long."""
        note = f"Too long for an address, and left out of it: {', '.join(left_out)}."
        return gr.update(value=query, note=escape(note) if left_out else "")


def html(name: str, content: str = "", **settings: Any) -> gr.HTML:
    """Lay out a place for HTML, which the caller escapes."""
    return gr.HTML(content, elem_id=name, apply_default_css=False, **settings)


def heading(text: str, note: str = "") -> None:
    """Lay out the title of a part of the screen, and a few sentences that explain it."""
    html("", f"<h2>{escape(text)}</h2>" + (note_html(note) if note else ""))


def note_html(text: str) -> str:
    """Return a sentence in small print."""
    return f'<p class="bilens-note">{escape(text)}</p>'


def facts_html(facts: Sequence[Fact]) -> str:
    """Return names and values for the head of a screen."""
    shown = ((escape(name), escape(shown_fact(value))) for name, value in facts)
    rows = (f"<div><dt>{name}</dt><dd>{value}</dd></div>" for name, value in shown)
    return f'<dl class="bilens-facts">{"".join(rows)}</dl>'


def picture(name: str, figure: go.Figure | None = None, **settings: Any) -> gr.Plot:
    """Lay out a place for a figure."""
    return gr.Plot(
        figure and plot_of(figure, name),
        show_label=False,
        container=False,
        label=name,
        elem_id=name,
        elem_classes="bilens-plot",
        **settings,
    )


def plot_of(figure: go.Figure, name: str) -> Any:
    """Return a figure for `gr.Plot`, with the page's own settings instead of plotly's.

    Args:
        figure: the drawing.
        name: of a saved picture.
    """
    shown: dict[str, Any] = figure.to_plotly_json()
    saving = {**CONFIG["toImageButtonOptions"], "filename": re.sub(r"\W+", "-", name)}  # type: ignore[dict-item]
    shown["config"] = {**CONFIG, "displayModeBar": True, "toImageButtonOptions": saving}
    return gr.components.plot.PlotData(type="plotly", plot=to_json_plotly(shown))


SHOWN = 8
"""Words that are named."""


def prompt_notice(model: ResidualModel, prompt: str) -> str:
    """Return a sentence that names the unknown words, as HTML; empty if there are none.

    Args:
        model: with its tokenizer.
        prompt: the text.
    """
    text, tokenizer = prepare_text(prompt, model.tokenizer), model.tokenizer
    if tokenizer is None or tokenizer.unk_token_id is None:
        return ""
    encoded: Any = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    unknown = list(
        dict.fromkeys(
            text[start:end]
            for id_, (start, end) in zip(
                encoded["input_ids"], encoded["offset_mapping"], strict=True
            )
            if id_ == tokenizer.unk_token_id
        )
    )
    if not unknown:
        return ""
    more = f" and {len(unknown) - SHOWN} more" if len(unknown) > SHOWN else ""
    named = ", ".join(unknown[:SHOWN]) + more
    sentence = f"Not in the vocabulary, and read as {tokenizer.unk_token}: {named}."
    return f'<p class="bilens-notice">{escape(sentence)}</p>'
