"""Bilinear attention in time linear in the length: quadratic in a chunk, a state across chunks."""

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from torch.autograd.function import once_differentiable

from bilens.kernels.chunk import Chunk, columns, rows
from bilens.kernels.features import blocks, state_size

__all__ = ["chunked", "empty_state"]

CHUNK = 192
"""Most tokens of a chunk. Its pattern costs 3 CHUNK / 2 and the state 2 d_head^2 multiplications a
token and coordinate of the values."""
BUDGET = 2**20
"""Numbers of a block of features, of one head or several: few blocks are few calls, and four
megabytes in float32 stay near the core."""


def empty_state(
    k1: Float[Tensor, "batch kv_heads time d_head"],
    v: Float[Tensor, "batch kv_heads time d_value"],
    *,
    symmetric: bool,
) -> Float[Tensor, "batch kv_heads d_value features"]:
    """The state before any token: zeros, at least in float32."""
    size = state_size(k1.shape[-1], symmetric=symmetric)
    dtype = torch.promote_types(v.dtype, torch.float32)
    return v.new_zeros(*v.shape[:2], v.shape[-1], size, dtype=dtype)


def chunked(
    q1: Float[Tensor, "batch heads time d_head"],
    k1: Float[Tensor, "batch kv_heads time d_head"],
    v: Float[Tensor, "batch kv_heads time d_value"],
    q2: Float[Tensor, "batch heads time d_head"] | None,
    k2: Float[Tensor, "batch kv_heads time d_head"] | None,
    scale: float,
    state: Float[Tensor, "batch kv_heads d_value features"],
) -> tuple[
    Float[Tensor, "batch heads time d_value"], Float[Tensor, "batch kv_heads d_value features"]
]:
    """y_t = scale (sum_{s<=t in the chunk} (q1_t . k1_s)(q2_t . k2_s) v_s + S (q1_t ⊛ q2_t)).

    S = sum over the tokens before the chunk of v_s (k1_s ⊛ k2_s)', with ⊛ the products of all pairs
    of coordinates; without q2 and k2 the symmetric half of it. About 2 d_head^2 d_value
    multiplications a token and head, and memory for the inputs and outputs alone: the backward
    pass makes the states again, in the order of time for queries and from the end for the rest.
    Arithmetic is at least in float32.

    Args:
        q1: first queries; heads that follow one another share keys and values.
        k1: first keys.
        v: values.
        q2: second queries; None for the square of the first score.
        k2: second keys, where there are second queries.
        scale: of the product of both scores.
        state: S of the tokens before; `empty_state` for none.

    Returns:
        y, and S of all tokens.

    Source:
        (A B') * (C D') = (A ⊛ C)(B ⊛ D)': appendix B of the post on tensor-transformer variants;
        chunks as in Hua et al. 2022, "Transformer quality in linear time", section 4.
    """
    batch, kv_heads = k1.shape[:2]

    def heads(x: Tensor | None) -> Tensor | None:
        return None if x is None else x.unflatten(1, (kv_heads, -1)).flatten(0, 1)

    y, last = _Chunked.apply(  # type: ignore[no-untyped-call]
        heads(q1), heads(k1), heads(v), heads(q2), heads(k2), scale, state.flatten(0, 1)
    )
    y = y.unflatten(0, (batch, kv_heads)).flatten(1, 2)
    return y, last.unflatten(0, (batch, kv_heads))


class _Chunked(torch.autograd.Function):
    """Queries are (heads, sharing, time, d_head); keys and values have one head for sharing."""

    @staticmethod
    def forward(
        ctx: Any,
        q1: Tensor,
        k1: Tensor,
        v: Tensor,
        q2: Tensor | None,
        k2: Tensor | None,
        scale: float,
        state: Tensor,
    ) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(q1, k1, v, q2, k2, state)
        ctx.scale = scale
        state = state.clone()
        text = _Text(q1, k1, v, q2, k2, dtype=state.dtype)
        y = v.new_empty(*q1.shape[:3], v.shape[-1])
        with torch.autocast(v.device.type, enabled=False):
            for place in text.places:
                y[place] = rows(text[place].mix(state[place[0]]) * scale, q1.shape[1])
        return y, state

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor, dstate: Tensor) -> tuple[Tensor | None, ...]:
        *inputs, state = ctx.saved_tensors
        text = _Text(*inputs, dtype=state.dtype)
        before, after = state.clone(), dstate.clone()

        def zeros(like: Tensor) -> Tensor:
            return torch.zeros_like(like, dtype=state.dtype)

        q1, k1, v = (zeros(x) for x in inputs[:3])
        # A squared score has the same queries and keys in both places.
        q2, k2 = (q1, k1) if text.symmetric else (zeros(x) for x in inputs[3:])
        sharing = q1.shape[1]
        with torch.autocast(dy.device.type, enabled=False):
            for place in text.places:
                above = columns(dy[place], state.dtype) * ctx.scale
                dq1, dq2 = text[place].pull_queries(before[place[0]], above)
                q1[place] += rows(dq1, sharing)
                q2[place] += rows(dq2, sharing)
            for place in reversed(text.places):
                above = columns(dy[place], state.dtype) * ctx.scale
                chunk = text[place]
                dq1, dq2, dk1, dk2, dv = chunk.pull_pattern(above)
                q1[place] += rows(dq1, sharing)
                q2[place] += rows(dq2, sharing)
                later = chunk.pull_memory(after[place[0]], above)
                k1[place] += rows(dk1 + later[0], 1)
                k2[place] += rows(dk2 + later[1], 1)
                v[place] += rows(dv + later[2], 1)
        first = tuple(x.to(dy.dtype) for x in (q1, k1, v))
        if text.symmetric:
            return *first, None, None, None, after
        return *first, q2.to(dy.dtype), k2.to(dy.dtype), None, after


Place = tuple[slice, slice, slice]
"""Some heads, all that share their keys, and some tokens."""


class _Text:
    """Queries, keys and values, cut into chunks of which a few heads are in work at a time."""

    def __init__(
        self,
        q1: Tensor,
        k1: Tensor,
        v: Tensor,
        q2: Tensor | None,
        k2: Tensor | None,
        *,
        dtype: torch.dtype,
    ) -> None:
        self.parts = (q1, k1, v, q1 if q2 is None else q2, k1 if k2 is None else k2)
        self.symmetric, self.dtype = q2 is None, dtype
        heads, sharing, time, width = q1.shape
        length = min(CHUNK, time)
        tokens = sharing * length
        # Several heads are products side by side, one for each thread.
        at_once = max(1, BUDGET // (width**2 * tokens)) * torch.get_num_threads()
        self.seen = torch.ones(length, length, dtype=dtype, device=v.device).triu()
        self.blocks = blocks(width, max(1, BUDGET // (width * tokens)), symmetric=self.symmetric)
        self.places: list[Place] = [
            (slice(head, head + at_once), slice(None), slice(start, start + CHUNK))
            for head in range(0, heads, at_once)
            for start in range(0, time, CHUNK)
        ]

    def __getitem__(self, place: Place) -> Chunk:
        q1, k1, v = (columns(x[place], self.dtype) for x in self.parts[:3])
        if self.symmetric:
            return Chunk(q1, k1, v, q1, k1, self.blocks, self.seen)
        q2, k2 = (columns(x[place], self.dtype) for x in self.parts[3:])
        return Chunk(q1, k1, v, q2, k2, self.blocks, self.seen)
