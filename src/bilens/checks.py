"""Checks of arguments against annotations and limits, and of memory before it is taken."""

import inspect
import math
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, nullcontext
from functools import cache, wraps
from operator import index
from pathlib import Path
from types import FunctionType, UnionType
from typing import Any, ParamSpec, TypeVar, Union, get_args, get_origin, get_type_hints

import torch
from jaxtyping import AbstractArray, jaxtyped
from torch import Tensor, nn

from bilens.errors import BilensError, CheckpointError
from bilens.settings import describe_type, fits, is_array, is_dense

if sys.platform != "win32":
    import resource

Args = ParamSpec("Args")
Result = TypeVar("Result")
Decorated = TypeVar("Decorated", bound=Callable[..., Any])

OPERATORS = {"__init__", "__call__", "__matmul__", "__mul__", "__add__", "__sub__"}
ROUNDING = 4e-6
"""Relative error of sums in float32; norms of transformers compute in it whatever the weights."""
FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
"""Types of weights that are read."""
AUTOCAST_DEVICES = ("cpu", "cuda", "mps", "xpu")


def checked(function: Callable[Args, Result]) -> Callable[Args, Result]:
    """Check the arguments of a public function against its annotations.

    See `bilens.settings.fits`. Arrays of a call must agree in the axes that they share.

    Raises:
        BilensError: (by the function) an argument does not fit. The message names the argument, its
            value and the expected type.
    """
    names = tuple(inspect.signature(function).parameters)

    @cache
    def hints() -> tuple[dict[str, Any], bool]:
        # Resolved on the first call: annotations may name classes defined further down.
        annotations = get_type_hints(function, include_extras=True)
        annotations.pop("return", None)
        return annotations, any(any(map(is_array, _kinds(hint))) for hint in annotations.values())

    @wraps(function)
    def wrapper(*args: Args.args, **kwargs: Args.kwargs) -> Result:
        arguments = {**dict(zip(names, args, strict=False)), **kwargs}
        annotations, has_arrays = hints()
        with jaxtyped("context") if has_arrays else nullcontext():
            for name, hint in annotations.items():
                if name not in arguments or fits(arguments[name], hint):
                    continue
                value, expected = arguments[name], describe_type(hint)
                if not any(map(_is_class, _kinds(hint))):
                    raise BilensError(f"{name}={value!r:.200}, expected {expected}")
                first = ""
                # Tokenizers return a batch, of one text too.
                if isinstance(value, Tensor) and value.ndim and len(value) == 1:
                    first = f"; {name}[0] fits" if fits(value[0], hint) else ""
                raise BilensError(
                    f"{name} is {_describe(value)}, expected {expected}"
                    f"{_other_shapes(name, arguments)}{first}"
                )
        return function(*args, **kwargs)

    return wrapper


def full_precision(decorated: Decorated) -> Decorated:
    """Check arguments as `checked` does, and compute outside any autocast.

    Decorates a function, or every public method of a class. Weights are read in their stored
    precision even where the surrounding training computes in a lower one.

    Raises:
        BilensError: (by the function) an argument does not fit its annotation.
    """
    if not isinstance(decorated, type):
        return _without_autocast(decorated)  # type: ignore[return-value]
    for name, member in list(vars(decorated).items()):
        if name.startswith("_") and name not in OPERATORS:
            continue
        if isinstance(member, FunctionType):
            setattr(decorated, name, _without_autocast(member))
        elif isinstance(member, classmethod):
            setattr(decorated, name, classmethod(_without_autocast(member.__func__)))
    return decorated


def detached(function: Callable[Args, Result]) -> Callable[Args, Result]:
    """Check arguments and compute as `full_precision` does, and without gradients."""
    return full_precision(torch.no_grad()(function))


def _without_autocast(function: Callable[..., Any]) -> Callable[..., Any]:
    checked_function = checked(function)

    @wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        with ExitStack() as stack:
            for device in AUTOCAST_DEVICES:
                if torch.is_autocast_enabled(device):
                    stack.enter_context(torch.autocast(device, enabled=False))
            try:
                return checked_function(*args, **kwargs)
            except torch.linalg.LinAlgError as error:  # type: ignore[attr-defined]
                raise BilensError(
                    f"A decomposition failed: {error} The weights may be damaged, or so large that "
                    "their products leave the range of floating-point numbers."
                ) from error

    return wrapper


def check_finite(**arrays: Tensor) -> None:
    """Raise unless every number of each array is finite; the keyword is the array's name.

    Raises:
        BilensError: an array holds NaN or infinite values.
    """
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

    Args:
        reading: its name, for the message.
        total: sums of the parts.
        expected: the same numbers from the model's own forward pass.
        size: magnitude of the terms that are added up, to which rounding is relative.
        dtype: of the model's weights, in which it rounds.

    Raises:
        BilensError: they differ by more than rounding; names the worst two numbers.
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
    allowed = max(ROUNDING, torch.finfo(dtype).eps) * (size + float(b.abs().max()))
    if not bool((error <= allowed).all()):
        worst = error.nan_to_num(torch.inf).argmax()
        raise BilensError(
            f"{reading} adds up to {float(a.flatten()[worst]):.6g}, expected "
            f"{float(b.flatten()[worst]):.6g}, the model's own number; rounding explains a "
            f"difference of {allowed:.2g}. The model computes something that its weights do not "
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
        # NaN is passed on by both; torch.isfinite takes 20 times as long, and more memory.
        if parameter.numel() and not all(map(torch.isfinite, torch.aminmax(parameter.detach()))):
            raise CheckpointError(
                f"{part} holds NaN or infinite values. Fetch the model again; if it was trained "
                "here, its training has diverged."
            )


def check_text(name: str, text: str) -> None:
    """Raise unless a text can be written in UTF-8, as every tokenizer expects.

    Raises:
        BilensError: it holds half of a character, such as bytes that were read in a wrong encoding.
    """
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise BilensError(
            f"{name} holds {text[error.start]!a} at {error.start}, expected text in UTF-8; read it "
            "in the encoding in which it was written"
        ) from None


def check_count(name: str, value: object, most: float = math.inf, what: str = "") -> None:
    """Raise unless `value` is an integer from 1 to `most`, the number of `what`.

    Raises:
        BilensError: it is not.
    """
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= most:
        limit = "at least 1" if most == math.inf else f"1 to {most}"
        raise BilensError(
            f"{name}={value!r}, expected a whole number, {limit}" + (f", {what}" if what else "")
        )


def check_index(name: str, value: Any, size: int, what: str = "") -> int:
    """Return `value` as an int if it is an index from 0 to `size - 1`, one of `what`.

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
    """Raise unless there is at least one label and every label is a class from 0 on.

    Raises:
        BilensError: `labels` is empty, or a label is out of range.
    """
    if not len(labels):
        raise BilensError("labels is empty, expected at least one sample")
    if labels.min() < 0 or labels.max() >= n_classes:
        raise BilensError(
            f"labels holds {int(labels.min())} to {int(labels.max())}, expected numbers of "
            f"classes, 0 to {n_classes - 1}"
        )


def _is_class(kind: Any) -> bool:
    return isinstance(kind, type) and (
        issubclass(kind, (AbstractArray, nn.Module)) or kind.__module__.startswith("bilens.")
    )


def _kinds(hint: Any) -> tuple[Any, ...]:
    """Return the members of a union, containers without their item types."""
    parts = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
    return tuple(get_origin(part) or part for part in parts)


def _other_shapes(name: str, arguments: dict[str, Any]) -> str:
    shapes = [
        f"{other} {tuple(value.shape)}"
        for other, value in arguments.items()
        if other != name and isinstance(value, Tensor)
    ]
    return f" beside {', '.join(shapes)}" if shapes else ""


def _describe(value: Any) -> str:
    if isinstance(value, Tensor):
        where = "" if is_dense(value) else f", {'meta' if value.is_meta else value.layout},"
        return f"a tensor{where} of shape {tuple(value.shape)} and {value.dtype}"
    return f"{type(value).__module__}.{type(value).__qualname__}".removeprefix("builtins.")


MEMINFO = Path("/proc/meminfo")
STATM = Path("/proc/self/statm")
CGROUPS = (
    (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory.current")),
    (
        Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"),
        Path("/sys/fs/cgroup/memory/memory.usage_in_bytes"),
    ),
)
"""Limit and use of a container, in version 2 of the kernel's control groups and in version 1."""


class MemoryLimitError(BilensError):
    """Memory that a computation needs and that is not available."""


def available_memory(device: torch.device | str = "cpu") -> int | None:
    """Return the bytes that this process may still allocate; None if the system does not say.

    On a CPU they are the least of three numbers. These are the machine's free memory, and the rest
    of the limits on the container and on the address space (`ulimit -v`).
    """
    device = torch.device(device)
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    return min(_limits(), default=None) if device.type == "cpu" else None


def check_memory(n_bytes: int, purpose: str, device: torch.device | str = "cpu") -> None:
    """Raise before an allocation that cannot succeed.

    Args:
        n_bytes: size of the allocation.
        purpose: subject of the error's sentence, as in "The eigenvectors of 30,000 inputs".
        device: device of the memory.

    Raises:
        MemoryLimitError: less memory is available.
    """
    available = available_memory(device)
    if available is not None and n_bytes > available:
        raise MemoryLimitError(
            f"{purpose} need {_gigabytes(n_bytes)} of memory on {device}, and "
            f"{_gigabytes(available)} are available"
        )


def _limits() -> Iterator[int]:
    try:
        lines = dict(line.split(":", 1) for line in MEMINFO.read_text().splitlines())
        yield 1024 * int(lines["MemAvailable"].split()[0])
    except (OSError, ValueError, KeyError):  # a system other than Linux
        pass
    for limit, used in CGROUPS:
        try:
            # The kernel gives back cached files before it refuses memory.
            stat = dict(
                line.split() for line in (used.parent / "memory.stat").read_text().splitlines()
            )
            cached = int(stat.get("inactive_file", stat.get("total_inactive_file", 0)))
            yield max(0, int(limit.read_text()) - int(used.read_text()) + cached)
        except (OSError, ValueError):  # another version, or "max": no limit
            pass
    if sys.platform != "win32":
        soft = resource.getrlimit(resource.RLIMIT_AS)[0]
        if soft != resource.RLIM_INFINITY:
            pages = int(STATM.read_text().split()[0]) if STATM.exists() else 0
            yield max(0, soft - pages * resource.getpagesize())


def _gigabytes(n_bytes: int) -> str:
    return f"{n_bytes / 1e9:,.2f} GB"
