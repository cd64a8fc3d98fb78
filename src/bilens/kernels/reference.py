"""Bilinear attention as its equation says, with the whole pattern in memory."""

import torch
from torch import Tensor

from bilens.kernels.gradients import Inputs

__all__ = ["reference"]


def reference(inputs: Inputs, scale: float) -> Tensor:
    """y_t = scale sum_{s<=t} (q1_t . k1_s)(q2_t . k2_s) v_s; the truth that tests compare with.

    Time and memory grow with the square of the length. Arithmetic is at least in float32, as in the
    other kernels.
    """
    q1, k1, v, q2, k2 = inputs
    sharing = q1.shape[1] // k1.shape[1]
    dtype = torch.promote_types(v.dtype, torch.float32)

    def score(q: Tensor, k: Tensor) -> Tensor:
        return q.to(dtype) @ k.to(dtype).repeat_interleave(sharing, 1).mT

    first = score(q1, k1)
    second = first if q2 is None or k2 is None else score(q2, k2)
    pattern = (first * second * scale).tril()
    return (pattern @ v.to(dtype).repeat_interleave(sharing, 1)).to(v.dtype)
