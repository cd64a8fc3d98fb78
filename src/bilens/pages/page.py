"""A report as one HTML file that works offline, on a phone and on paper."""

import json
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup
from matplotlib.figure import Figure

from bilens.analysis import Reading
from bilens.checks import checked
from bilens.errors import BilensError
from bilens.figures.sheet import figure_html
from bilens.files import write_text
from bilens.lazy_imports import lazy_import
from bilens.sections import (
    Fact,
    FlowDrawing,
    Picture,
    Section,
    Table,
    fact_text,
    figures_by_name,
    signed,
)

if TYPE_CHECKING:
    from bilens import inputs, models
    from bilens.pages import model as contents
else:  # They import transformers, which takes seconds, and pages do without it.
    inputs, models = lazy_import("bilens.inputs"), lazy_import("bilens.models")
    contents = lazy_import("bilens.pages.model")


@cache
def page_templates() -> Environment:
    """Return the templates of pages and of their parts, which escape all text."""
    loader = PackageLoader("bilens", "pages")
    environment = Environment(loader=loader, autoescape=True, undefined=StrictUndefined)
    environment.filters |= {"signed": signed}
    environment.tests |= {
        "picture": lambda part: isinstance(part, Picture | Figure),
        "table": lambda part: isinstance(part, Table),
        "drawing": lambda part: isinstance(part, FlowDrawing),
    }
    return environment


@checked
def render_page(
    title: str, summary: str, facts: Sequence[Fact], sections: Sequence[Section], about: str = ""
) -> str:
    """Return the page as text, of which everything is escaped.

    In a report the title is the question, and the summary below it the answer. Facts are in a line
    below, and `about` in one above the title, such as the name of the model.
    """
    numbers = count()
    template = page_templates().get_template("page.html")
    return template.render(
        title=title,
        summary=summary,
        about=about,
        facts=facts,
        sections=sections,
        line=lambda facts: ", ".join(fact_text(*fact) for fact in facts),
        draw=lambda part, title: picture_html(part, f"figure-{next(numbers)}", title),
        pack=_safe_json,
    )


@checked
def write_page(
    path: str | Path,
    title: str,
    summary: str,
    facts: Sequence[Fact],
    sections: Sequence[Section],
    about: str = "",
) -> None:
    """Write the page of `render_page`, whole or not at all."""
    write_text(Path(path), render_page(title, summary, facts, sections, about))


@checked
def write_report(path: str | Path, readings: Sequence[Reading], *, title: str) -> dict[str, Figure]:
    """Write the page of `render_report`, whole or not at all, and return its figures by name."""
    content, sections = _report(readings, title)
    write_text(Path(path), content)
    return figures_by_name(part for section in sections for part in section.parts)


@checked
def render_report(readings: Sequence[Reading], *, title: str = "") -> str:
    """Return the sections of readings as one page.

    The first section is the question of the page, its answer and a picture. The second is open too.
    All others are closed until a reader opens them.

    Args:
        readings: Readings in the order of the page.
        title: A line above the question, such as the name of the model.

    Raises:
        BilensError: the readings have no section.
    """
    return _report(readings, title)[0]


def _report(readings: Sequence[Reading], title: str) -> tuple[str, list[Section]]:
    sections = [section for reading in readings for section in reading.sections()]
    if not sections:
        raise BilensError(f"readings has {len(readings)} and no section, expected at least one")
    first, *others = sections
    heading = title if title != first.title else ""
    sections = [replace(first, title="", text="", facts=())]
    for i, section in enumerate(others):
        sections.append(replace(section, folded=section.folded or i > 0))
    return render_page(first.title, first.text, first.facts, sections, heading), sections


@checked
def report(
    source: Any,
    path: str | Path,
    *,
    data: str | None = None,
    data_dir: str | Path | None = None,
    add: Sequence[str] = (),
    **settings: Any,
) -> Path:
    """Write the report of a model, or of readings, as one HTML file, and return its path.

    For example `report("runs/digits", "digits.html")`, or `report(reading, "page.html")`.

    Args:
        source: A run directory, the name of a repository on the hub, a model, a reading, or a
            list of readings.
        path: The page.
        data: Name of the data; by default that of the training. A loaded model needs it.
        data_dir: Folder of the data.
        add: Names of further readings, such as flow, and files with readings of your own.
        settings: Options of `bilens report`: basis, drop, metric, order, token, minus,
            layer, among, prompt.

    Raises:
        BilensError: this kind of model has no report, a setting does not exist or fit, or anything
            but the path is given beside readings, which are made already.
    """
    # `bilens report --help` has a line on each.
    of_images, of_language = "basis drop metric order", "token minus layer among prompt against"
    options = tuple(f"{of_images} {of_language}".split())
    if unknown := settings.keys() - set(options):
        raise BilensError(f"{unknown.pop()} is no setting of a report, expected {options}")
    settings |= {"data": data, "data_dir": data_dir}
    if isinstance(source, Reading | list | tuple):
        readings = [source] if isinstance(source, Reading) else list(source)
        if not readings or not all(isinstance(reading, Reading) for reading in readings):
            kinds = [type(reading).__name__ for reading in readings]
            raise BilensError(f"source holds {kinds}, expected at least one reading")
        for name, value in {**settings, "add": add or None}.items():
            if value is not None:
                raise BilensError(
                    f"{name}={value!r} has no effect on readings, which are made already; leave "
                    "it out, or give the model"
                )
        title = readings[0].title
    else:
        folder: str | Path = source if isinstance(source, str | Path) else ""
        title = f"{Path(folder).name or type(source).__name__}, read from its weights"
        if folder:
            inputs.check_data(folder, data, data_dir)
        model = models.load(folder) if folder else source
        readings = contents.report_readings(model, settings, source=folder, add=add)
    write_report(path, readings, title=title)
    return Path(path)


def picture_html(part: Picture | Figure, name: str, title: str = "") -> Markup:
    """Return a figure as an element of a page, on which no other has its name."""
    figure = part.figure if isinstance(part, Picture) else part
    return Markup(figure_html(figure, name, title))


def _safe_json(content: Any) -> Markup:
    """JSON that no text inside of it can break out of."""
    return Markup(json.dumps(content).replace("<", "\\u003c"))
