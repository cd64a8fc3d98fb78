"""Bilinear attention as its equations say: the whole pattern, or one token after another."""

import torch
from torch import Tensor

from bilens.kernels.features import products, weights
from bilens.kernels.gradients import Inputs


def reference(inputs: Inputs, scale: float) -> Tensor:
    """Return y_t = scale sum_{s<=t} (q1_t . k1_s)(q2_t . k2_s) v_s; tests compare with it.

    Time and memory grow with the square of the length. Arithmetic is at least in float32, as in the
    other kernels.
    """
    q1, k1, v, q2, k2 = inputs
    sharing = q1.shape[1] // k1.shape[1]
    dtype = torch.promote_types(v.dtype, torch.float32)

    def score(q: Tensor, k: Tensor) -> Tensor:
        return q.to(dtype) @ k.to(dtype).repeat_interleave(sharing, 1).mT

    # A squared score is made once: its pattern is the product with itself.
    first = score(q1, k1)
    second = first if q2 is None or k2 is None else score(q2, k2)
    pattern = (first * second * scale).tril()
    return (pattern @ v.to(dtype).repeat_interleave(sharing, 1)).to(v.dtype)


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
