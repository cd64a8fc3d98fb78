"""What a reading shows, by its type: the sections of a page, a picture, and a record for JSON.

A reading of your own may register a page and a picture of its own:

    @sections_of.register
    def copying_sections(reading: CopyingReading) -> list[Section]: ...
"""

from dataclasses import asdict
from functools import singledispatch
from html import escape
from importlib import import_module
from typing import Any

import plotly.express as px
import plotly.graph_objects as go

from bilens.analysis import Reading
from bilens.paper.notebook import NotebookFigure
from bilens.sections import Panel, Picture, Section, Table, captioned, distinct, plain, plotly_text

PAGES = {
    "bilens.data.images": "images",
    "bilens.images.bonds": "bonds",
    "bilens.images.certify": "certify",
    "bilens.images.classifier": "classifier",
    "bilens.images.deep": "deep",
    "bilens.images.explanation": "explanation",
    "bilens.circuits.reading": "circuit",
    "bilens.flows.graph": "graph",
    "bilens.flows.reading": "flow",
    "bilens.flows.weights": "flow",
    "bilens.language.contexts": "language",
    "bilens.language.heads": "language",
    "bilens.language.ngrams": "language",
    "bilens.language.outputs": "language",
    "bilens.flows.summary": "language",
}
"""Modules of this room by those of the readings that they show."""


def import_page(reading: Reading) -> None:
    """Import the module that registers how a reading of bilens is shown, if there is one.

    Those of language models take seconds, which readings of images do without.
    """
    if name := PAGES.get(type(reading).__module__):
        import_module(f"bilens.pages.{name}")


@singledispatch
def sections_of(reading: Reading) -> list[Section]:
    """Return the content of a reading as sections of a page; by default its table and its plot."""
    frame, row = reading.frame(), list[Panel]()
    if len(frame.columns):
        row.append(Table(frame, "", reading.formats))
    if reading.axes:
        row.append(Picture("plot", reading.plot))
    return [Section(reading.title, reading.explanation, [row], reading.facts())]


@singledispatch
def plot_of(reading: Reading) -> go.Figure:
    """Draw the picture of a reading; by default its main table."""
    return table_plot(reading)


def table_plot(reading: Reading) -> go.Figure:
    """Draw the main table of a reading, in plotly's default template."""
    frame = reading.frame().map(lambda cell: plotly_text(cell) if isinstance(cell, str) else cell)
    # Numbers are points of a line, names are bars.
    is_line = frame[reading.axes["x"]].dtype.kind in "if"
    drawn = (
        px.line(frame, markers=True, **reading.axes) if is_line else px.bar(frame, **reading.axes)
    )
    return NotebookFigure(drawn)


@singledispatch
def record_of(reading: Reading) -> dict[str, Any]:
    """Return the numbers of a reading for JSON; by default its facts, tables and texts."""
    return facts_and_tables(reading)


def facts_and_tables(reading: Reading) -> dict[str, Any]:
    """Return the facts of a reading, each table as rows, and each text as lines.

    No entry takes the place of another of its name; see `Reading.tables`.
    """
    entries: list[tuple[str, Any]] = [(name, plain(value)) for name, value in reading.facts()]
    for name, part in captioned(reading.sections()):
        rows = plain(part.frame) if isinstance(part, Table) else list(map(asdict, part.lines))
        entries.append((name, rows))
    names = distinct(name for name, _ in entries)
    return dict(zip(names, (value for _, value in entries), strict=True))


def notebook_view(reading: Reading) -> dict[str, Any]:
    """Return what a notebook shows of a reading: its line and first rows, or else its picture.

    The picture is as Plotly shows figures in this notebook, and beside it stands one without
    scripts; the rows, if matplotlib is missing.
    """
    line, shown = f"<p><code>{escape(repr(reading))}</code></p>", dict[str, Any]()
    if reading.is_picture:
        shown = dict(reading.plot()._repr_mimebundle_())
    if "text/html" not in shown and reading.is_quick:
        shown["text/html"] = _rows_html(reading)
    return {**shown, "text/plain": repr(reading), "text/html": line + shown.get("text/html", "")}


def _rows_html(reading: Reading) -> str:
    """Return the first rows, escaped, with bars behind the numbers that are plotted."""
    frame = reading.frame()
    if not len(frame.columns):
        return ""
    # Whole frames would fill a notebook.
    shown = frame.head(10)
    style = shown.style.hide(axis="index")
    # Bars of zeros have no length to be a share of.
    if reading.axes and shown[reading.axes["y"]].any():
        bars = {"align": "zero", "color": ["#b2182b55", "#2166ac55"], "width": 90}
        style = style.bar(subset=[reading.axes["y"]], **bars)
    numbers = dict.fromkeys(frame.select_dtypes("float"), "{:z.4g}".format)
    table: str = style.format(numbers, escape="html").to_html()
    return table + (f"<p>10 of {len(frame):,} rows</p>" if len(frame) > 10 else "")
