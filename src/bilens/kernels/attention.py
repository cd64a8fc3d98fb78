"""Causal attention without softmax, by whichever kernel suits the inputs."""

import os
import warnings
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Literal, get_args

import torch
from jaxtyping import Float
from torch import Tensor

from bilens.checks import checked
from bilens.errors import BilensError
from bilens.kernels.chunked import chunked, empty_state
from bilens.kernels.gradients import Inputs, no_autocast
from bilens.kernels.recurrent import recurrent
from bilens.kernels.reference import reference
from bilens.lazy_imports import lazy_import

if TYPE_CHECKING:
    from bilens.kernels import triton_chunked
else:
    triton_chunked = lazy_import("bilens.kernels.triton_chunked")

KernelName = Literal["auto", "reference", "chunked", "recurrent", "triton"]
"""Which kernel computes attention; auto picks by device, length and head size."""
KERNELS: tuple[str, ...] = get_args(KernelName)
"""Their names."""

DTYPES = (torch.float64, torch.float32, torch.bfloat16)
SHORT = 16
"""On a CPU, reference and chunked cross at about this many tokens for each coordinate of a head, as
measured. Elsewhere the operations are counted: they cross at d_head^2 tokens."""
PATTERN = 2**26
"""Numbers of a pattern that auto is ready to hold: a quarter of a gigabyte in float32."""
WIDEST = 128
"""Coordinates of a head or a value for which tiles of the Triton kernels fit on a GPU."""
TRITON = ("3.9.0",)
"""Versions of Triton whose kernels were compared with exact attention on a GPU. On an H100 Triton
3.6 compiles the same source to a race: rows are wrong by up to 11 %, differently in each run.
Versions between 3.6 and 3.9 were never run."""


@checked
def bilinear_attention(
    q1: Float[Tensor, "batch heads time d_head"],
    k1: Float[Tensor, "batch kv_heads time d_head"],
    v: Float[Tensor, "batch kv_heads time d_value"],
    q2: Float[Tensor, "batch heads time d_head"] | None = None,
    k2: Float[Tensor, "batch kv_heads time d_head"] | None = None,
    *,
    scale: float | None = None,
    kernel: KernelName = "auto",
) -> Float[Tensor, "batch heads time d_value"]:
    """y_t = scale sum_{s<=t} (q1_t . k1_s)(q2_t . k2_s) v_s.

    Without q2 and k2 this is squared attention, scale (q1_t . k1_s)^2. Arithmetic is in the dtype
    of the inputs and at least in float32.

    Args:
        q1: first queries; so many heads that follow one another share each head of keys.
        k1: first keys.
        v: values.
        q2: second queries.
        k2: second keys.
        scale: of the product of both scores; 1 / d_head^2 by default.
        kernel: reference (the whole pattern), chunked (time linear in the length), recurrent (one
            token after another), triton (chunked, on a GPU, in float32 or bfloat16, for heads and
            values of up to 128; tested in Triton's interpreter and compiled for several GPUs, not
            timed on any), or auto: triton wherever it can be, else the reference for short texts
            and chunked.

    Raises:
        BilensError: shapes, dtypes or devices do not fit, or the kernel is unknown or cannot take
            them.

    Source: The post on tensor-transformer variants, "Replacing softmax attention".
    """
    inputs = q1, k1, v, q2, k2
    _check(inputs)
    if kernel not in KERNELS:
        raise BilensError(f"kernel={kernel!r}, expected one of {', '.join(KERNELS)}")
    if kernel == "triton":
        _require_triton(inputs)
    kernel = _chosen(inputs) if kernel == "auto" else kernel
    return _attend(kernel, inputs, scale, None)[0]


@checked
def resume_attention(
    q1: Float[Tensor, "batch heads time d_head"],
    k1: Float[Tensor, "batch kv_heads time d_head"],
    v: Float[Tensor, "batch kv_heads time d_value"],
    q2: Float[Tensor, "batch heads time d_head"] | None = None,
    k2: Float[Tensor, "batch kv_heads time d_head"] | None = None,
    *,
    state: Float[Tensor, "batch kv_heads features d_value"] | None = None,
    scale: float | None = None,
) -> tuple[
    Float[Tensor, "batch heads time d_value"], Float[Tensor, "batch kv_heads features d_value"]
]:
    """`bilinear_attention` of some tokens that follow others, of which only a state is kept.

    Args:
        q1: of the tokens, and so k1, v, q2 and k2, as there.
        k1: first keys.
        v: values.
        q2: second queries.
        k2: second keys.
        state: of the tokens before, from an earlier call; None where there are none.
        scale: of the product of both scores; 1 / d_head^2 by default.

    Returns:
        y of the tokens, and the state behind the last of them.

    Raises:
        BilensError: shapes, dtypes or devices do not fit.
    """
    inputs = q1, k1, v, q2, k2
    _check(inputs)
    empty = empty_state(k1, v, symmetric=q2 is None)
    state = empty if state is None else state
    for what in ("shape", "dtype", "device"):
        if getattr(state, what) != getattr(empty, what):
            raise BilensError(
                f"state has {what} {getattr(state, what)}, expected {getattr(empty, what)}; start "
                "with state=None and go on with what the call before gave back"
            )
    kernel = "recurrent" if q1.shape[2] == 1 else _linear(inputs)
    y, last = _attend(kernel, inputs, scale, state)
    return y, state if last is None else last


def _attend(
    kernel: KernelName, inputs: Inputs, scale: float | None, state: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    q1, k1, v, q2, _ = inputs
    scale = q1.shape[-1] ** -2 if scale is None else scale
    with no_autocast(v.device):
        match kernel:
            case "reference":
                return reference(inputs, scale), None
            case "recurrent":
                start = empty_state(k1, v, symmetric=q2 is None) if state is None else state
                return recurrent(inputs, scale, start)
            case "triton":
                return triton_chunked.triton_chunked(inputs, scale, state)
        return chunked(inputs, scale, state)


def _chosen(inputs: Inputs) -> KernelName:
    """Triton, or the quadratic form where it is faster and its pattern no burden on memory."""
    q1, linear = inputs[0], _linear(inputs)
    batch, heads, time, width = q1.shape
    crossing = SHORT * width if q1.device.type == "cpu" else width**2
    short = time <= crossing and batch * heads * time**2 <= PATTERN
    return "reference" if short and linear == "chunked" else linear


def _linear(inputs: Inputs) -> KernelName:
    if inputs[0].device.type != "cuda" or not _fits_triton(inputs):
        return "chunked"
    if triton_problem() is not None:
        _warn_once()
        return "chunked"
    return "triton"


def _fits_triton(inputs: Inputs) -> bool:
    q1, _, v, _, _ = inputs
    on_gpu = v.device.type == "cuda" or os.environ.get("TRITON_INTERPRET") == "1"
    return on_gpu and v.dtype != torch.float64 and max(q1.shape[-1], v.shape[-1]) <= WIDEST


@cache
def triton_problem() -> str | None:
    """Return why the Triton kernels are not used in this process, or None where they can be."""
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


def _check(inputs: Inputs) -> None:
    q1, k1, v, q2, k2 = inputs
    if (q2 is None) != (k2 is None):
        raise BilensError(
            "q2 and k2 come together: both for bilinear attention, neither for squared attention"
        )
    named = {"q1": q1, "k1": k1, "v": v}
    if q2 is not None and k2 is not None:
        named |= {"q2": q2, "k2": k2}
    for name, x in named.items():
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
    if heads % kv_heads:
        raise BilensError(f"q1 has {heads} heads, not a multiple of the {kv_heads} heads of k1")
