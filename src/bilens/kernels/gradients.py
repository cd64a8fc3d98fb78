"""Gradients of attention without softmax, which are such attention themselves.

    y_t = sum_{s<=t} (q1_t . k1_s)(q2_t . k2_s) v_s

is linear in each of its five inputs and, under dy, symmetric in (q1, k1), (q2, k2) and (dy, v). So

    dq1_t = sum_{s<=t} (dy_t . v_s)(q2_t . k2_s) k1_s,
    dk1_s = sum_{t>=s} (v_s . dy_t)(k2_s . q2_t) q1_t,
    dv_s  = sum_{t>=s} (k1_s . q1_t)(k2_s . q2_t) dy_t,

and a kernel for y is one for the gradients of gradients of any order.

Kernels are operators of torch, `bilens::attend` and `bilens::attend_gradients`, whose insides
`torch.compile` does not see: a compiled model has them as single nodes.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor

from bilens.kernels.features import products, weights

Inputs = tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None]
"""q1 (batch, heads, time, d_head), k1 (batch, kv_heads, time, d_head), v (batch, kv_heads, time,
d_value), q2 and k2, which are None where one score is squared. Consecutive heads share keys and
values."""
Attend = Callable[[Tensor, Tensor, Tensor, Tensor | None, Tensor | None], Tensor]
"""From q1, k1, v, q2 and k2 to y, with a scale of one."""


class Kernel(NamedTuple):
    """Attention and its gradients, without autograd.

    Attributes:
        attend: from inputs, scale and the state of earlier tokens, or None, to contiguous y and, if
            a state was given, the state of all tokens.
        gradients: from inputs, state, dy times the scale and the gradient of the last state to the
            gradients of the five inputs and of the state.
    """

    attend: Callable[[Inputs, float, Tensor | None], tuple[Tensor, Tensor | None]]
    gradients: Callable[[Inputs, Tensor | None, Tensor, Tensor | None], list[Tensor | None]]


KERNELS: dict[str, Callable[[], Kernel]] = {}
"""Functions that import and return a kernel, by its name."""


def attend(
    kernel: str, inputs: Inputs, scale: float, state: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """Return y and, if a state was given, the state of all tokens; differentiable in any order."""
    if torch.compiler.is_compiling():
        y, last = torch.ops.bilens.attend(kernel, *inputs, state, scale)
    elif torch.is_grad_enabled() and any(
        x is not None and x.requires_grad for x in (*inputs, state)
    ):
        # The operators cost the host half as much again, which short texts on a GPU wait for.
        y, last = _Differentiable.apply(kernel, *inputs, state, scale)  # type: ignore[no-untyped-call]
    else:
        y, last = _run_attend(kernel, *inputs, state, scale)
    return y, None if state is None else last


def no_autocast(device: torch.device) -> AbstractContextManager[object]:
    """Return a context in which products are in their operands' dtype, as in a backward pass."""
    # Entering a context costs more than asking, and every call of a kernel comes by here.
    if not torch.amp.is_autocast_available(device.type) or not torch.is_autocast_enabled(
        device.type
    ):
        return nullcontext()
    return torch.autocast(device.type, enabled=False)


# Arguments of operators: those of `_INPUTS` first, a kernel, five inputs and a state.


def _run_attend(kernel: str, *given: Any) -> tuple[Tensor, Tensor]:
    *inputs, state, scale = given
    with no_autocast(inputs[2].device):
        y, last = KERNELS[kernel]().attend(tuple(inputs), scale, state)
    return y, y.new_empty(0) if last is None else last


def _run_gradients(kernel: str, *given: Any) -> list[Tensor]:
    *inputs, state, dy, dlast = given
    with no_autocast(dy.device):
        gradients = KERNELS[kernel]().gradients(tuple(inputs), state, dy, dlast)
    return [x for x in gradients if x is not None]


def _fake_attend(kernel: str, *given: Any) -> tuple[Tensor, Tensor]:
    q1, _, v, _, _, state, _ = given
    y = v.new_empty(*q1.shape[:3], v.shape[-1])
    return y, v.new_empty(0) if state is None else torch.empty_like(state)


def _fake_gradients(kernel: str, *given: Any) -> list[Tensor]:
    return [x.new_empty(x.shape) for x in given[:6] if x is not None]


def _save(ctx: Any, inputs: tuple[Any, ...], output: object) -> None:
    ctx.kernel, *tensors, ctx.scale = inputs
    ctx.save_for_backward(*tensors)


def _backward(ctx: Any, dy: Tensor, dlast: Tensor) -> tuple[Tensor | None, ...]:
    *given, state = ctx.saved_tensors
    inputs = tuple(given)
    # Scaled once here, as every gradient is linear in dy: no kernel needs to know the scale.
    dy = dy * ctx.scale
    if torch.is_grad_enabled():
        # Gradients are recorded here if they will be differentiated again, at twice the cost.
        with no_autocast(dy.device):
            gradients = _differentiable_gradients(ctx.kernel, inputs, state, dy, dlast)
        return None, *gradients, None
    compiling = torch.compiler.is_compiling()
    run: Callable[..., list[Tensor]] = (
        torch.ops.bilens.attend_gradients if compiling else _run_gradients
    )
    compact = iter(run(ctx.kernel, *inputs, state, dy, None if state is None else dlast))
    gradients = [None if x is None else next(compact) for x in (*inputs, state)]
    return None, *gradients, None


class _Differentiable(torch.autograd.Function):
    """The same as the operator with its gradients, for calls outside a compiled model."""

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> tuple[Tensor, Tensor]:
        _save(ctx, inputs, None)
        return _run_attend(*inputs)

    @staticmethod
    def backward(ctx: Any, dy: Tensor, dlast: Tensor) -> tuple[Tensor | None, ...]:
        return _backward(ctx, dy, dlast)


# Of the lower interface: `torch.library.custom_op` costs twice the host's time of a call.
_INPUTS = "str kernel, Tensor q1, Tensor k1, Tensor v, Tensor? q2, Tensor? k2, Tensor? state"
_LIBRARY = torch.library.Library("bilens", "FRAGMENT")
_LIBRARY.define(f"attend({_INPUTS}, float scale) -> (Tensor, Tensor)")
_LIBRARY.define(f"attend_gradients({_INPUTS}, Tensor dy, Tensor? dlast) -> Tensor[]")
_LIBRARY.impl("attend", _run_attend, "CompositeExplicitAutograd")
_LIBRARY.impl("attend_gradients", _run_gradients, "CompositeExplicitAutograd")
torch.library.register_fake("bilens::attend", _fake_attend, lib=_LIBRARY)
torch.library.register_fake("bilens::attend_gradients", _fake_gradients, lib=_LIBRARY)
torch.library.register_autograd("bilens::attend", _backward, setup_context=_save, lib=_LIBRARY)


def _differentiable_gradients(
    kernel: str, inputs: Inputs, state: Tensor | None, dy: Tensor, dlast: Tensor | None
) -> list[Tensor | None]:
    """Return the result of `Kernel.gradients`, computed by differentiable functions."""

    def without_state(*inputs: Any) -> Tensor:
        return attend(kernel, inputs, 1.0, None)[0]

    gradients = [*_attention_gradients(without_state, inputs, dy), None]
    if state is None or dlast is None:
        return gradients
    more = _state_gradients(inputs, state, dy, dlast)
    return [
        a if b is None else b if a is None else a + b for a, b in zip(gradients, more, strict=True)
    ]


def _attention_gradients(attend: Attend, inputs: Inputs, dy: Tensor) -> list[Tensor | None]:
    q1, k1, v, q2, k2 = inputs
    sharing = q1.shape[1] // k1.shape[1]

    def spread(x: Tensor) -> Tensor:
        return x.repeat_interleave(sharing, 1).flip(2)

    def later(k1: Tensor, q1: Tensor, v: Tensor, k2: Tensor | None, q2: Tensor | None) -> Tensor:
        """Let keys attend to the queries after them, of all heads that share them."""
        # Attention from the end is causal attention of the text reversed.
        second = (None, None) if k2 is None or q2 is None else (spread(k2), q2.flip(2))
        y = attend(spread(k1), q1.flip(2), v.flip(2), *second).flip(2)
        return y.view(*k1.shape[:2], sharing, *y.shape[2:]).sum(2)

    # The keys play the queries: dv_s sums over the queries after it, with dy as values.
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
    """Return the gradients through the reads of a state and the tokens' additions to it."""
    given = [x for x in (*inputs, state) if x is not None]
    q1, k1, v, *second = (x.to(state.dtype) for x in given[:-1])
    q2, k2 = second or (q1, k1)
    symmetric = not second
    # Written with autograd's own operations: this is only for gradients of gradients.
    read = products(q1, q2, symmetric=symmetric)
    if symmetric:
        read = read * weights(q1.shape[-1], q1).T
    read = read.view(*k1.shape[:2], -1, *read.shape[2:])
    y = read @ state[:, :, None]
    last = state + products(k1, k2, symmetric=symmetric).mT @ v
    total = (dy.reshape(y.shape) * y).sum() + (dstate * last).sum()
    wanted = [x for x in given if x.requires_grad]
    gradients = iter(torch.autograd.grad(total, wanted, create_graph=True))
    return [
        next(gradients) if x is not None and x.requires_grad else None for x in (*inputs, state)
    ]
