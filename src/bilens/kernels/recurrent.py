"""Bilinear attention one token at a time, with a state whose size does not grow."""

import torch
from torch import Tensor

from bilens.kernels.features import products, weights
from bilens.kernels.gradients import Inputs

__all__ = ["recurrent"]


def recurrent(inputs: Inputs, scale: float, state: Tensor) -> tuple[Tensor, Tensor]:
    """S_t = S_{t-1} + (k1_t ⊛ k2_t) v_t', y_t = scale S_t' (q1_t ⊛ q2_t).

    The arguments and results are those of `bilens.kernels.chunked`. A token costs d_head^2 d_value
    multiplications a head, however many came before it.
    """
    q1, k1, v, q2, k2 = inputs
    kv_heads, symmetric = k1.shape[1], q2 is None

    def of(x: Tensor, t: int) -> Tensor:
        one: Tensor = x[:, :, t].unflatten(1, (kv_heads, -1))
        return one.to(state.dtype)

    def both(first: Tensor, second: Tensor | None, t: int) -> Tensor:
        a = of(first, t)
        return products(a, a if second is None else of(second, t), symmetric=symmetric)

    weight = weights(k1.shape[-1], state).T if symmetric else 1
    S, found = state, []
    for t in range(k1.shape[2]):
        S = S + both(k1, k2, t).mT @ of(v, t)
        found.append(weight * both(q1, q2, t) @ S * scale)
    return torch.stack(found, 3).flatten(1, 2).to(v.dtype), S
