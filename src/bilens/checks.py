"""Checks of arguments against annotations, and of the numbers that they hold.

The decorator stands in place of `jaxtyping.jaxtyped` with a type checker, which does not switch
autocast and inference mode off, and whose error is not one sentence about one argument.
"""

import inspect
import math
from collections.abc import Callable
from contextlib import ExitStack
from functools import cache, wraps
from operator import index
from types import FunctionType, SimpleNamespace
from typing import Any, ParamSpec, TypeVar, get_type_hints

import torch
from torch import Tensor, nn

from bilens.errors import BilensError, CheckpointError
from bilens.settings import Checks, check_values, checks_of, plain_number

Args = ParamSpec("Args")
Result = TypeVar("Result")
Decorated = TypeVar("Decorated", bound=Callable[..., Any])

ROUNDING = 4e-6
"""Relative error of sums in float32; norms of transformers compute in it whatever the weights."""
EPS = 1e-20
"""Least divisor in attention: tiny, since products of small scores are very small."""
FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
"""Types of weights that are read."""


def checked(decorated: Decorated) -> Decorated:
    """Check arguments against annotations, and compute in the stored precision.

    Decorates a public function, or every public method of a class. See `bilens.settings.checker`.
    Arrays of a call must agree in the axes that they share. Autocast is switched off: weights are
    read in their own precision even where the surrounding training computes in a lower one. So are
    the inference mode of torch, in which there are no gradients, and another default device, which
    would part new arrays from those of the model. Numbers of NumPy become Python's, and whole
    numbers in tensors get the type by which torch indexes.

    Raises:
        BilensError: (by the function) an argument does not fit, or a decomposition fails. The
            message names the argument, its value and the expected type.
    """
    if not isinstance(decorated, type):
        return _checked(decorated)  # type: ignore[return-value]
    operators = {"__init__", "__call__", "__getitem__"}
    operators |= {"__matmul__", "__mul__", "__add__", "__sub__"}
    for name, member in list(vars(decorated).items()):
        if name.startswith("_") and name not in operators:
            continue
        if isinstance(member, FunctionType):
            setattr(decorated, name, _checked(member))
        elif isinstance(member, classmethod):
            setattr(decorated, name, classmethod(_checked(member.__func__)))
    return decorated


def detached(function: Callable[Args, Result]) -> Callable[Args, Result]:
    """Check arguments as `checked` does, and compute without gradients."""
    return checked(torch.no_grad()(function))


def _checked(function: Callable[..., Any]) -> Callable[..., Any]:
    names = tuple(inspect.signature(function).parameters)

    @cache
    def checks() -> Checks:
        # Resolved on the first call: annotations may name classes defined further down. What is
        # returned is left out, whose type may take seconds to import.
        hints = {name: x for name, x in function.__annotations__.items() if name != "return"}
        names = inspect.unwrap(function).__globals__
        return checks_of(
            get_type_hints(SimpleNamespace(__annotations__=hints), names, include_extras=True)
        )

    @wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        check_values({**dict(zip(names, args, strict=False)), **kwargs}, checks())
        with ExitStack() as stack:
            if torch.is_inference_mode_enabled():
                # Some readings need gradients inside, which nothing else can switch on again.
                stack.enter_context(torch.inference_mode(False))
                stack.enter_context(torch.no_grad())
            args = tuple(map(_ordinary, args))
            kwargs = {name: _ordinary(value) for name, value in kwargs.items()}
            # A model is made where its caller wants it, also on meta, to be filled later. An empty
            # array tells the default device faster than its name.
            if function.__name__ != "__init__" and not torch.empty(0).is_cpu:
                stack.enter_context(torch.device("cpu"))
            for device in ("cpu", "cuda", "mps", "xpu"):
                if torch.is_autocast_enabled(device):
                    stack.enter_context(torch.autocast(device, enabled=False))
            try:
                return function(*args, **kwargs)
            except torch.linalg.LinAlgError as error:  # type: ignore[attr-defined]
                raise BilensError(
                    f"A decomposition failed: {error} The weights may be damaged, or so large that "
                    "their products leave the range of floating-point numbers."
                ) from error

    return wrapper


def _ordinary(value: Any) -> Any:
    if not isinstance(value, Tensor):
        return plain_number(value)
    if value.dtype in (torch.int8, torch.int16, torch.int32):
        return value.long()
    return value.clone() if value.is_inference() else value


def check_finite(**arrays: Tensor) -> None:
    """Raise unless every number of each array is finite; the keyword is the array's name."""
    for name, array in arrays.items():
        if not torch.isfinite(array).all():
            raise BilensError(
                f"{name} holds NaN or infinite values, expected finite numbers; if it comes from a "
                "model, its training may have diverged"
            )


def check_sum(
    reading: str,
    total: Tensor | float,
    expected: Tensor | float,
    *,
    size: float,
    dtype: torch.dtype = torch.float32,
) -> None:
    """Raise unless the parts of a reading add up to the model's own numbers, within rounding.

    Rounding is that of `dtype`, the type of the model's weights, relative to `size`, the magnitude
    of the terms that are added up.
    """
    # A default device of the caller's must not move the numbers.
    a, b = (
        (x if isinstance(x, Tensor) else torch.tensor(x, device="cpu")).detach().cpu().double()
        for x in (total, expected)
    )
    if not bool(b.isfinite().all()):
        raise BilensError(
            f"The model's own number, which {reading} is compared with, is NaN or infinite: its "
            "forward pass on this text overflows. Open it with dtype=torch.float32, or train again"
        )
    error = (a - b).abs()
    tolerance = max(ROUNDING, torch.finfo(dtype).eps) * (size + float(b.abs().max()))
    if not bool((error <= tolerance).all()):
        worst = error.nan_to_num(torch.inf).argmax()
        raise BilensError(
            f"{reading} adds up to {float(a.flatten()[worst]):.6g}, expected "
            f"{float(b.flatten()[worst]):.6g}, the model's own number; rounding explains a "
            f"difference of {tolerance:.2g}. The model computes something that its weights do not "
            "tell, or bilens reads it wrongly: please report it with the model's name"
        )


def check_weights(model: nn.Module, name: str = "") -> None:
    """Raise unless every weight of a model, or of its part `name`, is a finite plain tensor.

    Raises:
        CheckpointError: a weight is NaN, infinite or quantised.
    """
    for part, parameter in model.named_parameters(prefix=name):
        kind = type(parameter.data)
        if kind.__module__.startswith("torchao"):
            raise CheckpointError(
                f"{part} is a {kind.__name__}, expected a plain tensor. Open the model that it was "
                "made from, or dequantise it first."
            )
        if parameter.is_meta or parameter.dtype not in FLOATS:
            where = "on the device meta" if parameter.is_meta else f"of {parameter.dtype}"
            raise CheckpointError(
                f"{part} is {where}, expected numbers in float16, bfloat16, float32 or float64; "
                "open the model again, or dequantise it"
            )
        if parameter.is_inference():
            raise CheckpointError(
                f"{part} was made under torch.inference_mode(), where it can have no gradients, "
                "which readings need; make or load the model outside of it"
            )
        # NaN is passed on by both; torch.isfinite takes 20 times as long, and more memory.
        if parameter.numel() and not all(map(torch.isfinite, torch.aminmax(parameter.detach()))):
            raise CheckpointError(
                f"{part} holds NaN or infinite values. Fetch the model again; if it was trained "
                "here, its training has diverged."
            )


def check_count(name: str, value: Any, most: float = math.inf, what: str = "") -> None:
    """Raise unless `value` is an integer from 1 to `most`, the number of `what`."""
    if not 1 <= _whole(value) <= most:
        limit = "at least 1" if most == math.inf else f"1 to {most}"
        raise BilensError(
            f"{name}={value!r}, expected a whole number, {limit}" + (f", {what}" if what else "")
        )


def check_index(name: str, value: Any, size: int, what: str = "") -> int:
    """Return `value` as an int if it is an index from 0 to `size - 1`, one of `what`."""
    i = _whole(value)
    if not 0 <= i < size:
        raise BilensError(
            f"{name}={value!r}, expected 0 to {size - 1}" + (f", {what}" if what else "")
        )
    return i


def _whole(value: Any) -> int:
    """Return a whole number as an int, and -1 for anything else, such as true or false."""
    value = value.tolist() if isinstance(value, Tensor) else value
    try:
        return -1 if isinstance(value, bool) else index(value)
    except TypeError:
        return -1


def check_numbers(name: str, numbers: Tensor, size: int, what: str) -> None:
    """Raise unless every number is an index from 0 to `size - 1`, one of `what`."""
    wrong = numbers[(numbers < 0) | (numbers >= size)]
    if len(wrong):
        raise BilensError(
            f"{name} holds the number {int(wrong[0])}, expected 0 to {size - 1}, {what}"
        )


def check_labels(labels: Tensor, n_classes: int) -> None:
    """Raise unless there is at least one label and every label is one of two classes or more."""
    if n_classes < 2:
        raise BilensError(f"the model has n_classes={n_classes}, expected two classes or more")
    if not len(labels):
        raise BilensError("labels is empty, expected at least one sample")
    check_numbers("labels", labels, n_classes, "numbers of classes")
