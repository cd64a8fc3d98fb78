"""Bilinear attention as its equation says, with the whole pattern in memory."""

import torch
from jaxtyping import Float
from torch import Tensor

__all__ = ["reference"]


def reference(
    q1: Float[Tensor, "batch heads time d_head"],
    k1: Float[Tensor, "batch kv_heads time d_head"],
    v: Float[Tensor, "batch kv_heads time d_value"],
    q2: Float[Tensor, "batch heads time d_head"] | None,
    k2: Float[Tensor, "batch kv_heads time d_head"] | None,
    scale: float,
) -> Float[Tensor, "batch heads time d_value"]:
    """y_t = scale sum_{s<=t} (q1_t . k1_s)(q2_t . k2_s) v_s; the truth that tests compare with.

    Time and memory grow with the square of the length. Without q2 and k2 the first score is
    squared. Arithmetic is at least in float32, as in the other kernels.
    """
    sharing = q1.shape[1] // k1.shape[1]
    dtype = torch.promote_types(v.dtype, torch.float32)

    def score(q: Tensor, k: Tensor) -> Tensor:
        return q.to(dtype) @ k.to(dtype).repeat_interleave(sharing, 1).mT

    first = score(q1, k1)
    second = first if q2 is None or k2 is None else score(q2, k2)
    pattern = (first * second * scale).tril()
    return (pattern @ v.to(dtype).repeat_interleave(sharing, 1)).to(v.dtype)
