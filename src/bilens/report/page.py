"""A report as one HTML file that works offline, on a phone and on paper."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import plotly.graph_objects as go
from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup
from plotly.io.json import to_json_plotly
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
    """A part of a page: a heading, a paragraph, and rows of figures with a table beside the first.

    Attributes:
        title: the heading.
        text: a paragraph under it.
        header: of the table, if there is one.
        table: its rows.
        rows: figures, those of a row side by side where there is room; an empty row holds a table
            alone.
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
        draw=lambda figure: _safe_json(figure.to_plotly_json()),
        config=_safe_json(CONFIG),
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


def _safe_json(content: Any) -> Markup:
    """JSON that no text inside of it can break out of."""
    return Markup(to_json_plotly(content).replace("<", "\\u003c"))
