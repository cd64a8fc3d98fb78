"""Gradients of attention without softmax, which are such attention themselves.

    y_t = sum_{s<=t} (q1_t . k1_s)(q2_t . k2_s) v_s

is linear in each of its five inputs and, under dy, symmetric in (q1, k1), (q2, k2) and (dy, v). So

    dq1_t = sum_{s<=t} (dy_t . v_s)(q2_t . k2_s) k1_s,
    dk1_s = sum_{t>=s} (v_s . dy_t)(k2_s . q2_t) q1_t,
    dv_s  = sum_{t>=s} (k1_s . q1_t)(k2_s . q2_t) dy_t,

and a kernel for y is one for the gradients of gradients of any order.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from bilens.kernels.features import products, weights

__all__ = ["Inputs", "Kernel", "no_autocast"]

Inputs = tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None]
"""q1 (batch, heads, time, d_head), k1 (batch, kv_heads, time, d_head), v (batch, kv_heads, time,
d_value), q2 and k2, which are None where one score is squared. Heads that follow one another share
keys and values."""
Attend = Callable[[Tensor, Tensor, Tensor, Tensor | None, Tensor | None], Tensor]
"""From q1, k1, v, q2 and k2 to y, with a scale of one."""


def no_autocast(device: torch.device) -> AbstractContextManager[object]:
    """Products of tensors on a device are in their own dtype, as a backward pass's are too."""
    if not torch.amp.is_autocast_available(device.type):
        return nullcontext()
    return torch.autocast(device.type, enabled=False)


class Kernel(NamedTuple):
    """Attention with gradients of any order, called as `attend` is.

    Attributes:
        attend: from inputs, scale and the state of the tokens before, or None, to y and, where a
            state was given, the state of all tokens.
        gradients: from inputs, state, dy times the scale and the gradient of the last state to the
            gradients of the five inputs and of the state, which cannot be differentiated again.
    """

    attend: Callable[[Inputs, float, Tensor | None], tuple[Tensor, Tensor | None]]
    gradients: Callable[[Inputs, Tensor | None, Tensor, Tensor | None], list[Tensor | None]]

    def __call__(
        self, inputs: Inputs, scale: float, state: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """See `attend`."""
        y, last = _Differentiable.apply(self, scale, state, *inputs)  # type: ignore[no-untyped-call]
        return y, last


class _Differentiable(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, kernel: Kernel, scale: float, state: Tensor | None, *inputs: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        ctx.save_for_backward(*inputs, state)
        ctx.kernel, ctx.scale = kernel, scale
        return kernel.attend(inputs, scale, state)  # type: ignore[arg-type]

    @staticmethod
    def backward(ctx: Any, dy: Tensor, dstate: Tensor | None) -> tuple[Tensor | None, ...]:
        *inputs, state = ctx.saved_tensors
        with no_autocast(dy.device):
            gradients = ctx.kernel.gradients
            # Gradients are on here where these will be differentiated again, at twice the cost.
            if torch.is_grad_enabled():
                gradients = partial(_differentiable_gradients, ctx.kernel)
            *found, to_state = gradients(tuple(inputs), state, dy * ctx.scale, dstate)
        return None, None, to_state, *found


def _differentiable_gradients(
    kernel: Kernel, inputs: Inputs, state: Tensor | None, dy: Tensor, dstate: Tensor | None
) -> list[Tensor | None]:
    """What `Kernel.gradients` gives, made of what autograd knows."""

    def attend(*inputs: Any) -> Tensor:
        return kernel(inputs, 1.0, None)[0]

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
