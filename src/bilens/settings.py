"""Settings are frozen dataclasses whose annotations say what each may be; read here in one way."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cache
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from bilens.errors import BilensError, CheckpointError

__all__ = [
    "Between",
    "CheckedSettings",
    "Count",
    "Depth",
    "NotNegative",
    "Place",
    "Positive",
    "Seed",
    "Share",
    "Size",
    "Tolerance",
    "check_settings",
    "fits",
    "read_settings",
    "said",
]

Settings = TypeVar("Settings")


@dataclass(frozen=True)
class Between:
    """The limits of a number, to be written into its annotation: `Annotated[int, Between(1, 8)]`.

    Attributes:
        least: smallest value.
        most: largest value.
        above: `least` itself is not allowed.
        below: `most` itself is not allowed.
    """

    least: float = -math.inf
    most: float = math.inf
    above: bool = False
    below: bool = False

    def holds(self, value: float) -> bool:
        """Whether a number lies within; NaN and infinite numbers never do."""
        over = value > self.least if self.above else value >= self.least
        under = value < self.most if self.below else value <= self.most
        return math.isfinite(value) and over and under

    def __str__(self) -> str:
        """As an error says it."""
        lower = f"{'above' if self.above else 'at least'} {self.least:g}"
        upper = f"{'below' if self.below else 'at most'} "
        upper += f"{self.most:,.0f}" if self.most >= 1e4 else f"{self.most:g}"
        limits = [lower] * (self.least > -math.inf) + [upper] * (self.most < math.inf)
        return " and ".join(limits) or "finite"


Size = Annotated[int, Between(1, 2**20)]
"""A width, or a number of layers, heads or classes: more than a million is a mistake."""
Count = Annotated[int, Between(1, 10**15)]
"""How many; no computer counts further."""
Depth = Annotated[int, Between(1, 1024)]
"""A number of layers, each of which is a module of its own."""
Seed = Annotated[int, Between(0, 2**32 - 1)]
"""What random numbers start from; NumPy takes no larger one."""
Place = Annotated[int, Between(0, 2**31 - 1)]
"""Of a token in a text, from 0, or how far it stands behind another."""
Share = Annotated[float, Between(0, 1)]
"""A part of a whole."""
Positive = Annotated[float, Between(0, 1e12, above=True)]
"""A number above 0, and so small that a product of two does not leave the range of float32."""
Tolerance = Annotated[float, Between(0, 1, above=True, below=True)]
"""An error relative to what is looked for."""
NotNegative = Annotated[float, Between(0, 1e12)]
"""The same, or 0."""


def check_settings(settings: Any, kind: type[Any] | None = None) -> None:
    """Hold the fields of a dataclass to their annotations; meant for `__post_init__`.

    Knows int, float, bool, str, `Literal`, tuples, None, unions of these, and `Between` inside
    `Annotated`. An int passes for a float, a bool never for an int; a float has to be finite.

    Args:
        settings: an instance.
        kind: the base class whose fields are meant; by default all fields are.

    Raises:
        BilensError: names the field, what it holds and what was expected.
    """
    for name, hint in _hints(kind or type(settings)).items():  # type: ignore[arg-type]
        value = getattr(settings, name)
        if not fits(value, hint):
            raise BilensError(f"{name}={value!r}, expected {said(hint)}")


@dataclass(frozen=True)
class CheckedSettings:
    """A dataclass whose fields are what their annotations say, or it cannot be made."""

    def __post_init__(self) -> None:
        check_settings(self)


def read_settings(kind: type[Settings], given: Mapping[str, Any], source: object) -> Settings:
    """Make settings of what a file holds; JSON's lists become tuples.

    Args:
        kind: a dataclass that checks itself.
        given: its fields by name, all of them and nothing else.
        source: the file, for errors.

    Raises:
        CheckpointError: a field is missing, unknown or out of range.
    """
    known = {field.name for field in fields(kind)}  # type: ignore[arg-type]
    for complaint, names in (("unknown", given.keys() - known), ("missing", known - given.keys())):
        if names:
            raise CheckpointError(
                f"{source}: {complaint} settings: {', '.join(sorted(names))}. It was written by "
                "another version of bilens, or edited."
            )
    tupled = {name: tuple(v) if isinstance(v, list) else v for name, v in given.items()}
    try:
        return kind(**tupled)
    except BilensError as error:
        raise CheckpointError(f"{source} cannot be used: {error}") from error


@cache
def _hints(kind: type[Any]) -> dict[str, Any]:
    hints = get_type_hints(kind, include_extras=True)
    return {field.name: hints[field.name] for field in fields(kind)}


def fits(value: Any, hint: Any) -> bool:  # noqa: PLR0911
    """Whether a value is what an annotation allows."""
    origin, parts = get_origin(hint), get_args(hint)
    if origin is Annotated:
        limits = [extra for extra in parts[1:] if isinstance(extra, Between)]
        return fits(value, parts[0]) and all(limit.holds(value) for limit in limits)
    if origin in (Union, UnionType):
        return any(fits(value, part) for part in parts)
    if origin is Literal:
        return any(type(value) is type(part) and value == part for part in parts)
    if origin in (tuple, Sequence):
        if not isinstance(value, tuple):
            return False
        if origin is Sequence or parts[-1] is Ellipsis:
            return all(fits(item, parts[0]) for item in value)
        return len(value) == len(parts) and all(map(fits, value, parts))
    if hint is float:
        return (
            isinstance(value, (int, float))
            and not isinstance(value, bool)
            and (math.isfinite(value))
        )
    if hint is int:
        return isinstance(value, int) and not isinstance(value, bool)
    return isinstance(value, NoneType if hint is None else hint)


def said(hint: Any) -> str:
    """What an annotation allows, as an error says it."""
    origin, parts = get_origin(hint), get_args(hint)
    if origin is Annotated:
        limits = [str(extra) for extra in parts[1:] if isinstance(extra, Between)]
        return ", ".join([said(parts[0]), *limits])
    if origin in (Union, UnionType):
        return " or ".join(said(part) for part in parts)
    if origin is Literal:
        return "one of " + ", ".join(map(str, parts)) if len(parts) > 1 else repr(parts[0])
    if origin in (tuple, Sequence):
        if origin is Sequence or parts[-1] is Ellipsis:
            return f"a list, each {said(parts[0])}"
        return f"{len(parts)} values, each {said(parts[0])}"
    names = {int: "a whole number", float: "a finite number", bool: "true or false", str: "text"}
    return "none" if hint in (None, NoneType) else names.get(hint, str(hint))
