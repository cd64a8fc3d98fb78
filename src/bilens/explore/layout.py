"""Pieces of Gradio that every screen is laid out with."""

from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any

from bilens.explore.gradio_import import gradio as gr

__all__ = ["AddressBar", "facts_html", "heading", "html", "note_html"]

BAR = """
<button type="button">Copy the address of this view</button>
<span role="status"></span>
<p class="bilens-notice">${note}</p>
"""


class AddressBar:
    """The address of what is shown, kept in the browser, and a button that copies it."""

    def __init__(self) -> None:
        self.component = html(
            "address",
            html_template=BAR,
            js_on_load=Path(__file__).with_name("address_bar.js").read_text(encoding="utf-8"),
            note="",
        )

    def update(self, query: str, left_out: Sequence[str]) -> Any:
        """An update of the component for a query, which some fields may be too long for."""
        note = f"Too long for an address, and left out of it: {', '.join(left_out)}."
        return gr.update(value=query, note=escape(note) if left_out else "")


def html(name: str, content: str = "", **settings: Any) -> gr.HTML:
    """A place for HTML, which whoever fills it has made safe."""
    return gr.HTML(content, elem_id=name, apply_default_css=False, **settings)


def heading(text: str, note: str = "") -> None:
    """The title of a part of the screen, and a few sentences that explain it."""
    html("", f"<h2>{escape(text)}</h2>" + (note_html(note) if note else ""))


def note_html(text: str) -> str:
    """A sentence of small print."""
    return f'<p class="bilens-note">{escape(text)}</p>'


def facts_html(facts: Sequence[tuple[str, str]]) -> str:
    """Names and values for the head of a screen."""
    rows = (f"<div><dt>{escape(name)}</dt><dd>{escape(value)}</dd></div>" for name, value in facts)
    return f'<dl class="bilens-facts">{"".join(rows)}</dl>'
