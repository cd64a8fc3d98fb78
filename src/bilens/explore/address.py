"""What a screen shows, as the query of an address that can be shared."""

from collections.abc import Iterable
from dataclasses import fields, replace
from typing import Any, TypeVar
from urllib.parse import urlencode

from bilens.errors import BilensError

__all__ = ["read_address", "write_address"]

State = TypeVar("State")


def write_address(state: Any, start: Any) -> str:
    """The query of a state: what differs from the state that a screen starts with.

    Args:
        state: a dataclass of numbers, texts and tuples of texts.
        start: of the same class.
    """
    pairs = []
    for name, value in _changed(state, start):
        pairs += (
            [(name, part) for part in value or ("",)]
            if isinstance(value, tuple)
            else [(name, value)]
        )
    return urlencode(pairs)


def read_address(start: State, query: Iterable[tuple[str, str]]) -> State:
    """The state that a query stands for; what it does not name is as at the start.

    Parts of other names are left alone: hosts add their own.

    Raises:
        BilensError: a number is none.
    """
    given: dict[str, list[str]] = {}
    for name, value in query:
        given.setdefault(name, []).append(value)
    found: dict[str, Any] = {}
    for field in fields(start):  # type: ignore[arg-type]
        if field.name not in given:
            continue
        values, default = given[field.name], getattr(start, field.name)
        if isinstance(default, tuple):
            found[field.name] = tuple(value for value in values if value)
        elif isinstance(default, int):
            found[field.name] = _number(field.name, values[-1])
        else:
            found[field.name] = values[-1]
    return replace(start, **found)  # type: ignore[type-var]


def _changed(state: Any, start: Any) -> list[tuple[str, Any]]:
    values = [(field.name, getattr(state, field.name)) for field in fields(state)]
    return [(name, value) for name, value in values if value != getattr(start, name)]


def _number(name: str, text: str) -> int:
    # int() takes other figures and underscores too, and any length.
    if not (text.isascii() and text.isdigit() and len(text) < 10):
        raise BilensError(f"The address says {name}={text!r}; expected a whole number")
    return int(text)
