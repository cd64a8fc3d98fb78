"""Causal attention without softmax, by whichever kernel suits the inputs."""

import warnings
from functools import cache
from importlib.util import find_spec
from typing import Literal, get_args

import torch
from jaxtyping import Float
from torch import Tensor

from bilens.errors import BilensError
from bilens.kernels.chunked import chunked, empty_state
from bilens.kernels.recurrent import recurrent
from bilens.kernels.reference import reference

__all__ = ["KERNELS", "KernelName", "bilinear_attention", "resume_attention"]

KernelName = Literal["auto", "reference", "chunked", "recurrent", "triton"]
"""Which kernel computes attention; auto picks by device, length and head size."""
KERNELS: tuple[str, ...] = get_args(KernelName)
"""Their names."""

DTYPES = (torch.float64, torch.float32, torch.bfloat16)
SHORT = 24
"""The kernels cross at about this many tokens for each coordinate of a head, measured on a CPU."""
PATTERN = 2**26
"""Numbers of a pattern that auto is ready to hold: a quarter of a gigabyte in float32."""


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
        q1: first queries; a multiple of the heads of keys, each head of which so many heads that
            follow one another share.
        k1: first keys.
        v: values.
        q2: second queries.
        k2: second keys.
        scale: of the product of both scores; 1 / d_head^2 by default.
        kernel: reference (the whole pattern), chunked (time linear in the length), recurrent (one
            token after another), triton (chunked, on a GPU, in float32 or bfloat16), or auto: the
            reference for short texts, and else triton on a GPU and chunked anywhere else. Where
            they cross is measured on a CPU; the Triton kernels are tested in Triton's interpreter
            and not timed on any GPU.

    Raises:
        BilensError: shapes, dtypes or devices do not fit, the kernel is unknown, or Triton is
            asked for and missing or without a GPU.

    Source:
        Pattern and scale: the post on tensor-transformer variants, "Replacing softmax attention".
    """
    _check(q1, k1, v, q2, k2)
    if kernel not in KERNELS:
        raise BilensError(f"kernel={kernel!r}, expected one of {', '.join(KERNELS)}")
    if kernel == "auto":
        kernel = "reference" if _is_short(q1) else _linear(v.device.type, v.dtype)
    scale = q1.shape[-1] ** -2 if scale is None else scale
    with torch.autocast(v.device.type, enabled=False):
        if kernel == "reference":
            return reference(q1, k1, v, q2, k2, scale)
        if kernel == "triton":
            _require_triton(v.device.type, v.dtype)
            from bilens.kernels.triton_chunked import triton_chunked  # noqa: PLC0415

            return triton_chunked(q1, k1, v, q2, k2, scale)
        if kernel == "chunked":
            return chunked(q1, k1, v, q2, k2, scale, None)[0]
        return recurrent(q1, k1, v, q2, k2, scale, empty_state(k1, v, symmetric=q2 is None))[0]


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
        q1: first queries of the tokens, and so on as there.
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
    _check(q1, k1, v, q2, k2)
    empty = empty_state(k1, v, symmetric=q2 is None)
    state = empty if state is None else state
    if state.shape != empty.shape:
        raise BilensError(
            f"state has shape {tuple(state.shape)}, expected {tuple(empty.shape)}; start with "
            "state=None and go on with what the call before gave back"
        )
    scale = q1.shape[-1] ** -2 if scale is None else scale
    run = recurrent if q1.shape[2] == 1 else chunked
    with torch.autocast(v.device.type, enabled=False):
        return run(q1, k1, v, q2, k2, scale, state)


def _is_short(q1: Tensor) -> bool:
    """Whether the quadratic form is the faster one and its pattern no burden on memory."""
    batch, heads, time, width = q1.shape
    return time <= SHORT * width and batch * heads * time**2 <= PATTERN


def _linear(device: str, dtype: torch.dtype) -> KernelName:
    if device != "cuda" or dtype == torch.float64:
        return "chunked"
    if find_spec("triton") is None:
        _warn_once()
        return "chunked"
    return "triton"


@cache
def _warn_once() -> None:
    warnings.warn(
        "Triton is missing, so bilinear attention on the GPU takes the chunked kernel; "
        "pip install 'bilens[gpu]' for Triton's",
        stacklevel=4,
    )


def _require_triton(device: str, dtype: torch.dtype) -> None:
    if find_spec("triton") is None:
        raise BilensError(
            "kernel='triton', but Triton is missing; pip install 'bilens[gpu]' or take 'chunked'"
        )
    if device != "cuda" or dtype == torch.float64:
        raise BilensError(
            f"kernel='triton' is for float32 and bfloat16 on a GPU, not {dtype} on {device}; take "
            "'chunked' or 'auto'"
        )


def _check(q1: Tensor, k1: Tensor, v: Tensor, q2: Tensor | None, k2: Tensor | None) -> None:
    if (q2 is None) != (k2 is None):
        raise BilensError(
            "q2 and k2 come together: both for bilinear attention, neither for squared attention"
        )
    named = {"q1": q1, "k1": k1, "v": v}
    if q2 is not None and k2 is not None:
        named |= {"q2": q2, "k2": k2}
    for name, x in named.items():
        if x.ndim != 4 or 0 in x.shape:
            raise BilensError(
                f"{name} has shape {tuple(x.shape)}, expected (batch, heads, time, d_head), "
                "none of them zero"
            )
        if x.dtype != v.dtype or x.dtype not in DTYPES:
            raise BilensError(
                f"{name} is {x.dtype} and v is {v.dtype}; expected one of float64, float32 and "
                "bfloat16 for all. The range of float16 is too small for products of scores"
            )
        if x.device != v.device:
            raise BilensError(f"{name} is on {x.device} and v on {v.device}; move one of them")
    batch, heads, time, width = q1.shape
    kv_heads = k1.shape[1]
    if heads % kv_heads:
        raise BilensError(f"q1 has {heads} heads, no multiple of the {kv_heads} heads of k1")
    wanted = {
        "q2": (batch, heads, time, width),
        "k1": (batch, kv_heads, time, width),
        "k2": (batch, kv_heads, time, width),
        "v": (batch, kv_heads, time, v.shape[-1]),
    }
    for name, x in named.items():
        shape = wanted.get(name, x.shape)
        if x.shape != shape:
            raise BilensError(
                f"{name} has shape {tuple(x.shape)}, expected {shape} beside q1 of shape "
                f" {tuple(q1.shape)} and {kv_heads} heads of keys"
            )
