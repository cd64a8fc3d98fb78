"""Squared attention with a constant in its scores, or with rows that sum to one.

    y_t = sum_{s<=t} P_ts v_s / sum_{s<=t} P_ts,    P_ts = scale (q_t . k_s + c)^2

In the kernels of a GPU the constant is an addition to the score and a row's sum a register:
`bilens::attend_normalised`, an operator with gradients. Elsewhere q . k + c is the product of
[q, c] and [k, 1], and a row's sum is the output of a value of 1.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from bilens.checks import EPS
from bilens.kernels.products import LIBRARY, Inputs, attend, define, no_autocast

Attend = Callable[[Inputs, float], tuple[Tensor, Tensor | None]]
"""From inputs and scale to plain attention, differentiable, and the state after it."""


def by_concatenation(
    plain: Attend,
    inputs: Inputs,
    scale: float,
    constant: Tensor | None,
    seen: Tensor | None,
    *,
    normalised: bool,
) -> tuple[Tensor, Tensor | None]:
    """Return attention by plain attention over one more coordinate and one more value."""
    q, k, v, _, _ = inputs
    if constant is not None:
        column = constant.to(q)[:, None, None].expand(*q.shape[:3], 1)
        q, k = torch.cat([q, column], -1), torch.cat([k, torch.ones_like(k[..., :1])], -1)
    if seen is not None:
        # A key [k, 1] of zeros has no part in a pattern, its sums and a state.
        k = k * seen[:, None, :, None].to(k)
    if not normalised:
        return plain((q, k, v, None, None), scale)
    ones = torch.ones_like(v[..., :1])
    y, last = plain((q, k, torch.cat([v, ones], -1), None, None), scale)
    return y[..., :-1] / y[..., -1:].clamp_min(EPS), last


def inside_kernels(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    constant: Tensor | None,
    seen: Tensor | None,
    scale: float,
    *,
    normalised: bool,
) -> Tensor:
    """Return the outputs by the Triton kernels; differentiable."""
    if torch.compiler.is_compiling():
        y, _ = torch.ops.bilens.attend_normalised(q, k, v, constant, seen, scale, normalised)
    else:
        y, _ = _Normalised.apply(q, k, v, constant, seen, scale, normalised)  # type: ignore[no-untyped-call]
    return y


def resume_inside_kernels(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    constant: Tensor | None,
    seen: Tensor | None,
    state: Tensor,
    scale: float,
    *,
    normalised: bool,
) -> tuple[Tensor, Tensor]:
    """Return the outputs of tokens after a state by the Triton kernels, and the state after them.

    There are no gradients.
    """
    from bilens.kernels.triton_chunked import attend  # noqa: PLC0415

    with no_autocast(v.device), torch.cuda.device_of(v), torch.no_grad():
        offsets = _in_float32(constant), _in_float32(seen)
        inputs = q, k, v, None, None
        y, _, last = attend(inputs, scale, *offsets, normalised=normalised, state=state)
    assert last is not None
    return y, last


def _in_float32(numbers: Tensor | None) -> Tensor | None:
    """Return numbers in a row, as the kernels read them."""
    return None if numbers is None else numbers.float().contiguous()


def _run(
    q: Tensor, k: Tensor, v: Tensor, constant: Tensor | None, seen: Tensor | None, scale: float,
    normalised: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    # Triton need not be there where this file is.
    from bilens.kernels.triton_chunked import attend  # noqa: PLC0415

    with no_autocast(v.device), torch.cuda.device_of(v):
        offsets = _in_float32(constant), _in_float32(seen)
        y, sums, _ = attend((q, k, v, None, None), scale, *offsets, normalised=normalised)
    return y, v.new_empty(0) if sums is None else sums


def _run_gradients(*given: Any) -> list[Tensor]:
    q, k, v, constant, seen, scale, y, sums, dy = given
    from bilens.kernels.triton_chunked import gradients as gradients_of  # noqa: PLC0415

    with no_autocast(v.device), torch.cuda.device_of(v):
        above, dsums = scale * dy, None
        if sums.numel():
            # Of y = N / r: dN = dy / r, and dr = -(dy . y) / r where r is not the least sum.
            divisor = sums.clamp_min(EPS)
            above = (above / divisor[..., None]).to(v.dtype)
            dsums = -scale * (dy.float() * y.float()).sum(-1) / divisor * (sums > EPS)
        offsets = _in_float32(constant), _in_float32(seen)
        dq, dk, dv, _, _, dc = gradients_of((q, k, v, None, None), above, *offsets, dsums)
    gradients = [dq, dk, dv, None if constant is None or dc is None else dc.to(constant.dtype)]
    return [x for x in gradients if x is not None]


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    *tensors, ctx.scale, ctx.normalised = inputs
    ctx.save_for_backward(*tensors, *output)
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, dy: Tensor | None, _: Tensor | None) -> tuple[Tensor | None, ...]:
    q, k, v, constant, seen, y, sums = ctx.saved_tensors
    if dy is None:
        return (None,) * 7
    if torch.is_grad_enabled():
        # Gradients of gradients: through plain attention, whose own are of any order.
        given = [x for x in (q, k, v, constant) if x is not None]
        again, _ = by_concatenation(
            _plain, (q, k, v, None, None), ctx.scale, constant, seen, normalised=ctx.normalised
        )
        gradients = list(torch.autograd.grad(again, given, dy, create_graph=True))
    else:
        compiling = torch.compiler.is_compiling()
        run = torch.ops.bilens.attend_normalised_gradients if compiling else _run_gradients
        gradients = run(q, k, v, constant, seen, ctx.scale, y, sums, dy)
    return *gradients, *([None] if constant is None else []), None, None, None


def _plain(inputs: Inputs, scale: float) -> tuple[Tensor, Tensor | None]:
    return attend("chunked", inputs, scale, None)


class _Normalised(torch.autograd.Function):
    """The same as the operator with its gradients, for calls outside a compiled model."""

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> tuple[Tensor, Tensor]:
        output = _run(*inputs)
        _save(ctx, inputs, output)
        ctx.mark_non_differentiable(output[1])
        return output

    backward = staticmethod(_backward)


def _fake(
    q: Tensor, k: Tensor, v: Tensor, constant: Tensor | None, seen: Tensor | None, scale: float,
    normalised: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    sums = v.new_empty(q.shape[:3] if normalised else (0,), dtype=torch.float32)
    return v.new_empty(*q.shape[:3], v.shape[-1]), sums if normalised else v.new_empty(0)


def _fake_gradients(*given: Any) -> list[Tensor]:
    return [x.new_empty(x.shape) for x in given[:4] if x is not None]


_INPUTS = "Tensor q, Tensor k, Tensor v, Tensor? constant, Tensor? seen, float scale"
define(f"attend_normalised({_INPUTS}, bool normalised) -> (Tensor, Tensor)", _run, _fake)
_GRADIENTS = f"attend_normalised_gradients({_INPUTS}, Tensor y, Tensor sums, Tensor dy) -> Tensor[]"
define(_GRADIENTS, _run_gradients, _fake_gradients)
torch.library.register_autograd(
    "bilens::attend_normalised", _backward, setup_context=_save, lib=LIBRARY
)
