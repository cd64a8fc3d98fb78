"""A report as one HTML file that works offline, on a phone and on paper."""

import base64
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from html import escape
from pathlib import Path
from typing import Any

import plotly.graph_objects as go
from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup
from plotly.io.json import to_json_plotly
from plotly.offline import get_plotlyjs

from bilens.checks import checked
from bilens.files import write_text
from bilens.lazy_imports import pd
from bilens.reading import signed
from bilens.report.style import DARK

__all__ = [
    "ContextLine",
    "ContextList",
    "Drawing",
    "Section",
    "Table",
    "contexts_html",
    "page_templates",
    "render_page",
    "table_html",
    "write_page",
]

CONFIG = {
    "displaylogo": False,
    "responsive": True,
    "displayModeBar": "hover",
    "modeBarButtons": [["toImage"]],
    "toImageButtonOptions": {"format": "svg", "scale": 1},
}


@dataclass(frozen=True)
class Table:
    """Cells of text under a header; the first `words` columns hold words instead of numbers."""

    header: Sequence[str]
    rows: Sequence[Sequence[str]]
    caption: str = ""
    words: int = 0


@dataclass(frozen=True)
class ContextLine:
    """A piece of text whose tokens are coloured by what they contribute, and list it when opened.

    Attributes:
        value: what they contribute to.
        tokens: text and contribution of each; a text that starts with ## belongs to the word
            before it.
        focal: which of them stands in brackets.
    """

    value: float
    tokens: Sequence[tuple[str, float]]
    focal: int

    @property
    def strongest(self) -> float:
        """The largest |contribution|, which is full colour."""
        return max(abs(share) for _, share in self.tokens) or 1.0

    @property
    def ranked(self) -> list[tuple[str, float]]:
        """The tokens that contribute, the largest |contribution| first."""
        some = [token for token in self.tokens if token[1]]
        return sorted(some, key=lambda token: -abs(token[1]))


@dataclass(frozen=True)
class ContextList:
    """Contexts one below the other, with a heading."""

    title: str
    lines: Sequence[ContextLine]


@dataclass(frozen=True)
class Drawing:
    """The graph of a flow, of `bilens.report.flow.flow_data`, which the reader explores."""

    graph: dict[str, Any]


@dataclass(frozen=True)
class Section:
    """A part of a page: a heading, a paragraph, and rows of what stands side by side."""

    title: str
    text: str = ""
    rows: Sequence[Sequence[go.Figure | Table | ContextList | Drawing]] = field(default=())


@cache
def page_templates() -> Environment:
    """The templates of pages and of their parts, which escape all text."""
    environment = Environment(
        loader=PackageLoader("bilens", "report"), autoescape=True, undefined=StrictUndefined
    )
    environment.filters["signed"] = signed
    environment.tests |= {
        "figure": lambda part: isinstance(part, go.Figure),
        "table": lambda part: isinstance(part, Table),
        "drawing": lambda part: isinstance(part, Drawing),
    }
    return environment


@checked
def render_page(
    title: str, summary: str, facts: Sequence[tuple[str, str]], sections: Sequence[Section]
) -> str:
    """The page as text. Everything but the figures is escaped; figures escape their own text."""
    return (
        page_templates()
        .get_template("page.html")
        .render(
            title=title,
            summary=summary,
            facts=facts,
            sections=sections,
            draw=lambda figure: _safe_json(figure.to_plotly_json()),
            pack=_safe_json,
            config=_safe_json({"config": CONFIG, "colours": DARK}),
            plotly_js=Markup(get_plotlyjs()),
        )
    )


@checked
def write_page(
    path: Path,
    title: str,
    summary: str,
    facts: Sequence[tuple[str, str]],
    sections: Sequence[Section],
) -> None:
    """Write the page, whole or not at all."""
    write_text(path, render_page(title, summary, facts, sections))


def _safe_json(content: Any) -> Markup:
    """JSON that no text inside of it can break out of."""
    return Markup(to_json_plotly(content).replace("<", "\\u003c"))


def table_html(table: Table, frame: "pd.DataFrame", name: str) -> str:
    """A table, escaped here, with a link that saves all of a frame as NAME.csv."""
    shown = page_templates().get_template("parts.html").module
    packed = base64.b64encode(frame.to_csv(index=False).encode()).decode()
    link = f'download="{escape(name)}.csv" href="data:text/csv;base64,{packed}"'
    return f'<div class="table">{shown.table(table)}<a class="save" {link}>CSV</a></div>'  # type: ignore[attr-defined]


@checked
def contexts_html(contexts: ContextList) -> str:
    """Texts whose tokens are coloured by what they contribute; escaped here."""
    shown = page_templates().get_template("parts.html").module
    return str(shown.contexts(contexts))  # type: ignore[attr-defined]
