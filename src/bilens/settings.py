"""Values are checked against annotations, and dataclasses that check their fields by it.

pydantic and typeguard do this too, but in no mode of theirs does a number of NumPy pass for an int
and true fail, and their messages name neither the shape that an array has nor those beside it.
"""

import math
import sys
from collections.abc import Callable, Iterable, Mapping, Set
from contextlib import nullcontext
from dataclasses import dataclass, fields
from functools import cache, partial
from itertools import cycle
from pathlib import Path
from types import NoneType, UnionType
from typing import (
    TYPE_CHECKING,
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
from bilens.lazy_imports import lazy_import

if TYPE_CHECKING:
    import jaxtyping
    import numpy as np
    import torch
else:  # The help of a command needs the annotations and none of these.
    jaxtyping, np, torch = map(lazy_import, ("jaxtyping", "numpy", "torch"))

Settings = TypeVar("Settings")
Check = Callable[[Any], bool]
Checks = Mapping[str, tuple[Any, Check]]
"""Annotations of values by their names, each with its check."""


@dataclass(frozen=True)
class Between:
    """Limits of a number inside its annotation: `Annotated[int, Between(1, 8)]`.

    `above` and `below` exclude the limits themselves.
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


class Said(str):
    """An annotation in words: `Annotated[str | int, Said("a token by name or number")]`."""


Size = Annotated[int, Between(1, 2**20)]
"""A width, or a number of layers, heads or classes: more than a million is a mistake."""
Count = Annotated[int, Between(1, 10**15)]
"""A count; no computer counts further."""
Seed = Annotated[int, Between(0, 2**32 - 1)]
"""A seed of random numbers; NumPy accepts no larger one."""
Index = Annotated[int, Between(0, 2**31 - 1)]
"""A number from 0 on, of a layer, a head or a position, or a distance between two positions."""
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

    See `checker`. Lists become tuples and numbers of NumPy become Python's, so that settings can be
    hashed and written as JSON. With `kind`, a base class, only its fields are checked.
    """
    checks = _checks_of_fields(kind or type(settings))  # type: ignore[arg-type]
    values = {name: getattr(settings, name) for name in checks}
    check_values(values, checks)
    for name, value in values.items():
        if isinstance(value, list):
            object.__setattr__(settings, name, tuple(value))
        elif (plain := plain_number(value)) is not value:
            object.__setattr__(settings, name, plain)


def checks_of(hints: Mapping[str, Any]) -> Checks:
    """Return the checks of values with these annotations by name."""
    return {name: (hint, checker(hint)) for name, hint in hints.items()}


def check_values(values: Mapping[str, Any], checks: Checks) -> None:
    """Raise unless each value fits, and arrays agree in the axes that they share."""
    # Settings and commands have no arrays, and do without the library until somebody needs it.
    library = sys.modules.get("jaxtyping")
    # Whatever is checked around it: Ctrl-C in another check may have left sizes of axes behind.
    with library.jaxtyped("context") if library else nullcontext():
        for name, (_, fits) in checks.items():
            if name in values and not fits(values[name]):
                raise _misfit(name, values, *checks[name])


@dataclass(frozen=True)
class CheckedSettings:
    """A dataclass that raises on construction if a field does not fit its annotation."""

    def __post_init__(self) -> None:
        check_settings(self)


def read_settings(kind: type[Settings], values: Mapping[str, Any], source: object) -> Settings:
    """Return settings of a dataclass that checks itself, from all of its fields in a file.

    Raises:
        CheckpointError: a field is missing, unknown or out of range.
    """
    names = {field.name for field in fields(kind)}  # type: ignore[arg-type]
    remedy = "It was written by another version of bilens, or edited."
    check_names(source, "settings", values.keys(), names, remedy)
    try:
        return kind(**values)
    except BilensError as error:
        raise CheckpointError(f"{source} cannot be used: {error}") from error


def check_names(
    source: object,
    what: str,
    names: Set[str],
    expected: Set[str],
    remedy: str,
    others: Set[str] = frozenset(),
) -> None:
    """Raise CheckpointError unless all that is expected is given, and nothing unknown."""
    unknown, missing = names - expected - others, expected - names
    for complaint, wrong in (("unknown", unknown), ("missing", missing)):
        if wrong:
            text = ", ".join(sorted(wrong))
            raise CheckpointError(f"{source}: {complaint} {what}: {text}. {remedy}")


WORDS: dict[Any, str] = {
    **{int: "a whole number", SupportsIndex: "a whole number", float: "a finite number"},
    **{str: "text", bool: "true or false", NoneType: "none"},
    **{Path: "a path", Callable: "a function"},
}
"""Types in words."""
NUMBERS = {"Float": "real numbers", "Int": "whole numbers", "Bool": "booleans"}
"""Numbers of a tensor in words, by the names in `jaxtyping`."""


@cache
def _checks_of_fields(kind: type[Any]) -> Checks:
    hints = get_type_hints(kind, include_extras=True)
    return checks_of({field.name: hints[field.name] for field in fields(kind)})


@cache
def checker(hint: Any) -> Check:
    """Return the check of values against an annotation.

    A float is finite, an int or a number of NumPy passes for it, and a bool for neither. `Between`
    inside `Annotated` limits a number. A tensor matches its `jaxtyping` annotation. A list or a
    tuple passes for both, a text for neither, and all of their items are checked, as are those of
    dictionaries. Anything else is an instance.
    """
    kind, parts = get_origin(hint) or hint, get_args(hint)
    if hint in (bool, int, float):
        return partial(_is_number, hint)
    if kind is Literal:
        choices = [(type(x), x) for x in parts]
        return lambda value: (type(value), value) in choices
    if kind is Annotated:
        tests = [checker(parts[0]), *(x.holds for x in parts[1:] if isinstance(x, Between))]
        return lambda value: all(test(value) for test in tests)
    if kind in (Union, UnionType):
        tests = [*map(checker, parts)]
        return lambda value: any(test(value) for test in tests)
    if parts and _is_of(kind, Iterable):
        return _entries(kind, *parts) if _is_of(kind, Mapping) else _items(kind, parts)
    return lambda value: kind is Any or isinstance(value, kind)


def plain_number(value: Any) -> Any:
    """Return a number of NumPy as Python's, and anything else as it is."""
    return value.item() if hasattr(value, "dtype") and isinstance(value, np.generic) else value


def _is_number(kind: type, value: Any) -> bool:
    value = plain_number(value)
    if kind is bool or isinstance(value, bool):
        return kind is bool and isinstance(value, bool)
    if isinstance(value, int):
        # A larger integer is no number of anything, and torch cannot hold it.
        return abs(value) < 2**63
    return kind is float and isinstance(value, float) and math.isfinite(value)


def _entries(kind: Any, name: Any, content: Any) -> Check:
    """Return the check of a dictionary's names and contents."""
    names, contents = _items(list, (name,)), _items(list, (content,))
    return lambda value: isinstance(value, kind) and names([*value]) and contents([*value.values()])


def _items(kind: type, parts: tuple[Any, ...]) -> Check:
    """Return the check of a list's items."""
    checks = [checker(part) for part in parts if part is not Ellipsis]
    has_arrays = any(map(is_array, get_args(parts[0]) or parts[:1]))

    def fits_apart(check: Check, item: Any) -> bool:
        # Items may differ in the axes that a whole call has to share.
        with jaxtyping.jaxtyped("context") if has_arrays else nullcontext():
            return check(item)

    def fits(value: Any) -> bool:
        if isinstance(value, (str, bytes, Mapping)) or not isinstance(value, Iterable):
            return False
        items: Any = value
        if hasattr(items, "tolist") and kind is not tuple and items.ndim:
            # An array with one axis is a list of numbers, any other is a list of its rows.
            items = list(items[:1]) if has_arrays else items[:1].tolist()
        elif not isinstance(value, (list, tuple)):
            # Ranges, sets and generators are left to the function.
            return kind is not tuple and not hasattr(value, "tolist")
        if _is_row(kind, parts) and len(items) != len(checks):
            return False
        return all(map(fits_apart, cycle(checks), items))

    return fits


def _is_of(kind: Any, base: type) -> bool:
    return isinstance(kind, type) and issubclass(kind, base)


def _is_row(kind: Any, parts: tuple[Any, ...]) -> bool:
    return kind is tuple and Ellipsis not in parts


def is_array(kind: Any) -> bool:
    """Return True for an annotation of `jaxtyping`."""
    return isinstance(kind, type) and hasattr(kind, "dim_str")


def _misfit(name: str, values: Mapping[str, Any], hint: Any, fits: Check) -> BilensError:
    """Return the error of a value that does not fit its annotation, named in one sentence."""
    value, kind = values[name], type(values[name])
    # Help and errors of commands do without torch.
    tensors = {
        n: x for n, x in values.items() if hasattr(x, "dtype") and isinstance(x, torch.Tensor)
    }
    if kind.__module__ in ("builtins", "pathlib") or isinstance(value, np.generic):
        description = "=" + " ".join(repr(value).split())[:200]
    elif name in tensors:
        description = f" is a tensor of shape {tuple(value.shape)} and {value.dtype}"
    else:
        description = f" is {kind.__module__}.{kind.__qualname__}"
    others = [f"{other} {tuple(x.shape)}" for other, x in tensors.items() if other != name]
    expected = describe_type(hint)
    # Shapes of the others matter to one that should be a tensor.
    other_shapes = f" beside {', '.join(others)}" if others and "a tensor of" in expected else ""
    # Tokenizers return a batch, of one text too.
    if name in tensors and value.ndim and len(value) == 1 and fits(value[0]):
        other_shapes += f"; {name}[0] fits"
    return BilensError(f"{name}{description}, expected {expected}{other_shapes}")


def describe_type(hint: Any) -> str:  # noqa: PLR0911  one for each kind of annotation
    """Return an annotation in words, for error messages."""
    origin, parts = get_origin(hint) or hint, get_args(hint)
    if origin is Annotated:
        # Limits of a number, and words on what takes other values, or on all.
        extras = [extra for extra in parts[1:] if isinstance(extra, Between | str)]
        is_whole = any(isinstance(extra, Said) for extra in extras)
        return ", ".join(map(str, extras if is_whole else [describe_type(parts[0]), *extras]))
    if origin in (Union, UnionType):
        return " or ".join(map(describe_type, parts))
    if is_array(hint):
        numbers = NUMBERS[hint.dtype.__name__]
        return f"a tensor of {numbers} of shape ({', '.join(hint.dim_str.split())})"
    if origin is Literal:
        return "one of " + ", ".join(map(str, parts)) if len(parts) > 1 else repr(parts[0])
    if _is_of(origin, Mapping):
        return "a dictionary"
    if parts and _is_of(origin, Iterable):
        several = f"{len(parts)} values" if _is_row(origin, parts) else "a list"
        return f"{several}, each {describe_type(parts[0])}"
    return WORDS.get(origin, str(getattr(hint, "__name__", hint)))
