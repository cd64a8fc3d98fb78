"""A report as one HTML file that works offline, on a phone and on paper."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import plotly.graph_objects as go
from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup
from plotly.offline import get_plotlyjs

from bilens.files import write_text

__all__ = ["Section", "render_page", "write_page"]

CONFIG = {
    "displaylogo": False,
    "responsive": True,
    "displayModeBar": "hover",
    "modeBarButtons": [["toImage"]],
    "toImageButtonOptions": {"format": "svg", "scale": 1},
}


@dataclass(frozen=True)
class Section:
    """A part of a page: a heading, a paragraph, a table, and rows of figures.

    Attributes:
        title: the heading.
        text: a paragraph under it.
        header: of the table, if there is one.
        table: its rows.
        rows: figures, those of a row side by side where there is room.
    """

    title: str
    text: str = ""
    header: Sequence[str] = ()
    table: Sequence[Sequence[str]] = ()
    rows: Sequence[Sequence[go.Figure]] = field(default=())


def render_page(
    title: str, summary: str, facts: Sequence[tuple[str, str]], sections: Sequence[Section]
) -> str:
    """The page as text. Everything but the figures is escaped; figures escape their own text."""
    environment = Environment(
        loader=PackageLoader("bilens", "report"), autoescape=True, undefined=StrictUndefined
    )
    return environment.get_template("page.html").render(
        title=title,
        summary=summary,
        facts=facts,
        sections=sections,
        draw=_draw,
        plotly_js=Markup(get_plotlyjs()),
    )


def write_page(
    path: Path,
    title: str,
    summary: str,
    facts: Sequence[tuple[str, str]],
    sections: Sequence[Section],
) -> None:
    """Write the page, whole or not at all."""
    write_text(path, render_page(title, summary, facts, sections))


def _draw(figure: go.Figure) -> Markup:
    height = f"{figure.layout.height}px"
    html = figure.to_html(
        full_html=False, include_plotlyjs=False, config=CONFIG, default_height=height
    )
    return Markup(html)
