"""Gradients of attention without softmax, which are such attention themselves.

    y_t = sum_{s<=t} (q1_t . k1_s)(q2_t . k2_s) v_s

is linear in each of its five inputs and, under dy, symmetric in (q1, k1), (q2, k2) and (dy, v). So

    dq1_t = sum_{s<=t} (dy_t . v_s)(q2_t . k2_s) k1_s,
    dk1_s = sum_{t>=s} (v_s . dy_t)(k2_s . q2_t) q1_t,
    dv_s  = sum_{t>=s} (k1_s . q1_t)(k2_s . q2_t) dy_t,

and a kernel for y is one for the gradients of gradients of any order.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from bilens.kernels.features import products, weights
from bilens.kernels.precision import no_autocast

__all__ = ["Inputs", "backward"]

Attend = Callable[[Tensor, Tensor, Tensor, Tensor | None, Tensor | None], Tensor]
"""From q1, k1, v, q2 and k2 to y, with a scale of one."""
Inputs = tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None]
"""q1, k1, v, q2 and k2 (batch, heads, time, width); without q2 and k2 one score is squared."""
Gradients = Callable[[Inputs, Tensor | None, Tensor, Tensor | None], list[Tensor | None]]
"""From inputs, state, dy without its scale and dstate to the gradients of inputs and state."""


def backward(
    ctx: Any, dy: Tensor, dstate: Tensor | None, attend: Attend, gradients: Gradients
) -> tuple[Tensor | None, ...]:
    """What the backward pass of a kernel gives: gradients of q1, k1, v, q2, k2, scale and state.

    Args:
        ctx: holds the inputs and the state as saved tensors, in this order, and `scale`.
        dy: gradient of y.
        dstate: gradient of the state behind the last token, if there is one.
        attend: the kernel, going on from no state.
        gradients: the kernel's own, which cannot be differentiated again.
    """
    *saved, state = ctx.saved_tensors
    inputs: Inputs = tuple(saved)
    with no_autocast(dy.device):
        dy = dy * ctx.scale
        # Gradients are on here where these will be differentiated again.
        if torch.is_grad_enabled():
            found = _differentiable_gradients(attend, inputs, state, dy, dstate)
        else:
            found = gradients(inputs, state, dy, dstate)
    return *found[:5], None, found[5]


def _differentiable_gradients(
    attend: Attend, inputs: Inputs, state: Tensor | None, dy: Tensor, dstate: Tensor | None
) -> list[Tensor | None]:
    """Gradients that can be differentiated again, at about twice the cost of those that cannot.

    Args:
        attend: a kernel, that goes on from no state.
        inputs: of y.
        state: before the first token (batch, kv_heads, features, d_value), if there is one.
        dy: gradient of y without its scale.
        dstate: gradient of the state behind the last token, if there is one.

    Returns:
        Gradients of the inputs and of the state.
    """
    found = [*_attention_gradients(attend, inputs, dy), None]
    if state is None or dstate is None:
        return found
    more = _state_gradients(inputs, state, dy, dstate)
    return [a if b is None else b if a is None else a + b for a, b in zip(found, more, strict=True)]


def _attention_gradients(attend: Attend, inputs: Inputs, dy: Tensor) -> list[Tensor | None]:
    q1, k1, v, q2, k2 = inputs
    sharing = q1.shape[1] // k1.shape[1]

    def spread(x: Tensor) -> Tensor:
        return x.repeat_interleave(sharing, 1).flip(2)

    def later(k1: Tensor, q1: Tensor, v: Tensor, k2: Tensor | None, q2: Tensor | None) -> Tensor:
        """Keys look at the queries behind them, of all heads that share them."""
        second = (None, None) if k2 is None or q2 is None else (spread(k2), q2.flip(2))
        found = attend(spread(k1), q1.flip(2), v.flip(2), *second).flip(2)
        return found.view(*k1.shape[:2], sharing, *found.shape[2:]).sum(2)

    dv = later(k1, q1, dy, k2, q2)
    if q2 is None or k2 is None:
        dq = 2 * attend(dy, v, k1, q1, k1)
        return [dq, 2 * later(v, dy, q1, k1, q1), dv, None, None]
    dq1, dq2 = attend(dy, v, k1, q2, k2), attend(dy, v, k2, q1, k1)
    dk1, dk2 = later(v, dy, q1, k2, q2), later(v, dy, q2, k1, q1)
    return [dq1, dk1, dv, dq2, dk2]


def _state_gradients(
    inputs: Inputs, state: Tensor, dy: Tensor, dstate: Tensor
) -> list[Tensor | None]:
    """By way of what is read from the state, and of what the tokens add to it."""
    given = [x for x in (*inputs, state) if x is not None]
    q1, k1, v, *rest = (x.to(state.dtype) for x in given[:-1])
    q2, k2 = rest or (q1, k1)
    symmetric = not rest
    read = products(q1, q2, symmetric=symmetric)
    if symmetric:
        read = read * weights(q1.shape[-1], q1).T
    read = read.view(*k1.shape[:2], -1, *read.shape[2:])
    y = read @ state[:, :, None]
    last = state + products(k1, k2, symmetric=symmetric).mT @ v
    total = (dy.reshape(y.shape) * y).sum() + (dstate * last).sum()
    wanted = [x for x in given if x.requires_grad]
    found = iter(torch.autograd.grad(total, wanted, create_graph=True))
    return [next(found) if x is not None and x.requires_grad else None for x in (*inputs, state)]
