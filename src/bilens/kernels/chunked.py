"""Bilinear attention in time linear in the length: quadratic in a chunk, a state across chunks."""

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from bilens.kernels.chunks import Place, Text
from bilens.kernels.features import row_length, weights
from bilens.kernels.gradients import Inputs, backward

__all__ = ["chunked", "empty_state"]


def empty_state(
    k1: Float[Tensor, "batch kv_heads time d_head"],
    v: Float[Tensor, "batch kv_heads time d_value"],
    *,
    symmetric: bool,
) -> Float[Tensor, "batch kv_heads features d_value"]:
    """The state before any token: zeros, at least in float32."""
    width = k1.shape[-1]
    size = width * row_length(width, symmetric=symmetric)
    dtype = torch.promote_types(v.dtype, torch.float32)
    return v.new_zeros(*v.shape[:2], size, v.shape[-1], dtype=dtype)


def chunked(
    q1: Float[Tensor, "batch heads time d_head"],
    k1: Float[Tensor, "batch kv_heads time d_head"],
    v: Float[Tensor, "batch kv_heads time d_value"],
    q2: Float[Tensor, "batch heads time d_second"] | None,
    k2: Float[Tensor, "batch kv_heads time d_second"] | None,
    scale: float,
    state: Float[Tensor, "batch kv_heads features d_value"] | None,
) -> tuple[
    Float[Tensor, "batch heads time d_value"],
    Float[Tensor, "batch kv_heads features d_value"] | None,
]:
    """y_t = scale (sum_{s<=t in the chunk} (q1_t . k1_s)(q2_t . k2_s) v_s + S' (q1_t ⊛ q2_t)).

    S = sum over the tokens before the chunk of (k1_s ⊛ k2_s) v_s', with ⊛ the products of all pairs
    of coordinates; without q2 and k2 the symmetric half of it. About 2 d_head^2 d_value
    multiplications a token and head, and memory for the inputs and outputs alone: the backward
    pass makes the states again, in the order of time for queries and from the end for the rest.
    Arithmetic is at least in float32. Gradients can be differentiated again, any number of times.

    Args:
        q1: first queries; heads that follow one another share keys and values.
        k1: first keys.
        v: values.
        q2: second queries; None for the square of the first score.
        k2: second keys, where there are second queries.
        scale: of the product of both scores.
        state: S of the tokens before; None where there are none and S of all is not asked for.

    Returns:
        y, and S of all tokens where a state was given.

    Source:
        (A B') * (C D') = (A ⊛ C)(B ⊛ D)': appendix B of the post on tensor-transformer variants;
        chunks as in Hua et al. 2022, "Transformer quality in linear time", section 4.
    """
    y, last = _Chunked.apply(q1, k1, v, q2, k2, scale, state)  # type: ignore[no-untyped-call]
    return y, last


class _Chunked(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q1: Tensor,
        k1: Tensor,
        v: Tensor,
        q2: Tensor | None,
        k2: Tensor | None,
        scale: float,
        state: Tensor | None,
    ) -> tuple[Tensor, Tensor | None]:
        ctx.save_for_backward(q1, k1, v, q2, k2, state)
        ctx.scale = scale
        return _attend((q1, k1, v, q2, k2), scale, state)

    @staticmethod
    def backward(ctx: Any, dy: Tensor, dstate: Tensor | None) -> tuple[Tensor | None, ...]:
        return backward(ctx, dy, dstate, _attend_afresh, _gradients)


def _attend_afresh(
    q1: Tensor, k1: Tensor, v: Tensor, q2: Tensor | None, k2: Tensor | None
) -> Tensor:
    return chunked(q1, k1, v, q2, k2, 1.0, None)[0]


def _attend(inputs: Inputs, scale: float, state: Tensor | None) -> tuple[Tensor, Tensor | None]:
    text = Text(inputs)
    queries, _, values, _, _ = inputs
    y = text.by_keys(values.new_empty(*queries.shape[:3], values.shape[-1]))
    memory = text.state(state)
    for place in text.places:
        q1, k1, v, q2, k2 = text[place]
        first = q1 @ k1.mT
        found = _causal(first * (first if text.symmetric else q2 @ k2.mT)) @ v
        if state is not None or place.span.start > 0:
            found += text.features.read(memory[place.heads], q1, q2)
        if state is not None or place.span.stop < text.time:
            text.features.write(memory[place.heads], k1, k2, v)
        y[place.heads, :, place.span] = (found * scale).unflatten(1, (y.shape[1], -1))
    y = y.view(*queries.shape[:3], -1)
    return y, None if state is None else memory.view_as(state)


def _gradients(
    inputs: Inputs, state: Tensor | None, dy: Tensor, dstate: Tensor | None
) -> list[Tensor | None]:
    """Gradients of the inputs and of the state."""
    text = Text(inputs)
    dy, sums = text.by_keys(dy), text.zeros()
    before, after = text.state(state), text.state(dstate)
    if text.symmetric:
        # As a state is, in which one of each pair stands for both.
        after /= weights(text.features.rows, after)

    def add(place: Place, *found: Tensor | None) -> None:
        # A squared score has the same queries and keys in both places.
        for total, one in zip([*sums, *sums[:2]], found, strict=False):
            if one is not None:
                total[place.heads, :, place.span] += one.unflatten(1, (total.shape[1], -1))

    for place in text.places:
        q1, k1, v, q2, k2 = text[place]
        above = text.tokens(dy, place)
        add(place, *_pattern_gradients(q1, k1, v, q2, k2, above))
        if state is not None or place.span.start > 0:
            dq1, dq2 = text.features.pull(before[place.heads], q1, q2, above)
            add(place, dq1, None, None, dq2)
        if place.span.stop < text.time:
            text.features.write(before[place.heads], k1, k2, v)
    for place in reversed(text.places):
        q1, k1, v, q2, k2 = text[place]
        if state is not None or place.span.stop < text.time:
            dk1, dk2 = text.features.pull(after[place.heads], k1, k2, v)
            dv = text.features.read(after[place.heads], k1, k2)
            add(place, None, dk1, dv, None, dk2)
        if state is not None or place.span.start > 0:
            text.features.write(after[place.heads], q1, q2, text.tokens(dy, place))
    given = [x for x in inputs if x is not None]
    found: list[Tensor | None] = [
        total.view_as(x).to(x.dtype) for total, x in zip(sums, given, strict=True)
    ]
    if text.symmetric:
        found += [None, None]
        after *= weights(text.features.rows, after)
    return [*found, None if state is None else after.view_as(state)]


def _pattern_gradients(
    q1: Tensor, k1: Tensor, v: Tensor, q2: Tensor, k2: Tensor, dy: Tensor
) -> tuple[Tensor | None, ...]:
    """Gradients of q1, k1, v, q2 and k2 by way of the pattern of one chunk."""
    first, dpattern = q1 @ k1.mT, dy @ v.mT
    if q2 is q1:
        dv = _causal(first * first).mT @ dy
        dfirst = _causal(2 * dpattern * first)
        return dfirst @ k1, dfirst.mT @ q1, dv, None, None
    second = q2 @ k2.mT
    dv = _causal(first * second).mT @ dy
    dfirst, dsecond = _causal(dpattern * second), _causal(dpattern * first)
    return dfirst @ k1, dfirst.mT @ q1, dv, dsecond @ k2, dsecond.mT @ q2


def _causal(pattern: Tensor) -> Tensor:
    """In place, zero where a key stands behind a query, whatever was there: an overflow too."""
    tokens = pattern.shape[2]
    pattern.unflatten(1, (-1, tokens)).tril_()
    return pattern
