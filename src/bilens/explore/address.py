"""What a screen shows, as the query of an address that can be shared."""

import math
from collections.abc import Iterable
from dataclasses import fields, replace
from typing import Any, TypeVar
from urllib.parse import urlencode

from bilens.explore.state_checks import StateError

__all__ = ["LONGEST", "read_address", "write_address"]

State = TypeVar("State")

LONGEST = 4000
"""Letters of a query: browsers and servers refuse addresses that are much longer."""


def write_address(state: Any, start: Any) -> tuple[str, list[str]]:
    """The query of a state: what differs from the state that a screen starts with.

    Args:
        state: a dataclass of numbers, texts and tuples of texts.
        start: of the same class.

    Returns:
        The query, and the names of the fields that are too long for it and were left out.
    """
    parts = {}
    for field in fields(state):
        value = getattr(state, field.name)
        if value != getattr(start, field.name):
            values = (value or ("",)) if isinstance(value, tuple) else (value,)
            parts[field.name] = urlencode([(field.name, part) for part in values])
    left_out = []
    while len(query := "&".join(parts.values())) > LONGEST:
        left_out.append(max(parts, key=lambda name: len(parts[name])))
        del parts[left_out[-1]]
    return query, left_out


def read_address(start: State, query: Iterable[tuple[str, str]]) -> State:
    """The state that a query stands for; what it does not name is as at the start.

    Parts of other names are left alone: hosts add their own.

    Raises:
        StateError: a number is expected and something else came.
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
        elif isinstance(default, bool):
            found[field.name] = values[-1] == "True"
        elif isinstance(default, float):
            found[field.name] = _decimal(field.name, values[-1])
        elif isinstance(default, int):
            found[field.name] = _number(field.name, values[-1])
        else:
            found[field.name] = values[-1]
    return replace(start, **found)  # type: ignore[type-var]


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
