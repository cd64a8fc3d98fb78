"""Checks of what callers hand over: arrays by their annotations, numbers by their limits."""

import inspect
import math
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from functools import cache, wraps
from operator import index
from types import NoneType, UnionType
from typing import (
    Annotated,
    Any,
    Literal,
    ParamSpec,
    TypeVar,
    Union,
    get_args,
    get_origin,
    get_type_hints,
)

import numpy as np
import torch
from jaxtyping import AbstractArray, jaxtyped
from torch import Tensor, nn

from bilens.errors import BilensError, CheckpointError
from bilens.settings import fits, said

__all__ = ["check_count", "check_finite", "check_index", "check_labels", "check_weights", "checked"]

SIMPLE = (int, str, Annotated, Literal, NoneType)
Args = ParamSpec("Args")
Result = TypeVar("Result")


def checked(function: Callable[Args, Result]) -> Callable[Args, Result]:
    """Hold what a public function is given to its annotations.

    Arrays are held to their kinds, numbers of axes and sizes that several of them share; whole
    numbers and lists of them, choices and what carries limits as in `bilens.settings`; and models
    and results to their classes. All else is left to the function.

    Raises:
        BilensError: (by the function) an argument does not fit; names it, what came, and what was
            expected, for arrays beside the other arrays.
    """
    names = tuple(inspect.signature(function).parameters)

    @cache
    def hints() -> tuple[dict[str, tuple[Any, Callable[[Any], bool]]], bool]:
        # Looked up on the first call: annotations may name what is defined further down.
        found = get_type_hints(function, include_extras=True)
        found.pop("return", None)
        tests = {name: (hint, test) for name, hint in found.items() if (test := _test(hint))}
        return tests, any(any(map(_is_array, _kinds(hint))) for hint, _ in tests.values())

    @wraps(function)
    def wrapper(*args: Args.args, **kwargs: Args.kwargs) -> Result:
        given = {**dict(zip(names, args, strict=False)), **kwargs}
        tests, has_arrays = hints()
        with jaxtyped("context") if has_arrays else nullcontext():
            for name, (hint, test) in tests.items():
                if name not in given or test(given[name]):
                    continue
                value, wanted = given[name], str(getattr(hint, "__name__", hint))
                if not any(map(_is_class, _kinds(hint))):
                    raise BilensError(f"{name}={value!r}, expected {said(hint)}")
                raise BilensError(
                    f"{name} is {_described(value)}, expected {wanted.replace('jaxtyping.', '')}"
                    f"{_beside(name, given)}"
                )
        return function(*args, **kwargs)

    return wrapper


def check_finite(**arrays: Tensor) -> None:
    """See that no array, called by its keyword, holds NaN or infinite values.

    Raises:
        BilensError: one does.
    """
    for name, array in arrays.items():
        if not torch.isfinite(array).all():
            raise BilensError(
                f"{name} holds NaN or infinite values, expected finite numbers; if it comes from a "
                "model, its training may have diverged"
            )


def check_weights(model: nn.Module, name: str = "") -> None:
    """See that every weight of a model, or of a part called `name`, is a finite number.

    Raises:
        CheckpointError: one is not, or is quantised.
    """
    for part, parameter in model.named_parameters(prefix=name):
        kind = type(parameter.data)
        if kind.__module__.startswith("torchao"):
            raise CheckpointError(
                f"{part} is a {kind.__name__}, which is not a plain tensor of weights. Open the "
                "model that it was made from, or dequantise it first."
            )
        if not torch.isfinite(parameter).all():
            raise CheckpointError(
                f"{part} holds NaN or infinite values. Fetch the model again; if it was trained "
                "here, its training has diverged."
            )


def check_count(name: str, value: object, most: float = math.inf, what: str = "") -> None:
    """See that a whole number is from 1 to `most`, which is the number of `what`.

    Raises:
        BilensError: it is not.
    """
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= most:
        limit = "at least 1" if most == math.inf else f"1 to {most}"
        raise BilensError(
            f"{name}={value!r}, expected a whole number, {limit}" + (f", {what}" if what else "")
        )


def check_index(name: str, value: Any, size: int, what: str = "") -> int:
    """A whole number, of whatever kind, of one of `size` things, counted from 0: `what`.

    Raises:
        BilensError: it is not.
    """
    try:
        number = -1 if isinstance(value, bool) else index(value)
    except TypeError:
        number = -1
    if not 0 <= number < size:
        raise BilensError(
            f"{name}={value!r}, expected 0 to {size - 1}" + (f", {what}" if what else "")
        )
    return number


def check_labels(labels: Tensor, n_classes: int) -> None:
    """See that there are labels, and that all are numbers of classes.

    Raises:
        BilensError: there are none, or one is not a class.
    """
    if not len(labels):
        raise BilensError("labels is empty, expected at least one sample")
    if labels.min() < 0 or labels.max() >= n_classes:
        raise BilensError(
            f"labels holds {int(labels.min())} to {int(labels.max())}, expected numbers of "
            f"classes, 0 to {n_classes - 1}"
        )


def _test(hint: Any) -> Callable[[Any], bool] | None:
    """How an argument is held to its annotation, if it is."""
    kinds = _kinds(hint)
    if any(map(_is_array, kinds)):
        # A tensor is held to the arrays, also where any iterable would do.
        arrays = tuple(filter(_is_array, kinds))
        return lambda value: isinstance(value, arrays if isinstance(value, Tensor) else kinds)
    if hint is int:
        return lambda value: type(value) is int or fits(_plain(value), int)
    if all(kind in SIMPLE or _is_class(kind) for kind in kinds):
        return lambda value: fits(_plain(value), hint)
    if all(k in SIMPLE or _is_list(p) for k, p in zip(kinds, _parts(hint), strict=True)):
        # Ranges, sets and arrays where a list is expected are left to the function.
        return lambda value: (
            (isinstance(value, Iterable) and not isinstance(value, (list, tuple)))
            or fits(_plain(value), hint)
        )
    return None


def _plain(value: Any) -> Any:
    """NumPy's numbers as Python's, lists as tuples."""
    if isinstance(value, (np.integer, np.floating)):
        return value.item()
    return tuple(map(_plain, value)) if isinstance(value, (list, tuple)) else value


def _is_list(part: Any) -> bool:
    """Whether an annotation is that of a list of whole numbers or of texts."""
    items = (get_args(i)[0] if get_origin(i) is Annotated else i for i in get_args(part))
    return get_origin(part) in (tuple, Sequence) and {*items} <= {int, str, Ellipsis}


def _is_array(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, AbstractArray)


def _is_class(kind: Any) -> bool:
    return isinstance(kind, type) and (
        issubclass(kind, (AbstractArray, nn.Module)) or kind.__module__.startswith("bilens.")
    )


def _kinds(hint: Any) -> tuple[Any, ...]:
    """What an argument may be; containers such as Sequence[int] without what is in them."""
    return tuple(get_origin(part) or part for part in _parts(hint))


def _parts(hint: Any) -> tuple[Any, ...]:
    return get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)


def _beside(name: str, given: dict[str, Any]) -> str:
    others = [
        f"{other} {tuple(value.shape)}"
        for other, value in given.items()
        if other != name and isinstance(value, Tensor)
    ]
    return f" beside {', '.join(others)}" if others else ""


def _described(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"a tensor of shape {tuple(value.shape)} and {value.dtype}"
    return f"{type(value).__module__}.{type(value).__qualname__}".removeprefix("builtins.")
