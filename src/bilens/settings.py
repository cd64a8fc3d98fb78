"""Settings: frozen dataclasses that check their fields against their annotations."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cache
from pathlib import Path
from types import NoneType, UnionType
from typing import (
    Annotated,
    Any,
    Literal,
    SupportsIndex,
    TypeVar,
    Union,
    get_args,
    get_origin,
    get_type_hints,
)

from bilens.errors import BilensError, CheckpointError

Settings = TypeVar("Settings")


@dataclass(frozen=True)
class Between:
    """Limits of a number inside its annotation: `Annotated[int, Between(1, 8)]`.

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
        """Return True for a finite number within the limits."""
        over = value > self.least if self.above else value >= self.least
        under = value < self.most if self.below else value <= self.most
        return _is_finite(value) and over and under

    def __str__(self) -> str:
        """Return the limits as an error message words them."""
        lower = f"{'above' if self.above else 'at least'} {self.least:g}"
        upper = f"{'below' if self.below else 'at most'} "
        upper += f"{self.most:,.0f}" if self.most >= 1e4 else f"{self.most:g}"
        limits = [lower] * (self.least > -math.inf) + [upper] * (self.most < math.inf)
        return " and ".join(limits) or "finite"


Size = Annotated[int, Between(1, 2**20)]
"""A width, or a number of layers, heads or classes: more than a million is a mistake."""
Count = Annotated[int, Between(1, 10**15)]
"""A count; no computer counts further."""
Depth = Annotated[int, Between(1, 1024)]
"""A number of layers, each a module."""
Seed = Annotated[int, Between(0, 2**32 - 1)]
"""A seed of random numbers; NumPy accepts no larger one."""
Place = Annotated[int, Between(0, 2**31 - 1)]
"""A token position, from 0, or a distance between two positions."""
Share = Annotated[float, Between(0, 1)]
"""A fraction from 0 to 1."""
Positive = Annotated[float, Between(0, 1e12, above=True)]
"""A number above 0, so small that the product of two stays within float32."""
Tolerance = Annotated[float, Between(0, 1, above=True, below=True)]
"""A relative error."""
NotNegative = Annotated[float, Between(0, 1e12)]
"""A number as `Positive`, or 0."""


def check_settings(settings: Any, kind: type[Any] | None = None) -> None:
    """Check the fields of a dataclass against their annotations; meant for `__post_init__`.

    Knows int, float, bool, str, `Literal`, tuples, None, unions of these, and `Between` inside
    `Annotated`. An int passes for a float, a bool never for an int; a float has to be finite.

    Args:
        settings: an instance.
        kind: a base class, to check only its fields; all fields by default.

    Raises:
        BilensError: a field does not fit. The message names it, its value and the expected type.
    """
    for name, hint in _hints(kind or type(settings)).items():  # type: ignore[arg-type]
        value = getattr(settings, name)
        if not fits(value, hint):
            raise BilensError(f"{name}={value!r}, expected {describe_type(hint)}")


@dataclass(frozen=True)
class CheckedSettings:
    """A dataclass that raises on construction if a field does not fit its annotation."""

    def __post_init__(self) -> None:
        check_settings(self)


def read_settings(kind: type[Settings], values: Mapping[str, Any], source: object) -> Settings:
    """Return settings from the values of a file; JSON lists become tuples.

    Args:
        kind: a dataclass that checks itself.
        values: all fields by name and nothing else.
        source: the file, for errors.

    Raises:
        CheckpointError: a field is missing, unknown or out of range.
    """
    known = {field.name for field in fields(kind)}  # type: ignore[arg-type]
    for complaint, names in (
        ("unknown", values.keys() - known),
        ("missing", known - values.keys()),
    ):
        if names:
            raise CheckpointError(
                f"{source}: {complaint} settings: {', '.join(sorted(names))}. It was written by "
                "another version of bilens, or edited."
            )
    tupled = {name: tuple(v) if isinstance(v, list) else v for name, v in values.items()}
    try:
        return kind(**tupled)
    except BilensError as error:
        raise CheckpointError(f"{source} cannot be used: {error}") from error


@cache
def _hints(kind: type[Any]) -> dict[str, Any]:
    hints = get_type_hints(kind, include_extras=True)
    return {field.name: hints[field.name] for field in fields(kind)}


def fits(value: Any, hint: Any) -> bool:  # noqa: PLR0911
    """Return True if a value fits an annotation."""
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
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
        return is_number and _is_finite(value)
    if hint is int:
        return isinstance(value, int) and not isinstance(value, bool)
    return isinstance(value, NoneType if hint is None else hint)


def _is_finite(value: float) -> bool:
    """Return True for a finite number that a float can hold, which not every int is."""
    try:
        return math.isfinite(value)
    except OverflowError:
        return False


def describe_type(hint: Any) -> str:  # noqa: PLR0911
    """Return an annotation in words, for error messages."""
    origin, parts = get_origin(hint), get_args(hint)
    if origin is Annotated:
        limits = [str(extra) for extra in parts[1:] if isinstance(extra, Between)]
        return ", ".join([describe_type(parts[0]), *limits])
    if origin in (Union, UnionType):
        return " or ".join(describe_type(part) for part in parts)
    if origin is Literal:
        return "one of " + ", ".join(map(str, parts)) if len(parts) > 1 else repr(parts[0])
    if origin is not None and issubclass(origin, Mapping):
        return "a dictionary"
    if isinstance(origin or hint, type) and issubclass(origin or hint, Callable):  # type: ignore[arg-type]
        return "a function"
    if origin is not None and issubclass(origin, Iterable):
        if origin is not tuple or parts[-1] is Ellipsis:
            return f"a list, each {describe_type(parts[0])}"
        return f"{len(parts)} values, each {describe_type(parts[0])}"
    names: dict[Any, str] = {
        int: "a whole number",
        float: "a finite number",
        bool: "true or false",
        str: "text",
    }
    names |= {None: "none", NoneType: "none", Path: "a path", SupportsIndex: "a whole number"}
    return names.get(hint) or str(getattr(hint, "__name__", hint))
