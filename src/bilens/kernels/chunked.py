"""Bilinear attention in time linear in the length: quadratic in a chunk, a state across chunks.

    y_t = scale (sum_{s<=t in the chunk} (q1_t . k1_s)(q2_t . k2_s) v_s + S' (q1_t ⊛ q2_t)),

with S = sum over the tokens before the chunk of (k1_s ⊛ k2_s) v_s' and ⊛ the products of all pairs
of coordinates; without q2 and k2 the symmetric half of it. About 2 d_head^2 d_value multiplications
a token and head, and memory for the inputs and outputs alone: the backward pass makes the states
again, in the order of time for queries and from the end for the rest. Arithmetic is at least in
float32.

Source:
    (A B') * (C D') = (A ⊛ C)(B ⊛ D)': appendix B of the post on tensor-transformer variants;
    chunks as in Hua et al. 2022, "Transformer quality in linear time", section 4.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from bilens.kernels.features import FeatureMap, row_length, weights
from bilens.kernels.gradients import Inputs, Kernel

__all__ = ["chunked", "empty_state"]

CHUNK, FEATURES = 192, 2**19
"""On a CPU: most tokens of a chunk, and numbers of a block of features for each thread, which stay
near its core. A token costs 3 CHUNK multiplications in the pattern of its chunk and 2 d_head^2 with
the state, for each coordinate of the values."""
GPU_CHUNK, GPU_FEATURES = 1024, 2**26
"""On any other device, where few and large products count. Reckoned, not measured."""


class Place(NamedTuple):
    """Some heads of keys and some tokens."""

    heads: slice
    span: slice


class Text:
    """Queries, keys and values of a text.

    Args:
        inputs: q1, k1, v, q2 and k2.

    Attributes:
        symmetric: whether one score is squared.
        dtype: of the arithmetic, at least float32.
        places: all chunks of the first heads in the order of time, then those of the next heads.
        features: the products of coordinates that the state is made of.
    """

    def __init__(self, inputs: Inputs) -> None:
        _, k1, v, q2, k2 = inputs
        self.kv_heads, self.symmetric = k1.shape[1], q2 is None
        self.dtype = torch.promote_types(v.dtype, torch.float32)
        self._parts = [self.by_keys(x) for x in inputs if x is not None]
        heads, sharing, self.time, rows = self._parts[0].shape
        width = rows if k2 is None else k2.shape[-1]
        on_cpu = v.device.type == "cpu"
        length = min(CHUNK if on_cpu else GPU_CHUNK, self.time)
        budget, workers = (FEATURES, torch.get_num_threads()) if on_cpu else (GPU_FEATURES, 1)
        row = sharing * length * width
        at_once = min(heads, workers * max(1, budget // (rows * row)))
        # Where there are fewer heads than threads, each thread has some of the features' rows.
        most = min(rows, -(-workers // at_once))
        parts = max(part for part in range(1, most + 1) if rows % part == 0)
        blocks = -(-rows // parts * row // budget)
        step = -(-rows // parts // blocks)
        self.features = FeatureMap(
            rows=rows,
            width=width,
            symmetric=self.symmetric,
            parts=parts,
            step=step,
            memory=v.new_empty(at_once * parts * step * row, dtype=self.dtype),
        )
        self.places = [
            Place(slice(head, head + at_once), slice(start, min(start + length, self.time)))
            for head in range(0, heads, at_once)
            for start in range(0, self.time, length)
        ]

    def by_keys(self, x: Tensor) -> Tensor:
        """From (batch, heads, time, width) to (batch * kv_heads, sharing, time, width)."""
        split: Tensor = x.unflatten(1, (self.kv_heads, -1))
        return split.flatten(0, 1)

    def tokens(self, x: Tensor, place: Place) -> Tensor:
        """Those of a chunk (heads, sharing * tokens, width), the heads that share keys in a row."""
        return x[place.heads, :, place.span].flatten(1, 2).to(self.dtype)

    def __getitem__(self, place: Place) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """q1, k1, v, q2 and k2 of a chunk."""
        found = [self.tokens(x, place) for x in self._parts]
        q1, k1, v, q2, k2 = [*found, *found[:2]][:5]
        return q1, k1, v, q2, k2

    def state(self, given: Tensor | None) -> Tensor:
        """A copy of a state (batch * kv_heads, features, d_value), or zeros, to be added to."""
        v = self._parts[2]
        if given is not None:
            return given.flatten(0, 1).clone()
        return v.new_zeros(v.shape[0], self.features.size, v.shape[-1], dtype=self.dtype)

    def zeros(self) -> list[Tensor]:
        """For the sums of gradients of all inputs, as `by_keys` has them."""
        return [torch.zeros_like(x, dtype=self.dtype) for x in self._parts]


def empty_state(k1: Tensor, v: Tensor, *, symmetric: bool) -> Tensor:
    """The state before any token (batch, kv_heads, features, d_value): zeros, at least float32."""
    width = k1.shape[-1]
    size = width * row_length(width, symmetric=symmetric)
    dtype = torch.promote_types(v.dtype, torch.float32)
    return v.new_zeros(*v.shape[:2], size, v.shape[-1], dtype=dtype)


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


chunked = Kernel(_attend, _gradients)
