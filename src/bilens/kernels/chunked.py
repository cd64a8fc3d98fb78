"""Bilinear attention in time linear in the length: quadratic in a chunk, a state across chunks.

    y_t = scale (sum_{s<=t in the chunk} (q1_t . k1_s)(q2_t . k2_s) v_s + S' (q1_t ⊛ q2_t)),

with S = sum over the tokens before the chunk of (k1_s ⊛ k2_s) v_s' and ⊛ the products of all pairs
of coordinates; without q2 and k2 the symmetric half of it. A token costs a head about
2 d_head^2 d_value multiplications. Memory is that of the inputs and outputs. The backward pass
makes the states again, in the order of time for queries and from the end for keys and values.
Arithmetic is at least in float32.

Source:
    (A B') * (C D') = (A ⊛ C)(B ⊛ D)': appendix B of the post on tensor-transformer variants;
    chunks as in Hua et al. 2022, "Transformer quality in linear time", section 4.
"""

from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor

from bilens.kernels.products import FeatureMap, Inputs, Kernel, row_length, weights

CHUNK, FEATURES = 192, 2**19
"""Tokens of a chunk on a CPU, and numbers of a block of features or patterns for each thread, which
stay near its core. For each coordinate of the values a token costs 3 CHUNK
multiplications in the pattern of its chunk and 2 d_head^2 with the state."""

Chunks = Sequence[Tensor]
"""q1, k1, v and, of two scores, q2 and k2 in chunks of equal length (heads, chunks, tokens, width);
tokens of heads that share keys follow one another."""


class Text:
    """A text in chunks.

    Attributes:
        symmetric: whether one score is squared.
        pieces: all full chunks, and the remaining tokens as a shorter one.
        features: products of coordinates, the rows of the state.
    """

    def __init__(self, inputs: Inputs) -> None:
        q1, k1, v, q2, _ = inputs
        self.symmetric, self._kv_heads = q2 is None, k1.shape[1]
        self._dtype = torch.promote_types(v.dtype, torch.float32)
        heads, sharing = k1.shape[0] * k1.shape[1], q1.shape[1] // k1.shape[1]
        time, rows = k1.shape[2:]
        width = rows if q2 is None else q2.shape[-1]
        chunk, budget, workers = CHUNK, FEATURES, torch.get_num_threads()
        if v.device.type != "cpu":
            # Any other device likes few and large products. Reckoned, not measured.
            chunk, budget, workers = 1024, 2**26, 1
        self._length = min(chunk, time)
        # Features of one row of a block, for the tokens of all heads that share keys.
        row = sharing * self._length * width
        # Heads side by side: as many as have room for all their features, at least one a thread.
        self._heads = min(heads, workers * max(1, budget // (rows * row)))
        self._patterns = max(1, workers * budget // (self._heads * sharing * self._length**2))
        # Where there are fewer heads than threads, each thread has some of the features' rows.
        most = min(rows, -(-workers // self._heads))
        parts = max(part for part in range(1, most + 1) if rows % part == 0)
        blocks = -(-rows // parts * row // budget)
        # Blocks of equal size, as a short last one would run below the others' rate.
        step = -(-rows // parts // blocks)
        self.features = FeatureMap(
            rows=rows,
            width=width,
            symmetric=self.symmetric,
            parts=parts,
            step=step,
            memory=v.new_empty(self._heads * parts * step * row, dtype=self._dtype),
        )
        cut = [self.cut(x) for x in inputs if x is not None]
        self.pieces: list[Chunks] = list(zip(*cut, strict=True))

    def cut(self, x: Tensor) -> list[Tensor]:
        """Return the part of (batch, heads, time, width) in each of the pieces."""
        x = x.unflatten(1, (self._kv_heads, -1)).flatten(0, 1).to(self._dtype)
        # Full chunks make one batch. The shorter rest would have to be padded to join it.
        full = x.shape[2] // self._length * self._length
        spans = x[:, :, :full], x[:, :, full:]
        return [
            span.unflatten(2, (-1, min(self._length, span.shape[2]))).transpose(1, 2).flatten(2, 3)
            for span in spans
            if span.shape[2]
        ]

    def join(self, pieces: Chunks, like: Tensor) -> Tensor:
        """Return pieces as one tensor in the shape of `like`, apart from the last axis."""
        sharing = like.shape[1] // self._kv_heads
        spans = [x.unflatten(2, (sharing, -1)).transpose(1, 2).flatten(2, 3) for x in pieces]
        return torch.cat(spans, 2).view(*like.shape[:3], -1)

    def heads(self, piece: Chunks) -> Iterator[tuple[slice, list[Tensor]]]:
        """Yield slices of heads, with their q1, k1, v, q2 and k2."""
        for start in range(0, len(piece[0]), self._heads):
            heads = slice(start, start + self._heads)
            yield heads, _five(x[heads] for x in piece)

    def patterns(self, piece: Chunks) -> Iterator[slice]:
        """Yield slices of chunks whose patterns fit into memory together."""
        for start in range(0, piece[0].shape[1], self._patterns):
            yield slice(start, start + self._patterns)

    def chunks(self, piece: Chunks, *, carried: bool) -> list[tuple[int, bool, bool]]:
        """Return the number of each chunk, and whether a state comes in and is read afterwards."""
        first, last = piece is self.pieces[0], piece is self.pieces[-1]
        n = piece[0].shape[1]
        return [
            (i, carried or not first or i > 0, carried or not last or i < n - 1) for i in range(n)
        ]

    def state(self, start: Tensor | None) -> Tensor:
        """Return a copy of a state (batch * kv_heads, features, d_value), or zeros."""
        if start is not None:
            return start.flatten(0, 1).clone()
        v = self.pieces[0][2]
        return v.new_zeros(len(v), self.features.size, v.shape[-1])


def empty_state(k1: Tensor, v: Tensor, *, symmetric: bool) -> Tensor:
    """Return the state before any token, (batch, kv_heads, features, d_value) of zeros."""
    width = k1.shape[-1]
    size = width * row_length(width, symmetric=symmetric)
    dtype = torch.promote_types(v.dtype, torch.float32)
    return v.new_zeros(*v.shape[:2], size, v.shape[-1], dtype=dtype)


def _attend(inputs: Inputs, scale: float, state: Tensor | None) -> tuple[Tensor, Tensor | None]:
    text, outputs = Text(inputs), list[Tensor]()
    features, memory = text.features, text.state(state)
    for piece in text.pieces:
        # Not zeros: the patterns of a piece write all of it before states are added.
        y = piece[0].new_empty(*piece[0].shape[:3], piece[2].shape[-1])
        outputs.append(y)
        for heads, (q1, k1, v, q2, k2) in text.heads(piece):
            for few in text.patterns(piece):
                first = q1[:, few] @ k1[:, few].mT
                second = first if text.symmetric else q2[:, few] @ k2[:, few].mT
                y[heads, few] = _causal(first * second) @ v[:, few]
            reading, writing = features.factors(q1, q2), features.factors(k1, k2)
            # In the order of time: a chunk reads the state before it, then adds its own tokens.
            for i, before, after in text.chunks(piece, carried=state is not None):
                if before:
                    y[heads, i].add_(features.read(memory[heads], *_chunk(i, *reading)))
                if after:
                    features.write(memory[heads], *_chunk(i, *writing, v))
    output = (text.join(outputs, inputs[0]) * scale).to(inputs[2].dtype)
    return output, None if state is None else memory.view_as(state)


def _gradients(
    inputs: Inputs, state: Tensor | None, dy: Tensor, dstate: Tensor | None
) -> list[Tensor | None]:
    """Return the gradients of the inputs and of the state."""
    text, carried = Text(inputs), state is not None
    features, before, after = text.features, text.state(state), text.state(dstate)
    if text.symmetric:
        # As a state, in which one of each pair counts for both.
        after /= weights(features.rows, after)
    gradients = [[*map(torch.empty_like, piece)] for piece in text.pieces]
    pieces = [*zip(text.pieces, text.cut(dy), gradients, strict=True)]
    # States are made again instead of stored: one a chunk would need more memory than the inputs.
    for piece, above, sums in pieces:
        _pull_forward(text, piece, above, sums, before, carried=carried)
    for piece, above, sums in reversed(pieces):
        _pull_back(text, piece, above, sums, after, carried=carried)
    tensors = [x for x in inputs if x is not None]
    spans = zip(*gradients, strict=True)
    results: list[Tensor | None] = [
        text.join(parts, x).to(x.dtype) for parts, x in zip(spans, tensors, strict=True)
    ]
    if text.symmetric:
        results += [None, None]
        after *= weights(features.rows, after)
    return [*results, after.view_as(state) if state is not None else None]


def _pull_forward(
    text: Text, piece: Chunks, above: Tensor, sums: Chunks, memory: Tensor, *, carried: bool
) -> None:
    """Write the gradients through the patterns, and those of queries through their state."""
    features = text.features
    for heads, (q1, k1, v, q2, k2) in text.heads(piece):
        dy, (dq1, *_, dq2, _) = above[heads], (parts := _five(x[heads] for x in sums))
        for few in text.patterns(piece):
            chunks = (x[:, few] for x in (q1, k1, v, q2, k2, dy))
            gradients = _pattern_gradients(*chunks, symmetric=text.symmetric)
            for part, gradient in zip(parts, gradients, strict=False):
                part[:, few] = gradient
        reading, writing = features.factors(q1, q2), features.factors(k1, k2)
        for i, comes, goes in text.chunks(piece, carried=carried):
            if comes:
                to_q1, to_q2 = features.pull(memory[heads], *_chunk(i, reading[0], q2, dy))
                dq1[:, i].add_(to_q1)
                dq2[:, i].add_(to_q2)
            if goes:
                features.write(memory[heads], *_chunk(i, *writing, v))


def _pull_back(
    text: Text, piece: Chunks, above: Tensor, sums: Chunks, memory: Tensor, *, carried: bool
) -> None:
    """Add the gradients of keys and values through the gradient of the state after them."""
    features = text.features
    for heads, (q1, k1, v, q2, k2) in text.heads(piece):
        dy, (_, dk1, dv, _, dk2) = above[heads], _five(x[heads] for x in sums)
        reading, writing = features.factors(k1, k2), features.factors(q1, q2)
        # From the end: the gradient of a state is the sum over all tokens that read it later.
        for i, comes, goes in reversed(text.chunks(piece, carried=carried)):
            if goes:
                to_k1, to_k2 = features.pull(memory[heads], *_chunk(i, reading[0], k2, v))
                dk1[:, i].add_(to_k1)
                dk2[:, i].add_(to_k2)
                dv[:, i].add_(features.read(memory[heads], *_chunk(i, *reading)))
            if comes:
                features.write(memory[heads], *_chunk(i, *writing, dy))


def _five(parts: Iterable[Tensor]) -> list[Tensor]:
    """Return five parts; of a squared score the first two are the last two as well."""
    first = list(parts)
    return [*first, *first[:2]][:5]


def _chunk(i: int, *parts: Tensor) -> Iterator[Tensor]:
    return (part[:, i] for part in parts)


def _pattern_gradients(
    q1: Tensor, k1: Tensor, v: Tensor, q2: Tensor, k2: Tensor, dy: Tensor, *, symmetric: bool
) -> tuple[Tensor, ...]:
    """Return the gradients of q1, k1, v and, of two scores, q2 and k2 through the patterns."""
    first, dpattern = q1 @ k1.mT, dy @ v.mT
    if symmetric:
        dv = _causal(first * first).mT @ dy
        # Both factors of the square are this score, hence twice.
        dfirst = _causal(2 * dpattern * first)
        return dfirst @ k1, dfirst.mT @ q1, dv
    second = q2 @ k2.mT
    dv = _causal(first * second).mT @ dy
    dfirst, dsecond = _causal(dpattern * second), _causal(dpattern * first)
    return dfirst @ k1, dfirst.mT @ q1, dv, dsecond @ k2, dsecond.mT @ q2


def _causal(patterns: Tensor) -> Tensor:
    """Set to zero, in place, each entry of a key after its query, even where it overflowed."""
    tokens = patterns.shape[-1]
    patterns.unflatten(-2, (-1, tokens)).tril_()
    return patterns


chunked = Kernel(_attend, _gradients)
