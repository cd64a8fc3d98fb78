"""Gradients of attention without softmax, which are such attention themselves.

    y_t = sum_{s<=t} (q1_t . k1_s)(q2_t . k2_s) v_s

is linear in each of its five inputs and symmetric in the three pairs (q1, k1), (q2, k2), (dy, v). So

    dq1_t = sum_{s<=t} (dy_t . v_s)(q2_t . k2_s) k1_s,
    dk1_s = sum_{t>=s} (v_s . dy_t)(k2_s . q2_t) q1_t,
    dv_s  = sum_{t>=s} (k1_s . q1_t)(k2_s . q2_t) dy_t,

and a kernel for y is one for the gradients of gradients of any order.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from bilens.kernels.features import products, weights

__all__ = ["Inputs", "attention_gradients", "state_gradients"]

Attend = Callable[[Tensor, Tensor, Tensor, Tensor | None, Tensor | None], Tensor]
"""From q1, k1, v, q2 and k2 to y, with a scale of one."""
Inputs = tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None]
"""q1, k1, v, q2 and k2 (batch, heads, time, width); without q2 and k2 one score is squared."""


def attention_gradients(
    attend: Attend, inputs: Inputs, dy: Tensor
) -> list[Tensor | None]:
    """Gradients of q1, k1, v, q2 and k2, which can be differentiated again."""
    q1, k1, v, q2, k2 = inputs
    sharing = q1.shape[1] // k1.shape[1]

    def later(a: Tensor, b: Tensor | None, queries: tuple[Tensor, Tensor | None, Tensor]) -> Tensor:
        """Keys look at the queries behind them, of all heads that share them."""
        a, b = (
            None if x is None else x.repeat_interleave(sharing, 1).flip(2) for x in (a, b)
        )
        q, p, values = (None if x is None else x.flip(2) for x in queries)
        found = attend(a, q, values, b, p).flip(2)
        return found.unflatten(1, (-1, sharing)).sum(2)

    dv = later(k1, k2, (q1, q2, dy))
    if q2 is None or k2 is None:
        dq = 2 * attend(dy, v, k1, q1, k1)
        return [dq, 2 * later(v, k1, (dy, q1, q1)), dv, None, None]
    dq1, dq2 = attend(dy, v, k1, q2, k2), attend(dy, v, k2, q1, k1)
    dk1, dk2 = later(v, k2, (dy, q2, q1)), later(v, k1, (dy, q1, q2))
    return [dq1, dk1, dv, dq2, dk2]


def state_gradients(
    inputs: Inputs, state: Tensor, dy: Tensor, dstate: Tensor
) -> list[Tensor | None]:
    """What a state before the text and the gradient of that behind it add, differentiable too.

    Args:
        inputs: q1, k1, v, q2 and k2.
        state: before the first token (batch, kv_heads, features, d_value).
        dy: gradient of what is read, sum_ij q1_i q2_j state_ij.
        dstate: gradient of the state behind the last token.

    Returns:
        Gradients of the inputs and of the state.
    """
    q1, k1, v, q2, k2 = (None if x is None else x.to(state.dtype) for x in inputs)
    symmetric = q2 is None
    read = products(q1, q1 if q2 is None else q2, symmetric=symmetric)
    written = products(k1, k1 if k2 is None else k2, symmetric=symmetric)
    if symmetric:
        read = read * weights(q1.shape[-1], q1)
    y = read.unflatten(1, (k1.shape[1], -1)) @ state[:, :, None]
    total = (dy.view_as(y) * y).sum() + (dstate * (state + written.mT @ v)).sum()
    given = [*inputs, state]
    wanted = [x for x in given if x is not None and x.requires_grad]
    found = iter(torch.autograd.grad(total, wanted, create_graph=True))
    return [next(found) if x is not None and x.requires_grad else None for x in given]
