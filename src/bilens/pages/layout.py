"""What a reading shows, by its type: the sections of a page, a picture, and a record for JSON.

A reading of your own may register a page and a picture of its own:

    @sections_of.register
    def copying_sections(reading: CopyingReading) -> list[Section]: ...
"""

from dataclasses import asdict
from functools import singledispatch
from html import escape
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from bilens.analysis import Reading
from bilens.figures.sheet import SERIES, Figure, add_legend, image_html, new_figure, styled
from bilens.sections import Panel, Picture, Section, Table, captioned, distinct, fact_text, plain


def import_page(reading: Reading) -> None:
    """Import the module that shows the readings of a room of bilens: it has the room's name.

    Those of language models take seconds, which readings of images do without.
    """
    package, _, module = type(reading).__module__.partition(".")
    name = f"bilens.pages.{module.partition('.')[0]}"
    if package == "bilens" and find_spec(name):
        import_module(name)


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
def plot_of(reading: Reading) -> Figure:
    """Draw the picture of a reading; by default its main table."""
    return table_plot(reading)


@styled
def table_plot(reading: Reading) -> Figure:
    """Draw the main table of a reading: numbers as lines, and up to 30 names as bars."""
    frame = reading.frame()
    x, y, color = (reading.axes.get(name) for name in ("x", "y", "color"))
    groups = list(dict.fromkeys(frame[color])) if color else [""]
    shades = {group: SERIES[index % len(SERIES)] for index, group in enumerate(groups)}
    if frame[x].dtype.kind in "if":
        figure, axes = new_figure(alt=f"{reading.title}: {y} by {x}")
        for group in groups:
            rows = frame[frame[color] == group] if color else frame
            axes.plot(rows[x], rows[y], color=shades[group], marker="o", markersize=3, label=group)
        axes.set_xlabel(str(x))
        axes.set_ylabel(str(y))
    else:
        head = frame.head(30)
        title = f"{len(head)} of {len(frame):,} rows" if len(head) < len(frame) else ""
        alt = f"{reading.title}: {y} by {x}"
        figure, axes = new_figure(height=110 + 20 * len(head), title=title, alt=alt)
        for group in groups:
            places = (
                [i for i, of in enumerate(head[color]) if of == group]
                if color
                else range(len(head))
            )
            axes.barh(list(places), head[y].iloc[list(places)], color=shades[group], label=group)
        axes.set_yticks(range(len(head)), [str(name) for name in head[x]])
        axes.invert_yaxis()
        axes.set_xlabel(str(y))
        axes.set_ylabel(str(x))
    if color and len(groups) <= 12:
        add_legend(axes, str(color))
    return figure


def record_of(reading: Reading) -> dict[str, Any]:
    """Return a reading for JSON: its answer, and its plain fields, or its facts and tables."""
    record = plain(reading) if reading.has_plain_fields else facts_and_tables(reading)
    return {"answer": answer, **record} if (answer := reading.said) else record


def facts_and_tables(reading: Reading) -> dict[str, Any]:
    """Return the facts of a reading, each table as rows, and each text as lines.

    No entry takes the place of another of its name; see `Reading.tables`.
    """
    facts = (fact for fact in reading.facts() if fact_text(*fact)[-1:] != ".")
    entries: list[tuple[str, Any]] = [(name, plain(value)) for name, value in facts]
    for name, part in captioned(reading.sections()):
        rows = plain(part.frame) if isinstance(part, Table) else list(map(asdict, part.lines))
        entries.append((name, rows))
    names = distinct(name for name, _ in entries)
    return dict(zip(names, (value for _, value in entries), strict=True))


def show(reading: Reading) -> dict[str, Any]:
    """Return what a notebook shows of a reading: its line and its picture or first rows."""
    line, picture = f"<p><code>{escape(repr(reading))}</code></p>", ""
    if reading.is_picture:
        picture = image_html(reading.plot())
    elif reading.is_quick:
        picture = _rows_html(reading)
    return {"text/plain": repr(reading), "text/html": line + picture}


def _rows_html(reading: Reading) -> str:
    """Return the first rows, escaped, with bars behind the numbers that are plotted."""
    frame = reading.frame()
    if not len(frame.columns):
        return ""
    # Whole frames would fill a notebook.
    rows = frame.head(10)
    style = rows.style.hide(axis="index")
    # Bars of zeros have no length to be a share of.
    if reading.axes and rows[reading.axes["y"]].any():
        bars = {"align": "zero", "color": ["#b2182b55", "#2166ac55"], "width": 90}
        style = style.bar(subset=[reading.axes["y"]], **bars)
    numbers = dict.fromkeys(frame.select_dtypes("float"), "{:z.4g}".format)
    table: str = style.format(numbers, escape="html").to_html()
    return table + (f"<p>10 of {len(frame):,} rows</p>" if len(frame) > 10 else "")
