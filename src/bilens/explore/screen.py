"""A screen: controls that hold its state, parts of the page that show it, and its address."""

import math
import re
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from html import escape
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, urlencode

from matplotlib.figure import Figure

from bilens.errors import BilensError
from bilens.figures.sheet import figure_html
from bilens.lazy_imports import gradio as gr
from bilens.sections import Fact
from bilens.sections import shown as shown_fact


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


def picture(name: str) -> gr.HTML:
    """Lay out a place for a figure, which is hidden as long as there is none."""
    return html(name, visible=False, elem_classes="bilens-plot")


def shown_plot(figure: Figure, name: str) -> str:
    """Return a figure for a place of `picture`."""
    return figure_html(figure, name)


class StateError(BilensError):
    """A field of a state that does not fit the model, or others, one of which may be at fault."""

    def __init__(self, field: str, reason: str, others: tuple[str, ...] = ()) -> None:
        super().__init__(f"{field}: {reason}")
        self.fields, self.reason = (field, *others), reason


def check_ranges(state: Any, **ranges: tuple[int, int]) -> None:
    """Raise if a number of a state lies outside of its lowest and highest."""
    for name, (lowest, highest) in ranges.items():
        value = getattr(state, name)
        if not lowest <= value <= highest:
            raise StateError(
                name, f"{value!s:.40} is not a whole number from {lowest} to {highest}"
            )


KINDS = {
    str: "a text",
    list: "a list of texts",
    bool: "True or False",
    int: "a whole number",
    float: "a number",
}
"""Types of the values of components, and what they are called."""


def check_sent(field: str, value: Any, types: tuple[type, ...]) -> None:
    """Raise if a value that a browser sent, which may be anything, has none of the types."""
    is_list = type(value) is list and all(type(part) is str for part in value)
    fits = type(value) in types and (is_list or not isinstance(value, list))
    if not fits:
        shown = "An empty box" if value is None else f"{value!s:.40}"
        raise StateError(field, f"{shown} is not {KINDS[types[-1]]}")
    # Half of a surrogate pair is no letter: neither a tokenizer nor an address takes it.
    if re.search("[\ud800-\udfff]", "".join(value) if isinstance(value, str | list) else ""):
        raise StateError(field, "it holds half of a surrogate pair, expected whole letters")


def check_tokens(model: Any, **fields: Iterable[str]) -> None:
    """Raise if a field of a state names an unknown token."""
    for field, names in fields.items():
        for name in names:
            with error_beside(field, f"token={name!r}, "):
                model.token(name)


@contextmanager
def error_beside(field: str, prefix: str) -> Iterator[None]:
    """Say an error beside the control of a field, which its text need not name then."""
    try:
        yield
    except StateError:
        raise
    except BilensError as error:
        raise StateError(field, str(error).removeprefix(prefix)) from error


LONGEST = 4000
"""Letters of a query: browsers and servers refuse addresses that are much longer."""


def write_address(state: Any, start: Any) -> tuple[str, list[str]]:
    """Return the query of a state, its differences from the start, and fields that are too long."""
    parts = {}
    for field in fields(state):
        value = getattr(state, field.name)
        if value != getattr(start, field.name):
            # An empty list has to differ from a field that is left out.
            values = (value or ("",)) if isinstance(value, tuple) else (value,)
            parts[field.name] = urlencode([(field.name, part) for part in values])
    left_out = []
    # The longest part goes first, such as a drawing, so that as few as possible go.
    while len(query := "&".join(parts.values())) > LONGEST:
        left_out.append(max(parts, key=lambda name: len(parts[name])))
        del parts[left_out[-1]]
    return query, left_out


def read_address(start: Any, query: Iterable[tuple[str, str]]) -> Any:
    """Return the state of a query; fields that it does not name are as at the start.

    Parts of other names are ignored: hosts add their own.
    """
    given: dict[str, list[str]] = {}
    for name, value in query:
        given.setdefault(name, []).append(value)
    changes: dict[str, Any] = {}
    for field in fields(start):
        if field.name not in given:
            continue
        values, default = given[field.name], getattr(start, field.name)
        if isinstance(default, tuple):
            changes[field.name] = tuple(value for value in values if value)
        elif isinstance(default, bool):
            changes[field.name] = values[-1] == "True"
        elif isinstance(default, float):
            changes[field.name] = _decimal(field.name, values[-1])
        elif isinstance(default, int):
            changes[field.name] = _number(field.name, values[-1])
        else:
            changes[field.name] = values[-1]
    return replace(start, **changes)


def _decimal(name: str, text: str) -> float:
    try:
        number = float(text[:40])
    except ValueError:
        number = math.nan
    if not math.isfinite(number):
        raise StateError(name, f"{text[:40]!r} is not a number")
    return number


def _number(name: str, text: str) -> int:
    # int() takes other digits and underscores too, and any length.
    if not (text.isascii() and text.isdigit() and len(text) < 10):
        raise StateError(name, f"{text[:40]!r} is not a whole number")
    return int(text)


Updates = dict[Any, Any]

AT_ONCE = 4
"""Visitors whose clicks run at once."""


@dataclass(frozen=True)
class Control:
    """A control of a field of the state.

    Attributes:
        component: of Gradio.
        takes: types of the component's values; by default that of the field.
        read: the field's value from the component's.
        write: settings of the component that show a value of the field.
        say: settings of the component that show a message beside it.
        event: of the component; by default `input`, which the page itself never triggers.
        is_typed: what a person writes, and is left as it is when it is refused.
    """

    component: Any
    takes: tuple[type, ...] = ()
    read: Callable[[Any], Any] = lambda value: value
    write: Callable[[Any], dict[str, Any]] = lambda value: {"value": value}
    say: Callable[[str], dict[str, Any]] = lambda text: {"info": text}
    event: str = "input"
    is_typed: bool = True


WAITS = "Waits until the other boxes fit."


class Screen:
    """Put inside a `gr.Blocks`: lay out components, name them here, then `connect`.

    Args:
        view: a view of a model, with a state to start with in `start`, a dataclass, and a method
            `checked` that returns any other state if it fits the model.
    """

    def __init__(self, view: Any) -> None:
        self.view = view
        self.controls: dict[str, Control] = {}
        self.parts: list[tuple[frozenset[str], Callable[[Any], Updates]]] = []
        self.outputs: list[Any] = []
        self.group: frozenset[str] = frozenset()
        self.buttons: list[Any] = []

    def control(self, field: str, component: Any, **options: Any) -> None:
        """Let a component set a field of the state; see `Control`."""
        self.controls[field] = Control(component, **options)

    def choice(self, field: str, choices: Sequence[Any], **settings: Any) -> Any:
        """Lay out a list to choose a field from; other input is refused.

        Choices are names, whose numbers the field holds, or pairs of a name and a value. `settings`
        are those of Gradio's list.
        """
        pairs = [c if isinstance(c, tuple) else (c, number) for number, c in enumerate(choices)]
        values: dict[Any, Any] = dict(pairs)
        start = getattr(self.view.start, field)

        def read(value: Any) -> Any:
            # The browser sends the value of an entry, or the text that was typed.
            value = values.get(value, value)
            if type(value) is not type(start):
                raise StateError(field, f"{str(value)[:40]} is not one of the choices")
            return value

        # Without custom values, input that is not in the list is dropped without a word.
        options: dict[str, Any] = {"allow_custom_value": True, "min_width": 120, **settings}
        component = gr.Dropdown(pairs, value=start, **options)
        self.control(field, component, takes=(str, type(start)), read=read)
        return component

    def part(
        self, names: str, outputs: Iterable[Any], show: Callable[[Any], Iterable[Any]]
    ) -> None:
        """Show something of the state in outputs: of the named fields, with spaces between them."""
        outputs = list(outputs)
        self.outputs += outputs
        self.parts.append(
            (frozenset(names.split()), lambda state: dict(zip(outputs, show(state), strict=True)))
        )

    def together(self, names: str, button: Any) -> None:
        """Let the named fields change together or not at all, also at a click on a button."""
        self.group |= frozenset(names.split())
        self.buttons.append(button)

    def connect(self) -> None:
        """Tie everything together; the address of the view and its button come last."""
        bar, script = (
            Path(__file__).with_name(f"address_bar.{kind}").read_text(encoding="utf-8")
            for kind in ("html", "js")
        )
        self.bar = html("address", html_template=bar, js_on_load=script, note="")
        # None until the first view has been computed.
        self.seen = gr.State(None)
        self.restored = gr.State(0)
        components = [control.component for control in self.controls.values()]
        outputs = {self.seen, *components, *self.outputs, self.bar}
        events = [getattr(c.component, c.event) for c in self.controls.values()]
        # An address sets the fields by an event of its own, which is answered at once; the change
        # of `restored` then computes the view as any change of a field does. So text that is typed
        # meanwhile stays, and the last request is always the one that is shown. Everything that is
        # computed arrives in one update: a browser loses some of those that come one by one.
        event: dict[str, Any] = {
            "show_progress": "hidden",
            "trigger_mode": "always_last",
            "api_visibility": "private",
            # A control's own errors leave the box as it is, and hold back later input.
            "preprocess": False,
        }
        options = {**event, "concurrency_limit": AT_ONCE, "concurrency_id": "screen"}
        changes = [*events, *(button.click for button in self.buttons), self.restored.change]
        gr.on(changes, self.on_change, [self.seen, *components], outputs, **options)
        fields: set[Any] = {self.restored, *components}
        gr.on([self.bar.input], self.on_address, [self.bar], fields, **event)
        gr.on(None, self.on_load, None, fields, **event)

    def on_change(self, seen: Any, *values: Any) -> Updates:
        """Show the state of the controls, and say beside a control why its value is refused.

        Text that was typed stays where it is; another control goes back.
        """
        before = self.view.start if seen is None else seen
        given = dict(zip(self.controls, values, strict=True))
        state, refused = self._asked(before, given)
        names = {field.name for field in fields(state)}
        changed = {n for n in names if seen is None or getattr(seen, n) != getattr(state, n)}
        updates: Updates = {}
        if changed:
            query, left_out = write_address(state, self.view.start)
            note = f"Too long for an address, and left out of it: {', '.join(left_out)}."
            bar = gr.update(value=query, note=escape(note) if left_out else "")
            updates = {self.seen: state, self.bar: bar}
        # A box of a group may have waited, and fit again without a change.
        for field in self.controls.keys() & (changed | self.group) - refused.keys():
            control = self.controls[field]
            _merge(updates, control.component, gr.update(**control.say("")))
        for field, reason in refused.items():
            control = self.controls[field]
            # An empty box is about to be filled.
            stays = given[field] is None or (isinstance(given[field], str) and control.is_typed)
            stays |= reason == WAITS
            back = {} if stays else control.write(getattr(before, field))
            _merge(updates, control.component, gr.update(**back, **control.say(reason)))
        for depends, show in self.parts:
            if seen is None or depends & changed:
                for component, update in show(state).items():
                    _merge(updates, component, update)
        return updates

    def _asked(self, seen: Any, given: dict[str, Any]) -> tuple[Any, dict[str, str]]:
        """Return the state of the controls, and the reasons why controls were refused."""
        refused: dict[str, str] = {}
        state = seen
        for field, control in self.controls.items():
            try:
                check_sent(field, given[field], control.takes or (type(getattr(seen, field)),))
                value = control.read(given[field])
                state = replace(state, **{field: value})
            except StateError as error:
                refused[field] = error.reason
        state = self._waiting(seen, state, refused)
        # A check stops at the first field that does not fit. That field goes back, and the others
        # are checked again, so that one refusal does not hold back the others. If the field has
        # not changed, it was a changed one that stopped fitting it.
        while True:
            try:
                return self.view.checked(state), refused
            except StateError as error:
                changed = [n for n in self.controls if getattr(state, n) != getattr(seen, n)]
                if not changed:
                    raise
                field = next((name for name in error.fields if name in changed), changed[-1])
                refused[field] = error.reason
                state = replace(state, **{field: getattr(seen, field)})
                state = self._waiting(seen, state, refused)

    def _waiting(self, seen: Any, state: Any, refused: dict[str, str]) -> Any:
        """Return the state without the changes of a group, if one of its fields is refused."""
        if not self.group & refused.keys():
            return state
        for field in sorted(self.group - refused.keys()):
            if getattr(state, field) != getattr(seen, field):
                refused[field] = WAITS
        back = {field: getattr(seen, field) for field in self.group}
        return replace(state, **back)

    def on_address(self, query: str) -> Updates:
        """Set the fields to those of an address, as when a person goes back."""
        return self._restored(parse_qsl(query, keep_blank_values=True))

    def on_load(self, request: gr.Request) -> Updates:
        """Set the fields to those of the page's address."""
        return self._restored(request.query_params.multi_items())

    def _restored(self, query: Iterable[tuple[str, str]]) -> Updates:
        state = self.view.start
        try:
            state = self.view.checked(read_address(state, query))
        except StateError as error:
            gr.Warning(escape(f"The address cannot be shown. {error}"))
        updates: Updates = {self.restored: time.monotonic_ns()}
        for field, control in self.controls.items():
            shown = {**control.write(getattr(state, field)), **control.say("")}
            updates[control.component] = gr.update(**shown)
        return updates


def _merge(updates: Updates, component: Any, update: Any) -> None:
    """Add an update of a component, which may have one with other settings already."""
    earlier = updates.get(component)
    both = isinstance(update, dict) and isinstance(earlier, dict)
    updates[component] = {**earlier, **update} if both else update  # type: ignore[dict-item]
