"""Causal attention without softmax, by the kernel that suits the inputs, or by its equations."""

import math
import os
import warnings
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from typing import Any, Literal, get_args

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function

from bilens.checks import EPS, checked
from bilens.errors import BilensError
from bilens.kernels import products as operators
from bilens.kernels.chunked import chunked, empty_state
from bilens.kernels.products import Inputs, Kernel, no_autocast, products, weights

KernelName = Literal["auto", "reference", "chunked", "recurrent", "triton"]
"""Names of the kernels; auto picks one by device, length and head size."""
KERNELS = get_args(KernelName)

# float16 is missing on purpose: products of two scores leave its range.
DTYPES = (torch.float64, torch.float32, torch.bfloat16)
SHORT = 16
"""On a CPU, reference and chunked cross at about this many tokens for each coordinate of a head, as
measured. Elsewhere the operations are counted: they cross at d_head^2 tokens."""
PATTERN = 2**26
"""Largest pattern that auto holds in memory: a quarter of a gigabyte in float32."""
WIDEST = 128
"""Coordinates of a head or a value for which tiles of the Triton kernels fit on a GPU."""
TRITON = ("3.9.0",)
"""Versions of Triton whose kernels were compared with exact attention on a GPU. On an H100 Triton
3.6 compiles the same source to a race: rows are wrong by up to 11 %, differently in each run.
Versions between 3.6 and 3.9 were never run."""
GPU = "gpu"
"""The kernel for a GPU: triton, or chunked if Triton is missing or untested."""


def bilinear_attention(  # noqa: PLR0913
    q1: Float[Tensor, "batch heads time d_head"],
    k1: Float[Tensor, "batch kv_heads time d_head"],
    v: Float[Tensor, "batch kv_heads time d_value"],
    q2: Float[Tensor, "batch heads time d_head"] | None = None,
    k2: Float[Tensor, "batch kv_heads time d_head"] | None = None,
    *,
    scale: float | None = None,
    constant: Float[Tensor, " heads"] | None = None,
    normalised: bool = False,
    seen: Bool[Tensor, "batch time"] | None = None,
    kernel: KernelName = "auto",
) -> Float[Tensor, "batch heads time d_value"]:
    """Return y_t = scale sum_{s<=t} (q1_t . k1_s)(q2_t . k2_s) v_s.

    Without q2 and k2 this is squared attention, scale (q1_t . k1_s)^2. Arithmetic is in the dtype
    of the inputs and at least in float32.

    Args:
        q1: first queries; consecutive groups of query heads share one head of keys.
        k1: first keys.
        v: values.
        q2: second queries.
        k2: second keys.
        scale: of the product of both scores; 1 / d_head^2 by default.
        constant: c of each head in scale (q1_t . k1_s + c)^2, of squared attention.
        normalised: divide each row of the pattern by its sum; of squared attention.
        seen: False for padding, which has no weight in any pattern.
        kernel: reference (the whole pattern), chunked (time linear in the length), recurrent (one
            token after another), triton or auto. Triton is chunked, on a GPU, in float32 or
            bfloat16, for heads and values of up to 128, with a version of Triton that was tested; a
            constant is one more coordinate of a head, and normalised rows one of a value. Auto is
            triton wherever it can be, else the reference for short texts, else chunked.

    Source: The post on tensor-transformer variants, "Replacing softmax attention".
    """
    inputs = q1, k1, v, q2, k2
    if kernel != "reference" and has_torch_function(inputs):
        # As any function of torch, this one can have another rule.
        options: dict[str, Any] = {
            "scale": scale,
            "constant": constant,
            "normalised": normalised,
            "seen": seen,
        }
        return handle_torch_function(bilinear_attention, inputs, *inputs, **options)
    if not _are_valid(inputs):
        _explain(*inputs)
    if kernel not in KERNELS:
        kernels = ", ".join(KERNELS)
        raise BilensError(f"kernel={kernel!r}, expected one of {kernels}")
    scale = _checked_scale(scale, q1)
    if constant is not None or normalised is not False:
        _check_squared(inputs, constant, normalised)
    inputs = _extended(inputs, constant, seen, normalised=normalised)
    y, _ = _attend(kernel, inputs, scale, None)
    return _divided(y) if normalised else y


def resume_attention(  # noqa: PLR0913
    q1: Float[Tensor, "batch heads time d_head"],
    k1: Float[Tensor, "batch kv_heads time d_head"],
    v: Float[Tensor, "batch kv_heads time d_value"],
    q2: Float[Tensor, "batch heads time d_head"] | None = None,
    k2: Float[Tensor, "batch kv_heads time d_head"] | None = None,
    *,
    state: Float[Tensor, "batch kv_heads features values"] | None = None,
    scale: float | None = None,
    constant: Float[Tensor, " heads"] | None = None,
    normalised: bool = False,
    seen: Bool[Tensor, "batch time"] | None = None,
) -> tuple[
    Float[Tensor, "batch heads time d_value"], Float[Tensor, "batch kv_heads features values"]
]:
    """Continue `bilinear_attention` from a recurrent state; return y and the state after it.

    `state` is that of the tokens before, from an earlier call, or None at the start of a text. The
    other arguments are those of `bilinear_attention`, for the new tokens. With a constant the state
    is that of keys [k, 1], and with normalised rows that of values [v, 1].
    """
    inputs = q1, k1, v, q2, k2
    if not _are_valid(inputs):
        _explain(*inputs)
    if constant is not None or normalised is not False:
        _check_squared(inputs, constant, normalised)
    inputs = _extended(inputs, constant, seen, normalised=normalised)
    empty = empty_state(inputs[1], inputs[2], symmetric=q2 is None)
    state = empty if state is None else state
    _check_state(state, empty)
    kernel = "recurrent" if q1.shape[2] == 1 else _linear(inputs)
    y, last = _attend(kernel, inputs, _checked_scale(scale, q1), state)
    return _divided(y) if normalised else y, state if last is None else last


def _extended(
    inputs: Inputs, constant: Tensor | None, seen: Tensor | None, *, normalised: bool
) -> Inputs:
    """Return inputs of plain attention, with all that is added to squared attention.

    q . k + c is the product of [q, c] and [k, 1], a key of padding is zero, and the sum of a row is
    the output of a value of 1.
    """
    q1, k1, v, q2, k2 = inputs
    if constant is not None:
        column = constant.to(q1)[:, None, None].expand(*q1.shape[:3], 1)
        q1, k1 = torch.cat([q1, column], -1), torch.cat([k1, torch.ones_like(k1[..., :1])], -1)
    if seen is not None:
        _check_seen(seen, k1)
        k1 = k1 * seen[:, None, :, None]
    if normalised:
        v = torch.cat([v, torch.ones_like(v[..., :1])], -1)
    return q1, k1, v, q2, k2


def _divided(y: Tensor) -> Tensor:
    """Return outputs divided by the sums of their rows, which are the last coordinate."""
    return y[..., :-1] / y[..., -1:].clamp_min(EPS)


def _attend(
    kernel: str, inputs: Inputs, scale: float, state: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    if kernel == "triton" and not torch.compiler.is_compiling():
        _require_triton(inputs)
    name = _choose(inputs) if kernel == "auto" else kernel
    if name == "reference":
        with no_autocast(inputs[2].device):
            return reference(inputs, scale), None
    if name == "recurrent":
        _, k1, v, q2, _ = inputs
        start = empty_state(k1, v, symmetric=q2 is None) if state is None else state
        with no_autocast(v.device):
            return recurrent(inputs, scale, start)
    return operators.attend(name, inputs, scale, state)


def reference(inputs: Inputs, scale: float) -> Tensor:
    """Return y_t = scale sum_{s<=t} (q1_t . k1_s)(q2_t . k2_s) v_s; tests compare with it.

    Time and memory grow with the square of the length. Arithmetic is at least in float32, as in the
    other kernels.
    """
    q1, k1, v, q2, k2 = inputs
    sharing, dtype = q1.shape[1] // k1.shape[1], v.dtype
    if sharing > 1 or dtype == torch.bfloat16:
        # Only where they change something: a copy takes a tenth of the time of a short text.
        q1, k1, v = _in_full(q1, 1), _in_full(k1, sharing), _in_full(v, sharing)
        if q2 is not None and k2 is not None:
            q2, k2 = _in_full(q2, 1), _in_full(k2, sharing)
    # A squared score is made once: its pattern is the product with itself.
    first = q1 @ k1.mT
    second = first if q2 is None or k2 is None else q2 @ k2.mT
    y = (first * second * scale).tril_() @ v
    return y if y.dtype == dtype else y.to(dtype)


def _in_full(x: Tensor, sharing: int) -> Tensor:
    """Return vectors at least in float32, those of a head as often as heads of queries share it."""
    x = x.to(torch.promote_types(x.dtype, torch.float32))
    return x.repeat_interleave(sharing, 1) if sharing > 1 else x


def recurrent(inputs: Inputs, scale: float, state: Tensor) -> tuple[Tensor, Tensor]:
    """Return y_t = scale S_t' (q1_t ⊛ q2_t), S_t = S_{t-1} + (k1_t ⊛ k2_t) v_t', and the last S.

    The arguments and results are those of `bilens.kernels.chunked`. A token costs d_head^2 d_value
    multiplications a head, however many tokens preceded it.
    """
    q1, k1, v, q2, k2 = inputs
    kv_heads, symmetric = k1.shape[1], q2 is None

    def token(x: Tensor, t: int) -> Tensor:
        row: Tensor = x[:, :, t].unflatten(1, (kv_heads, -1))
        return row.to(state.dtype)

    def features(first: Tensor, second: Tensor | None, t: int) -> Tensor:
        a = token(first, t)
        return products(a, a if second is None else token(second, t), symmetric=symmetric)

    # A state has one feature of each symmetric pair, which counts twice when it is read.
    weight = weights(k1.shape[-1], state).T if symmetric else 1
    S, outputs = state, []
    for t in range(k1.shape[2]):
        S = S + features(k1, k2, t).mT @ token(v, t)
        outputs.append(weight * features(q1, q2, t) @ S * scale)
    return torch.stack(outputs, 3).flatten(1, 2).to(v.dtype), S


def _choose(inputs: Inputs) -> str:
    """Return the kernel for a GPU, or the quadratic form if it is faster and its pattern small."""
    q1, linear = inputs[0], _linear(inputs)
    if linear == GPU:
        return linear
    batch, heads, time, width = q1.shape
    limit = SHORT * width if q1.device.type == "cpu" else width**2
    short = time <= limit and batch * heads * time**2 <= PATTERN
    return "reference" if short else linear


def _linear(inputs: Inputs) -> str:
    return GPU if inputs[0].device.type == "cuda" and _fits_triton(inputs) else "chunked"


def _fits_triton(inputs: Inputs) -> bool:
    q1, _, v, _, _ = inputs
    on_gpu = v.device.type == "cuda" or os.environ.get("TRITON_INTERPRET") == "1"
    return on_gpu and v.dtype != torch.float64 and max(q1.shape[-1], v.shape[-1]) <= WIDEST


@cache
def triton_problem() -> str | None:
    """Return why the Triton kernels are not used in this process, or None if they can be."""
    if find_spec("triton") is None:
        return "Triton is missing"
    # The version of the module, as the distribution has other names on other platforms.
    version = str(getattr(import_module("triton"), "__version__", "unknown"))
    if version.partition("+")[0] in TRITON:
        return None
    return f"Triton {version} is untested, expected {' or '.join(TRITON)} (3.6 computes wrong rows)"


@cache
def _warn_once() -> None:
    warnings.warn(
        f"{triton_problem()}, so bilinear attention on the GPU takes the chunked kernel; "
        f"pip install triton=={TRITON[-1]} for Triton's",
        stacklevel=4,
    )


def _require_triton(inputs: Inputs) -> None:
    if (problem := triton_problem()) is not None:
        raise BilensError(
            f"kernel='triton', but {problem}; pip install triton=={TRITON[-1]} or take 'chunked'"
        )
    if not _fits_triton(inputs):
        q1, _, v, _, _ = inputs
        raise BilensError(
            f"kernel='triton' is for float32 and bfloat16 on a GPU, and heads and values of up to "
            f"{WIDEST}, not {v.dtype} on {v.device}, {q1.shape[-1]} and {v.shape[-1]}; take "
            "'chunked' or 'auto'"
        )


def _are_valid(inputs: Inputs) -> bool:
    """Return True if `_explain` would find nothing; in a hundredth of its time."""
    q1, k1, v, q2, k2 = inputs
    if (q2 is None) != (k2 is None) or not isinstance(v, Tensor) or v.dtype not in DTYPES:
        return False
    dtype, device = v.dtype, v.device
    for x in (q1, k1) if q2 is None else (q1, k1, q2, k2):
        if not isinstance(x, Tensor) or x.dtype != dtype or x.device != device:
            return False
    if q2 is not None and k2 is not None and (q2.shape != q1.shape or k2.shape != k1.shape):
        return False
    return _have_one_size(q1.shape, k1.shape, v.shape)


def _have_one_size(queries: torch.Size, keys: torch.Size, values: torch.Size) -> bool:
    if not len(queries) == len(keys) == len(values) == 4 or 0 in queries or 0 in values:
        return False
    batch, heads, time, width = queries
    kv_heads = values[1]
    return (
        keys == (batch, kv_heads, time, width)
        and values[:3] == (batch, kv_heads, time)
        and heads % kv_heads == 0
    )


@checked
def _explain(
    q1: Float[Tensor, "batch heads time d_head"],
    k1: Float[Tensor, "batch kv_heads time d_head"],
    v: Float[Tensor, "batch kv_heads time d_value"],
    q2: Float[Tensor, "batch heads time d_head"] | None,
    k2: Float[Tensor, "batch kv_heads time d_head"] | None,
) -> None:
    """Raise BilensError with the first thing that is wrong."""
    if (q2 is None) != (k2 is None):
        raise BilensError(
            "q2 and k2 come together: both for bilinear attention, neither for squared attention"
        )
    tensors = {"q1": q1, "k1": k1, "v": v, "q2": q2, "k2": k2}
    for name, x in tensors.items():
        if x is None:
            continue
        if 0 in x.shape:
            raise BilensError(f"{name} has shape {tuple(x.shape)}, expected no size to be zero")
        if x.dtype != v.dtype or x.dtype not in DTYPES:
            raise BilensError(
                f"{name} is {x.dtype} and v is {v.dtype}; expected one of float64, float32 and "
                "bfloat16 for all. The range of float16 is too small for products of scores"
            )
        if x.device != v.device:
            raise BilensError(f"{name} is on {x.device} and v on {v.device}; move one of them")
    heads, kv_heads = q1.shape[1], k1.shape[1]
    raise BilensError(f"q1 has {heads} heads, not a multiple of the {kv_heads} heads of k1")


def _check_state(state: Tensor, empty: Tensor) -> None:
    for name in ("shape", "dtype", "device"):
        value, expected = (getattr(x, name, type(x)) for x in (state, empty))
        if value != expected:
            raise BilensError(
                f"state has {name} {value}, expected {expected}; start with state=None and resume "
                "from the state that the call before returned"
            )


def _checked_scale(scale: float | None, q1: Tensor) -> float:
    if scale is None:
        return float(q1.shape[-1] ** -2)
    try:
        value = float(scale)
    except (TypeError, ValueError, OverflowError):
        value = math.nan
    if not math.isfinite(value):
        raise BilensError(f"scale={scale!r:.200}, expected a finite number")
    return value


def _check_squared(inputs: Inputs, constant: Tensor | None, normalised: bool) -> None:
    q1, _, _, q2, _ = inputs
    if not isinstance(normalised, bool):
        raise BilensError(f"normalised is {type(normalised).__name__}, expected true or false")
    if q2 is not None:
        raise BilensError("constant and normalised are for squared attention, without q2 and k2")
    if constant is not None and (
        not isinstance(constant, Tensor)
        or constant.shape != (q1.shape[1],)
        or constant.layout is not torch.strided
        or constant.device != q1.device
        or not constant.is_floating_point()
    ):
        shape = tuple(constant.shape) if isinstance(constant, Tensor) else type(constant).__name__
        raise BilensError(
            f"constant is {shape}, expected ({q1.shape[1]},), one for each head, on {q1.device}"
        )


def _check_seen(seen: Tensor, k1: Tensor) -> None:
    expected = k1.shape[0], k1.shape[2]
    if not isinstance(seen, Tensor) or seen.dtype != torch.bool or seen.shape != expected:
        shape = tuple(seen.shape) if isinstance(seen, Tensor) else type(seen).__name__
        kind = f" of {seen.dtype}" if isinstance(seen, Tensor) else ""
        raise BilensError(f"seen is {shape}{kind}, expected {expected} of torch.bool")
    if seen.device != k1.device:
        raise BilensError(f"seen is on {seen.device} and k1 on {k1.device}; move one of them")


@cache
def _import_triton() -> Kernel:
    # Triton need not be there, and only a GPU needs it. Asking for a module takes as long as a
    # launch does, hence the cache.
    return import_module("bilens.kernels.triton_chunked").triton_chunked


def _gpu_kernel() -> Kernel:
    # Asked when the operator runs, so that a compiled model need not follow the question.
    if triton_problem() is None:
        return _import_triton()
    _warn_once()
    return chunked


operators.KERNELS.update({"chunked": lambda: chunked, "triton": _import_triton, GPU: _gpu_kernel})
