"""Products of two vectors' coordinates, in which a product of scores is one score.

    (q1 . k1)(q2 . k2) = sum_ij (q1_i q2_j)(k1_i k2_j),

so attention without softmax is linear in d_head^2 features. Its memory of a text is a state: the
sum over its tokens of the features of their keys times their values.

If both vectors are the same, so are the features ij and ji. One of each such pair is stored: row i
has the columns i, i + 1, ..., i + d/2, counted in a circle, so that all rows are equally long. A
state holds them as they are, and each counts twice when it is read. Exceptions are i = j, and
i + d/2, which is in two rows.

Gradients of attention without softmax are such attention themselves.

    y_t = sum_{s<=t} (q1_t . k1_s)(q2_t . k2_s) v_s

is linear in each of its five inputs and, under dy, symmetric in (q1, k1), (q2, k2) and (dy, v). So

    dq1_t = sum_{s<=t} (dy_t . v_s)(q2_t . k2_s) k1_s,
    dk1_s = sum_{t>=s} (v_s . dy_t)(k2_s . q2_t) q1_t,
    dv_s  = sum_{t>=s} (k1_s . q1_t)(k2_s . q2_t) dy_t,

and a kernel for y is one for the gradients of gradients of any order.

Kernels are operators of torch, `bilens::attend` and `bilens::attend_gradients`, whose insides
`torch.compile` does not see: a compiled model has them as single nodes.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cache
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor


def row_length(width: int, *, symmetric: bool) -> int:
    """Return the number of features in a row, for second vectors of a width."""
    return width // 2 + 1 if symmetric else width


def products(a: Tensor, b: Tensor, *, symmetric: bool) -> Tensor:
    """Return all features (..., rows * columns) of vectors (..., width)."""
    return (a[..., None] * _second_factors(b, a.shape[-1], symmetric=symmetric)).flatten(-2)


def weights(width: int, like: Tensor) -> Tensor:
    """Return the weight of each feature (rows * columns, 1), if both vectors are the same."""
    return _weights(width, like.dtype, like.device)


# Cached tensors must not be those of an inference mode that happened to ask first.
@cache
@torch.inference_mode(mode=False)
def _weights(width: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    columns = torch.full((row_length(width, symmetric=True),), 2.0, dtype=dtype, device=device)
    columns[0] = 1
    if width % 2 == 0:
        columns[-1] = 1
    return columns.repeat(width)[:, None]


def _second_factors(b: Tensor, rows: int, *, symmetric: bool) -> Tensor:
    """Return the factors of the first vectors' coordinates, (..., rows, columns), as a view."""
    if not symmetric:
        return b[..., None, :].expand(*b.shape[:-1], rows, b.shape[-1])
    columns = row_length(rows, symmetric=True)
    # The circle is unrolled once, so that every row is a window of it and nothing is gathered.
    return torch.cat([b, b[..., : columns - 1]], -1).unfold(-1, columns, 1)


def both_orders(state: Tensor, width: int) -> Tensor:
    """Return a state (heads, features, d_value) with both of each pair, (heads, width^2, ...)."""
    return state.index_select(1, _one_of_each(width, state.device)[0])


def one_order(state: Tensor, width: int) -> Tensor:
    """Return the state that `both_orders` turned into this one."""
    return state.index_select(1, _one_of_each(width, state.device)[1])


@cache
@torch.inference_mode(mode=False)
def _one_of_each(width: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return the index of each ij among the stored features, and of each of these among all."""
    columns = row_length(width, symmetric=True)
    j = torch.arange(width, device=device)
    i = j[:, None]
    # ij is stored in row i if j is at most half a circle after i, otherwise ji is, in row j.
    away = (j - i) % width
    index = torch.where(away < columns, i * columns + away, j * columns + width - away)
    every = i * width + (i + j[:columns]) % width
    return index.flatten(), every.flatten()


@dataclass(frozen=True, eq=False)
class FeatureMap:
    """Sums over features, which are made in blocks of rows and in the same memory each time.

    Vectors are (heads, tokens, width) and states (heads, rows * columns, d_value).

    Attributes:
        rows: width of first vectors.
        width: of second vectors.
        symmetric: whether both are the same.
        parts: of the rows that are products side by side, as heads are.
        step: rows of a block in each part.
        memory: for the features of one block, with as many columns as second vectors have.
    """

    rows: int
    width: int
    symmetric: bool
    parts: int
    step: int
    memory: Tensor

    @property
    def size(self) -> int:
        """Number of features."""
        return self.rows * row_length(self.width, symmetric=self.symmetric)

    def factors(self, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        """Return views of vectors (..., tokens, width) whose product are their features.

        Each is (..., parts, tokens, rows of a part, columns), with one column of the first.
        """
        second = _second_factors(b, self.rows, symmetric=self.symmetric)
        first, second = (x.unflatten(-2, (self.parts, -1)) for x in (a[..., None], second))
        return first.transpose(-4, -3), second.transpose(-4, -3)

    def read(self, state: Tensor, a: Tensor, b: Tensor) -> Tensor:
        """Return sum_ij a_i b_j state_ij, (heads, tokens, d_value), of factors a and b."""
        if self.symmetric:
            state = state * weights(self.rows, state)
        y = a.new_zeros(len(a) * self.parts, a.shape[2], state.shape[-1])
        # Sums over blocks stay in y: features of all rows together would not fit into the cache.
        for block in self._blocks():
            y.baddbmm_(self._features(a, b, block), self._state(state, block).flatten(1, 2))
        return y.view(-1, self.parts, *y.shape[1:]).sum(1)

    def write(self, state: Tensor, a: Tensor, b: Tensor, v: Tensor) -> None:
        """Add sum_t a_ti b_tj v_t, of factors a and b, to the state."""
        v = self._shared(v)
        for block in self._blocks():
            part = self._state(state, block).flatten(1, 2)
            part.baddbmm_(self._features(a, b, block).mT, v)

    def pull(self, state: Tensor, a: Tensor, b: Tensor, dy: Tensor) -> tuple[Tensor, Tensor]:
        """Return the gradients of vectors a and b from dy, given a's factor."""
        if self.symmetric:
            # The derivative by one coordinate meets each pair in both orders.
            state = both_orders(state, self.rows)
        left, right, dy = a[..., 0], self._shared(b), self._shared(dy)
        to_a = torch.zeros_like(left)
        to_b = torch.zeros_like(right)
        for block in self._blocks():
            part = self._state(state, block)
            shape = *right.shape[:2], *part.shape[1:3]
            block_gradient = self._room(*shape)
            torch.bmm(dy, part.flatten(1, 2).mT, out=block_gradient.flatten(2))
            # A row times a matrix is up to four times as fast as a matrix times a column.
            to_a[..., block] = (right[:, :, None] @ block_gradient.mT).view(*left.shape[:3], -1)
            factors = left[..., block].flatten(0, 1)[:, :, None]
            to_b += (factors @ block_gradient)[:, :, 0]
        to_a = to_a.transpose(1, 2).flatten(2)
        return to_a, to_b.view(-1, self.parts, *to_b.shape[1:]).sum(1)

    def _blocks(self) -> Iterator[slice]:
        rows = self.rows // self.parts
        return (slice(start, min(start + self.step, rows)) for start in range(0, rows, self.step))

    def _shared(self, x: Tensor) -> Tensor:
        """Return (heads, tokens, width) as (heads * parts, tokens, width), alike in all parts."""
        return x[:, None].expand(-1, self.parts, -1, -1).flatten(0, 1)

    def _state(self, state: Tensor, block: slice) -> Tensor:
        """Return a view of a block of each part, (heads * parts, rows, columns, d_value)."""
        split = state.view(state.shape[0], self.parts, self.rows // self.parts, -1, state.shape[-1])
        return split[:, :, block].flatten(0, 1)

    def _features(self, a: Tensor, b: Tensor, block: slice) -> Tensor:
        a, b = a[..., block, :], b[..., block, :]
        features = self._room(*b.shape)
        torch.mul(a, b, out=features)
        return features.flatten(0, 1).flatten(2)

    def _room(self, *shape: int) -> Tensor:
        return self.memory[: prod(shape)].view(shape)


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


def _run_attend(kernel: str, *args: Any) -> tuple[Tensor, Tensor]:
    *inputs, state, scale = args
    with no_autocast(inputs[2].device):
        y, last = KERNELS[kernel]().attend(tuple(inputs), scale, state)
    return y, y.new_empty(0) if last is None else last


def _run_gradients(kernel: str, *args: Any) -> list[Tensor]:
    *inputs, state, dy, dlast = args
    with no_autocast(dy.device):
        gradients = KERNELS[kernel]().gradients(tuple(inputs), state, dy, dlast)
    return [x for x in gradients if x is not None]


def _fake_attend(kernel: str, *args: Any) -> tuple[Tensor, Tensor]:
    q1, _, v, _, _, state, _ = args
    y = v.new_empty(*q1.shape[:3], v.shape[-1])
    return y, v.new_empty(0) if state is None else torch.empty_like(state)


def _fake_gradients(kernel: str, *args: Any) -> list[Tensor]:
    return [x.new_empty(x.shape) for x in args[:6] if x is not None]


def _save(ctx: Any, inputs: tuple[Any, ...], output: object) -> None:
    ctx.kernel, *tensors, ctx.scale = inputs
    ctx.save_for_backward(*tensors)


def _backward(ctx: Any, dy: Tensor, dlast: Tensor) -> tuple[Tensor | None, ...]:
    *saved, state = ctx.saved_tensors
    inputs = tuple(saved)
    # Scaled once here, as every gradient is linear in dy: no kernel needs to know the scale.
    dy = dy * ctx.scale
    if torch.is_grad_enabled():
        # Gradients are recorded here if they will be differentiated again, at twice the cost.
        with no_autocast(dy.device):
            gradients = _differentiable_gradients(ctx.kernel, inputs, state, dy, dlast)
        return None, *gradients, None
    is_compiling = torch.compiler.is_compiling()
    run: Callable[..., list[Tensor]] = (
        torch.ops.bilens.attend_gradients if is_compiling else _run_gradients
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

    backward = staticmethod(_backward)


LIBRARY = torch.library.Library("bilens", "FRAGMENT")


def define(signature: str, run: Callable[..., Any], fake: Callable[..., Any]) -> None:
    """Define an operator of torch: its run, and its results without numbers for the compiler."""
    # By the lower interface: `torch.library.custom_op` costs twice the host's time of a call.
    LIBRARY.define(signature)
    name = signature.partition("(")[0]
    LIBRARY.impl(name, run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"bilens::{name}", fake, lib=LIBRARY)


_INPUTS = "str kernel, Tensor q1, Tensor k1, Tensor v, Tensor? q2, Tensor? k2, Tensor? state"
define(f"attend({_INPUTS}, float scale) -> (Tensor, Tensor)", _run_attend, _fake_attend)
_GRADIENTS = f"attend_gradients({_INPUTS}, Tensor dy, Tensor? dlast) -> Tensor[]"
define(_GRADIENTS, _run_gradients, _fake_gradients)
torch.library.register_autograd("bilens::attend", _backward, setup_context=_save, lib=LIBRARY)


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
    tensors = [x for x in (*inputs, state) if x is not None]
    q1, k1, v, *second = (x.to(state.dtype) for x in tensors[:-1])
    q2, k2 = second or (q1, k1)
    symmetric = not second
    # Written with autograd's own operations: this is only for gradients of gradients.
    features = products(q1, q2, symmetric=symmetric)
    if symmetric:
        features = features * weights(q1.shape[-1], q1).T
    features = features.view(*k1.shape[:2], -1, *features.shape[2:])
    y = features @ state[:, :, None]
    last = state + products(k1, k2, symmetric=symmetric).mT @ v
    total = (dy.reshape(y.shape) * y).sum() + (dstate * last).sum()
    leaves = [x for x in tensors if x.requires_grad]
    gradients = iter(torch.autograd.grad(total, leaves, create_graph=True))
    return [
        next(gradients) if x is not None and x.requires_grad else None for x in (*inputs, state)
    ]
