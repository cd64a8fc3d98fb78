"""Panels of registered analyses: controls from the parameters, and the sections of the reading."""

import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import make_dataclass, replace
from functools import lru_cache
from html import escape
from types import MappingProxyType
from typing import Annotated, Any, Literal, get_args, get_origin

from bilens.analyses import check_once
from bilens.analysis import REQUIRED, Analysis, Option, Reading
from bilens.data import ImageData
from bilens.errors import BilensError
from bilens.explore.screen import (
    Screen,
    StateError,
    facts_html,
    heading,
    html,
    note_html,
    picture,
    shown_plot,
)
from bilens.lazy_imports import gradio as gr
from bilens.pages.page import contexts_html, table_html
from bilens.sections import ContextList, Fact, FlowDrawing, Picture, Section, Table, fact_text

NO_SETTINGS: Mapping[str, Any] = MappingProxyType({})
PLOTS = 8
"""Figures of a reading that its panel has room for."""


class ReadingPanel:
    """A panel of an analysis: its settings are fields of a screen's state.

    Args:
        model: Return the model, for the thread that asks.
        inputs: Texts or images of the page.
        page_fields: Options that fields of the page's own state set, with the names of these.
        analysis: See `bilens.analysis`.
        fixed: Values of options that have no control.
        readers: Functions from the text of a page's field to the value of the option it sets.
        recorded: Values that options begin with in place of their defaults.
    """

    def __init__(
        self,
        model: Callable[[], Any],
        inputs: Sequence[Any],
        page_fields: Mapping[str, str],
        analysis: Analysis,
        *,
        fixed: Mapping[str, Any] = NO_SETTINGS,
        readers: Mapping[str, Callable[[str], Any]] = NO_SETTINGS,
        recorded: Mapping[str, Any] = NO_SETTINGS,
    ) -> None:
        self.analysis, self.model, self.inputs, self.fixed = analysis, model, inputs, fixed
        self.readers = readers
        options = [
            replace(option, default=recorded.get(option.name, option.default))
            for option in analysis.options
            # Those that the explorer sets for the whole page are left out.
            if option.name not in ("data", "data_dir", "position")
        ]
        self.page_fields = {
            option.name: page_fields[option.name]
            for option in options
            if option.name in page_fields and option.name not in fixed
        }
        controlled = [o for o in options if o.name not in (*self.page_fields, *fixed)]
        self.options = [o for o in controlled if _kind(o) and o.default is not REQUIRED]
        prefix = analysis.name.replace("-", "_")
        self.fields = {option.name: f"{prefix}_{option.name}" for option in self.options}

    @property
    def state_fields(self) -> list[tuple[str, type, Any]]:
        """Name, type and default of each field that the panel adds to the state."""
        return [(self.fields[o.name], type(o.default), o.default) for o in self.options]

    def reading(self, state: Any) -> Reading:
        # Only the fields of this panel: a change of another panel then finds its reading cached.
        fields = {**self.page_fields, **self.fields}.items()
        return self._read(tuple((n, getattr(state, f)) for n, f in fields if hasattr(state, f)))

    @lru_cache(maxsize=8)  # noqa: B019  a panel lives as long as its app
    def _read(self, settings: tuple[tuple[str, Any], ...]) -> Reading:
        # An empty box stands for the default of the function.
        values = {**self.fixed, **{name: value for name, value in settings if value != ""}}
        for name in self.readers.keys() & values.keys():
            values[name] = self.readers[name](values[name])
        return self.analysis.run(self.model(), values, self._load)

    def _load(self, settings: Any, images: bool, optional: bool) -> Any:
        # The page's texts and images are for readings that need them.
        fitting = [item for item in self.inputs if isinstance(item, ImageData) is images]
        return None if optional or not fitting else fitting[0]

    def lay_out(self, screen: Screen) -> None:
        """Lay out the heading, the controls and the places for content."""
        name = self.analysis.name
        heading(self.analysis.about.partition("\n")[0].rstrip("."))
        if self.options:
            with gr.Row():
                for option in self.options:
                    self._control(option, screen)
        # A text, and then each figure with the text after it.
        with gr.Column(elem_id=f"reading-{name}"):
            places: list[Any] = [html(f"{name}-text")]
            for number in range(PLOTS):
                places.append(picture(f"{name}-{number}"))
                places.append(html(f"{name}-text-{number}"))

        def show(state: Any) -> list[Any]:
            try:
                texts, figures = texts_and_figures(self.reading(state).sections(), name)
            except BilensError as error:
                texts, figures = [note_html(str(error))], []
            # Figures that have no place are left out; their texts are not.
            texts[PLOTS:] = ["".join(texts[PLOTS:])]
            updates: list[Any] = [texts[0]]
            for number in range(PLOTS):
                # Gradio lays components out once: places without a figure are hidden.
                plot, text = gr.update(value=None, visible=False), ""
                if number < len(figures):
                    drawn = shown_plot(figures[number], f"{name}-{number}")
                    plot, text = gr.update(value=drawn, visible=True), texts[number + 1]
                updates += [plot, text]
            return updates

        names = {*self.page_fields.values(), *self.fields.values()}
        screen.part(" ".join(names), places, show)

    def _control(self, option: Option, screen: Screen) -> None:
        field, kind = self.fields[option.name], _kind(option)
        settings: dict[str, Any] = {
            "label": option.name.replace("_", " "),
            "info": option.help,
            "elem_id": field,
            "min_width": 220,
            "scale": 0,
        }
        # The description comes back when a message about a value that does not fit goes.
        options: dict[str, Any] = {"say": lambda text: {"info": text or option.help}}
        if kind is Literal:
            choices = [(str(choice), choice) for choice in get_args(_plain_type(option.type))]
            screen.choice(field, choices, label=option.name, info=option.help, elem_id=field)
        elif kind is bool:
            screen.control(field, gr.Checkbox(option.default, **settings), **options)
        elif kind in (int, float):
            number = gr.Number(option.default, precision=0 if kind is int else None, **settings)
            # A browser sends 3 for 3.0.
            options |= {"takes": (int, float) if kind is float else (float, int), "event": "submit"}
            screen.control(field, number, read=_number_reader(field, kind), **options)
        else:
            screen.control(field, gr.Textbox(option.default, **settings), event="submit", **options)


def with_settings(start: Any, panels: Sequence[ReadingPanel]) -> Any:
    """Return a state, a dataclass, with a field for each setting of panels.

    So each is in the address, and goes back with Back, without further code.
    """
    check_once([panel.analysis for panel in panels])
    added = [field for panel in panels for field in panel.state_fields]
    kind = make_dataclass(type(start).__name__, added, bases=(type(start),), frozen=True)
    return kind(**vars(start))


def lay_out(view: Any, facts: Sequence[Fact], *parts: Callable[[Screen], None]) -> Screen:
    """Lay out a screen inside a `gr.Blocks`: parts of the page, the view's panels, and facts."""
    screen = Screen(view)
    for number, block in enumerate([*parts, *(panel.lay_out for panel in view.panels)]):
        if number == 1:  # after the answer that the page opens with
            html("parts-of-page", '<nav aria-label="parts of the page"></nav>')
        block(screen)
    html("facts", facts_html(facts))
    screen.connect()
    return screen


def sections_html(sections: Sequence[Section], name: str) -> str:
    """Return headings, paragraphs, tables and texts of sections; escaped."""
    return "".join(texts_and_figures(sections, name)[0])


def texts_and_figures(sections: Sequence[Section], name: str) -> tuple[list[str], list[Any]]:
    """Return the figures of sections, and what is before the first and after each; escaped."""
    texts, figures = [""], []
    for section in sections:
        texts[-1] += f'<h3 class="bilens-section">{escape(section.title)}</h3>'
        texts[-1] += note_html(section.text) if section.text else ""
        facts = ", ".join(fact_text(*fact) for fact in section.facts)
        texts[-1] += note_html(f"{facts}.") if facts else ""
        for row in section.rows:
            drawn = [part.figure for part in row if isinstance(part, Picture)]
            figures += drawn
            texts += [""] * len(drawn)
            parts = [_part_html(part, f"{name} {section.title}") for part in row]
            texts[-1] += f'<div class="tables">{"".join(parts)}</div>' if any(parts) else ""
    return texts, figures


def _part_html(part: Any, name: str) -> str:
    if isinstance(part, Table):
        return table_html(part, re.sub(r"\W+", "-", f"{name} {part.caption}").strip("-"))
    if isinstance(part, ContextList):
        return contexts_html(part)
    if isinstance(part, FlowDrawing):
        return note_html("The graph is on the page that the command writes with --output.")
    return ""


def _plain_type(kind: Any) -> Any:
    return get_args(kind)[0] if get_origin(kind) is Annotated else kind


def _kind(option: Option) -> Any:
    """Return the kind of control that an option has; None if it has no control."""
    kind = _plain_type(option.type)
    if get_origin(kind) is Literal:
        return Literal
    return next((k for k in (bool, int, float, str) if type(option.default) is k), None)


def _number_reader(field: str, kind: type) -> Callable[[Any], Any]:
    def read(value: Any) -> Any:
        # An address takes whole numbers of up to nine digits.
        largest = 10**9 - 1 if kind is int else sys.float_info.max
        if not (abs(value) <= largest and value == kind(value)):
            raise StateError(field, f"{value!s:.40} is not a {'whole ' * (kind is int)}number")
        return kind(value)

    return read
