"""The check of values against annotations, and dataclasses that check their fields by it."""

import math
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields
from functools import cache
from pathlib import Path
from types import GenericAlias, NoneType, UnionType
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

import numpy as np
import torch
from jaxtyping import AbstractArray
from torch import Tensor, nn

from bilens.errors import BilensError, CheckpointError

Settings = TypeVar("Settings")
# A larger integer is no number of anything, and torch cannot hold it.
NUMBERS: dict[Any, Any] = {int: (int, 2**63 - 1), float: ((int, float), sys.float_info.max)}
"""Types of the numbers that an annotation allows, and the largest number."""


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
        """Return True for a number within the limits; NaN is within none."""
        over = value > self.least if self.above else value >= self.least
        under = value < self.most if self.below else value <= self.most
        return over and under

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

    See `fits`. Lists become tuples and numbers of NumPy become Python's, so that settings can be
    hashed and written as JSON.

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
        if isinstance(value, list | np.generic):
            plain = tuple(value) if isinstance(value, list) else value.item()
            object.__setattr__(settings, name, plain)


@dataclass(frozen=True)
class CheckedSettings:
    """A dataclass that raises on construction if a field does not fit its annotation."""

    def __post_init__(self) -> None:
        check_settings(self)


def read_settings(kind: type[Settings], values: Mapping[str, Any], source: object) -> Settings:
    """Return settings from the values of a file.

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
    try:
        return kind(**values)
    except BilensError as error:
        raise CheckpointError(f"{source} cannot be used: {error}") from error


@cache
def _hints(kind: type[Any]) -> dict[str, Any]:
    hints = get_type_hints(kind, include_extras=True)
    return {field.name: hints[field.name] for field in fields(kind)}


def fits(value: Any, hint: Any) -> bool:  # noqa: PLR0911
    """Return True unless a value contradicts an annotation; unknown annotations fit all values.

    A float is finite, an int or a number of NumPy passes for it, and a bool for neither. `Between`
    inside `Annotated` limits a number. A tensor matches its `jaxtyping` annotation and holds its
    numbers, which sparse and meta tensors do not. A list or a tuple passes for both, a text for
    neither, and their items are checked too. Anything else is an instance of its class.
    """
    kind, parts = get_origin(hint) or hint, get_args(hint)
    if isinstance(value, np.generic):
        value = value.item()
    if kind is Annotated:
        limits = [extra for extra in parts[1:] if isinstance(extra, Between)]
        return fits(value, parts[0]) and all(limit.holds(value) for limit in limits)
    if kind in (Union, UnionType):
        # A tensor must match one of the arrays, even where any iterable would do.
        arrays = [part for part in parts if is_array(part)] if isinstance(value, Tensor) else []
        return any(fits(value, part) for part in arrays or parts)
    if kind is Literal:
        return any(type(value) is type(part) and value == part for part in parts)
    if kind in NUMBERS:
        types, largest = NUMBERS[kind]
        return isinstance(value, types) and not isinstance(value, bool) and abs(value) <= largest
    is_static = getattr(kind, "_is_protocol", False) and not kind._is_runtime_protocol
    if not isinstance(kind, type) or kind in (Any, object) or is_static:
        return True
    if is_array(kind):
        return is_dense(value) and isinstance(value, kind)
    if issubclass(kind, Mapping) or not (issubclass(kind, Iterable) and parts):
        # The class of callables is abstract: being an instance of it is being callable.
        return isinstance(value, kind)
    return _is_list_of(value, kind, parts)


def _is_list_of(value: Any, kind: type[Any], parts: tuple[Any, ...]) -> bool:
    if isinstance(value, (str, bytes, Mapping)) or not isinstance(value, Iterable):
        return False
    items = get_args(parts[0]) if get_origin(parts[0]) in (Union, UnionType) else parts[:1]
    arrays = [part for part in items if is_array(part)]
    if isinstance(value, (Tensor, np.ndarray)) and kind is not tuple:
        # An array with one axis is a list of numbers, any other is a list of its rows.
        if arrays:
            axes = [axis for axis in arrays[0].dim_str.split() if not axis.startswith(("*", "..."))]
            return is_dense(value) and value.ndim > len(axes)
        return (
            is_dense(value)
            and value.ndim == 1
            and fits(value[:1].tolist(), GenericAlias(list, parts[:1]))
        )
    if not isinstance(value, (list, tuple)):
        # Ranges, sets and generators are left to the function.
        return kind is not tuple
    if kind is tuple and parts[-1] is not Ellipsis:
        return len(value) == len(parts) and all(map(fits, value, parts))
    # Items may differ in the axes that a whole call has to share.
    return all(
        is_dense(item)
        if arrays and isinstance(item, Tensor) and isinstance(item, arrays[0].array_type)
        else fits(item, parts[0])
        for item in value
    )


def is_array(kind: Any) -> bool:
    """Return True for an annotation of `jaxtyping`."""
    return isinstance(kind, type) and issubclass(kind, AbstractArray)


def is_dense(value: Any) -> bool:
    """Return False for a tensor whose numbers are not all in memory, in the usual order."""
    if not isinstance(value, Tensor):
        return True
    # Tensors of other classes may hold their numbers elsewhere and borrow the name of the device.
    empty = value.is_meta and type(value) in (Tensor, nn.Parameter)
    return value.layout is torch.strided and not empty


def describe_type(hint: Any) -> str:  # noqa: PLR0911
    """Return an annotation in words, for error messages."""
    origin, parts = get_origin(hint), get_args(hint)
    if origin is Annotated:
        limits = [str(extra) for extra in parts[1:] if isinstance(extra, Between)]
        return ", ".join([describe_type(parts[0]), *limits])
    if origin in (Union, UnionType):
        return " or ".join(describe_type(part) for part in parts)
    if is_array(hint):
        is_whole = all("int" in kind for kind in hint.dtypes)
        numbers = (
            "booleans" if hint.dtypes == ("bool",) else f"{'whole' if is_whole else 'real'} numbers"
        )
        return f"a tensor of {numbers} of shape ({', '.join(hint.dim_str.split())})"
    if origin is Literal:
        return "one of " + ", ".join(map(str, parts)) if len(parts) > 1 else repr(parts[0])
    if origin is not None and issubclass(origin, Mapping):
        return "a dictionary"
    if (origin or hint) is Callable:
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
