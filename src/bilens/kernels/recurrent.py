"""Bilinear attention one token at a time, with a state whose size does not grow."""

import torch
from jaxtyping import Float
from torch import Tensor

from bilens.kernels.chunk import columns, rows
from bilens.kernels.features import blocks, features

__all__ = ["recurrent"]


def recurrent(
    q1: Float[Tensor, "batch heads time d_head"],
    k1: Float[Tensor, "batch kv_heads time d_head"],
    v: Float[Tensor, "batch kv_heads time d_value"],
    q2: Float[Tensor, "batch heads time d_head"] | None,
    k2: Float[Tensor, "batch kv_heads time d_head"] | None,
    scale: float,
    state: Float[Tensor, "batch kv_heads d_value features"],
) -> tuple[
    Float[Tensor, "batch heads time d_value"], Float[Tensor, "batch kv_heads d_value features"]
]:
    """S_t = S_{t-1} + v_t (k1_t ⊛ k2_t)', y_t = scale S_t (q1_t ⊛ q2_t).

    The arguments and results are those of `bilens.kernels.chunked.chunked`. A token costs
    d_head^2 d_value multiplications a head, however many came before it.
    """
    batch, kv_heads, time, width = k1.shape
    plan = blocks(width, width, symmetric=q2 is None)
    sharing = q1.shape[1] // kv_heads

    def column(x: Tensor, t: int) -> Tensor:
        one = x[:, :, t : t + 1].unflatten(1, (kv_heads, -1)).flatten(0, 1)
        return columns(one, state.dtype)

    def products(first: Tensor, second: Tensor | None, t: int) -> Tensor:
        a, b = column(first, t), column(first if second is None else second, t)
        return torch.cat([features(a, b, block) for block in plan], 1)

    S, found = state.flatten(0, 1), []
    for t in range(time):
        S = S + column(v, t) @ products(k1, k2, t).mT
        found.append(rows(S @ products(q1, q2, t) * scale, sharing))
    y = torch.cat(found, 2).unflatten(0, (batch, kv_heads)).flatten(1, 2)
    return y.to(v.dtype), S.unflatten(0, (batch, kv_heads))
