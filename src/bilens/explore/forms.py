"""Forms: the options of an analysis as boxes of a page, and what is typed there as their values."""

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType, NoneType
from typing import Annotated, Any, Literal, get_args, get_origin

from bilens.analysis import REQUIRED, Analysis, Option
from bilens.errors import BilensError
from bilens.settings import check_values, checks_of

LABELS = {
    "prompt": "A text",
    "against": "A second text",
    "token": "The next token",
    "minus": "Minus others",
    "layer": "Layer",
}
"""Options whose boxes are in sight, in their order; those of the others are folded."""
OF_THE_HOST = ("data", "data_dir", "questions")
"""Options that name files of the machine: a visitor gives none."""
NONE: Mapping[str, Any] = MappingProxyType({})


@dataclass(frozen=True)
class Box:
    """A box for an option.

    Attributes:
        option: the option.
        kind: type of its value.
        choices: texts that it can have; empty for any.
        start: the text that it begins with.
    """

    option: Option
    kind: Any
    choices: tuple[str, ...]
    start: str

    @property
    def label(self) -> str:
        """What stands above it."""
        return LABELS.get(self.option.name, self.option.name.replace("_", " "))

    def read(self, text: str) -> Any:
        """Return the value of a text.

        Raises:
            BilensError: it is not one of the choices, or no number.
        """
        if self.kind is bool:
            return text == "on"
        if self.choices:
            if text not in self.choices:
                raise self._misfit(text, f"one of {', '.join(self.choices)}")
            return get_args(self.kind)[self.choices.index(text)]
        if self.kind is str:
            return text
        try:
            # Python reads more as a number than people write: 1_000, or infinity.
            value = self.kind(text.replace("_", "x"))
        except ValueError:
            value = math.nan
        if not math.isfinite(value):
            raise self._misfit(text, "a whole number" if self.kind is int else "a number")
        return value

    def _misfit(self, text: str, expected: str) -> BilensError:
        return BilensError(f"{self.option.name}={text[:40]!r}, expected {expected}")


class Form:
    """The boxes of an analysis.

    Args:
        entry: the analysis.
        starts: the texts that boxes begin with, by option; others begin with the default.
        readers: functions from a text to a value, by option, for those with a box of their own.
    """

    def __init__(
        self,
        entry: Analysis,
        starts: Mapping[str, str] = NONE,
        readers: Mapping[str, Callable[[str], Any]] = NONE,
    ) -> None:
        self.entry, self.readers = entry, readers
        boxes = {}
        for option in entry.options:
            kind = _plain_type(option.type)
            is_choice = get_origin(kind) is Literal
            takes_text = is_choice or kind in (bool, int, float, str)
            if option.name in OF_THE_HOST or not (takes_text or option.name in readers):
                continue
            choices = tuple(map(str, get_args(kind))) if is_choice else ()
            start = starts.get(option.name, _text_of(option.default))
            boxes[option.name] = Box(option, kind, choices, start)
        self.shown = [boxes[name] for name in LABELS if name in boxes]
        self.folded = [
            box for name, box in boxes.items() if name not in LABELS and name not in readers
        ]
        self.boxes = boxes

    def texts(self, query: Iterable[tuple[str, str]] = ()) -> dict[str, str]:
        """Return the text of each box: of an address, or else the one that it begins with."""
        values = dict(query)
        return {name: values.get(name, box.start) for name, box in self.boxes.items()}

    def values(self, texts: Mapping[str, str]) -> dict[str, Any]:
        """Return the values of options, as a command has them; an empty box is the default.

        Raises:
            BilensError: a text is not one of the option's values.
        """
        values, kinds = {}, {}
        for name, text in texts.items():
            if name in self.readers:
                values[name] = self.readers[name](text)
            elif text or self.boxes[name].kind is bool:
                values[name] = self.boxes[name].read(text)
                kinds[name] = self.boxes[name].option.type
        check_values(values, checks_of(kinds))
        return values


def _plain_type(kind: Any) -> Any:
    """Return the type without its limits, and without None."""
    if get_origin(kind) is Annotated:
        return _plain_type(get_args(kind)[0])
    parts = [part for part in get_args(kind) if part is not NoneType]
    return _plain_type(parts[0]) if NoneType in get_args(kind) and len(parts) == 1 else kind


def _text_of(default: Any) -> str:
    if isinstance(default, bool):
        return "on" if default else ""
    return "" if default in (None, REQUIRED) else str(default)
