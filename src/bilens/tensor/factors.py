"""Factors as they are handed over, of one kind and of any size, and what they may grow to."""

import math

import torch
from jaxtyping import Float, Float64
from torch import Tensor

from bilens.errors import BilensError

__all__ = ["DENSE_LIMIT", "check_dense_size", "check_factors", "readable", "take_out_scale"]

DENSE_LIMIT = 2 * 1024**3
"""Bytes that `dense()` may take unless the caller says more."""

NOTHING = -(2**20)
"""The exponent of zero."""


def check_factors(**factors: Tensor) -> None:
    """See that all are of one dtype and on one device."""
    if len({(factor.dtype, factor.device) for factor in factors.values()}) > 1:
        kinds = ", ".join(f"{name} {f.dtype} on {f.device}" for name, f in factors.items())
        raise BilensError(
            f"The factors are of different kinds: {kinds}. Move them to one dtype and device first."
        )


def check_dense_size(shape: tuple[int, ...], like: Tensor, max_bytes: int) -> None:
    """Refuse to build an array of `shape` that needs more than `max_bytes`."""
    needed = math.prod(shape) * like.element_size()
    if needed > max_bytes:
        raise BilensError(
            f"dense() would build an array of shape {shape} and {needed:,} bytes; the limit is "
            f"max_bytes={max_bytes:,}. Work with the factors, or raise max_bytes."
        )


def readable(*tensors: Tensor) -> list[Tensor]:
    """The same in float32 where they are half precision, which no decomposition takes."""
    return [tensor.to(torch.promote_types(tensor.dtype, torch.float32)) for tensor in tensors]


def take_out_scale(
    left: Float[Tensor, "rank n_in"],
    right: Float[Tensor, "rank n_in"],
    weights: Float[Tensor, "*batch rank"],
) -> tuple[
    Float[Tensor, "rank n_in"],
    Float[Tensor, "rank n_in"],
    Float[Tensor, "*batch rank"],
    Float64[Tensor, "*batch 1"],
]:
    """Factors of the same forms up to `scale`, so that no product of them over- or underflows.

    The largest entry of each row of left, right and weights is from 1/2 to 1, or all are zero. What
    is divided by are powers of two, so nothing is rounded.
    """
    row_left, row_right = (_exponents(f.detach().abs().amax(-1)) for f in (left, right))
    rows = torch.where((row_left > NOTHING) & (row_right > NOTHING), row_left + row_right, 0)
    top = (_exponents(weights) + rows).amax(-1, keepdim=True)
    top = torch.where(top > NOTHING // 2, top, 0)
    scale = torch.exp2(top.double())
    left, right = (
        _shifted(factor, torch.where(row > NOTHING, -row, 0)[:, None])
        for factor, row in ((left, row_left), (right, row_right))
    )
    return left, right, _shifted(weights, rows - top), scale


def _exponents(factor: Tensor) -> Tensor:
    """E with 2^(e-1) <= |x| < 2^e."""
    exponents = torch.frexp(factor.detach()).exponent
    return torch.where(factor == 0, NOTHING, exponents)


def _shifted(factor: Tensor, by: Tensor) -> Tensor:
    """Times 2^by, in two steps, because half of the power may be all that the dtype can hold."""
    half = by // 2
    return factor * torch.exp2(half.to(factor)) * torch.exp2((by - half).to(factor))
