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

from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor

from bilens.kernels.features import FeatureMap, row_length, weights
from bilens.kernels.gradients import Inputs, Kernel

CHUNK, FEATURES = 192, 2**19
"""On a CPU: most tokens of a chunk, and numbers of a block of features, or of patterns, for each
thread, which stay near its core. A token costs 3 CHUNK multiplications in the pattern of its chunk
and 2 d_head^2 with the state, for each coordinate of the values."""
GPU_CHUNK, GPU_FEATURES = 1024, 2**26
"""On any other device, where few and large products count. Reckoned, not measured."""


Chunks = Sequence[Tensor]
"""q1, k1, v and, of two scores, q2 and k2 in chunks of equal length (heads, chunks, tokens, width);
tokens of heads that share keys stand in a row."""


class Text:
    """A text in chunks.

    Args:
        inputs: q1, k1, v, q2 and k2.

    Attributes:
        symmetric: whether one score is squared.
        pieces: all whole chunks, and what is left as one that is shorter.
        features: the products of coordinates that the state is made of.
    """

    def __init__(self, inputs: Inputs) -> None:
        q1, k1, v, q2, _ = inputs
        self.symmetric, self._kv_heads = q2 is None, k1.shape[1]
        self._dtype = torch.promote_types(v.dtype, torch.float32)
        heads, sharing = k1.shape[0] * k1.shape[1], q1.shape[1] // k1.shape[1]
        time, rows = k1.shape[2:]
        width = rows if q2 is None else q2.shape[-1]
        on_cpu = v.device.type == "cpu"
        self._length = min(CHUNK if on_cpu else GPU_CHUNK, time)
        budget, workers = (FEATURES, torch.get_num_threads()) if on_cpu else (GPU_FEATURES, 1)
        row = sharing * self._length * width
        self._heads = min(heads, workers * max(1, budget // (rows * row)))
        self._patterns = max(1, workers * budget // (self._heads * sharing * self._length**2))
        # Where there are fewer heads than threads, each thread has some of the features' rows.
        most = min(rows, -(-workers // self._heads))
        parts = max(part for part in range(1, most + 1) if rows % part == 0)
        blocks = -(-rows // parts * row // budget)
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
        """Some of (batch, heads, time, width) as it stands in each of the pieces."""
        x = x.unflatten(1, (self._kv_heads, -1)).flatten(0, 1).to(self._dtype)
        whole = x.shape[2] // self._length * self._length
        spans = x[:, :, :whole], x[:, :, whole:]
        return [
            span.unflatten(2, (-1, min(self._length, span.shape[2]))).transpose(1, 2).flatten(2, 3)
            for span in spans
            if span.shape[2]
        ]

    def join(self, found: Chunks, like: Tensor) -> Tensor:
        """Back from `cut` to the shape of what was cut, but for its last width."""
        sharing = like.shape[1] // self._kv_heads
        spans = [x.unflatten(2, (sharing, -1)).transpose(1, 2).flatten(2, 3) for x in found]
        return torch.cat(spans, 2).view(*like.shape[:3], -1)

    def heads(self, piece: Chunks) -> Iterator[tuple[slice, list[Tensor]]]:
        """Some heads after others, and their q1, k1, v, q2 and k2."""
        for start in range(0, len(piece[0]), self._heads):
            some = slice(start, start + self._heads)
            yield some, _all(x[some] for x in piece)

    def patterns(self, piece: Chunks) -> Iterator[slice]:
        """As many chunks at once as have their patterns in memory."""
        for start in range(0, piece[0].shape[1], self._patterns):
            yield slice(start, start + self._patterns)

    def chunks(self, piece: Chunks, *, carried: bool) -> list[tuple[int, bool, bool]]:
        """Their numbers, and whether a state comes in from before and is read behind."""
        first, last = piece is self.pieces[0], piece is self.pieces[-1]
        n = piece[0].shape[1]
        return [
            (i, carried or not first or i > 0, carried or not last or i < n - 1) for i in range(n)
        ]

    def state(self, given: Tensor | None) -> Tensor:
        """A copy of a state (batch * kv_heads, features, d_value), or zeros, to be added to."""
        if given is not None:
            return given.flatten(0, 1).clone()
        v = self.pieces[0][2]
        return v.new_zeros(len(v), self.features.size, v.shape[-1])


def empty_state(k1: Tensor, v: Tensor, *, symmetric: bool) -> Tensor:
    """The state before any token (batch, kv_heads, features, d_value): zeros, at least float32."""
    width = k1.shape[-1]
    size = width * row_length(width, symmetric=symmetric)
    dtype = torch.promote_types(v.dtype, torch.float32)
    return v.new_zeros(*v.shape[:2], size, v.shape[-1], dtype=dtype)


def _attend(inputs: Inputs, scale: float, state: Tensor | None) -> tuple[Tensor, Tensor | None]:
    text, found = Text(inputs), list[Tensor]()
    features, memory = text.features, text.state(state)
    for piece in text.pieces:
        y = piece[0].new_empty(*piece[0].shape[:3], piece[2].shape[-1])
        found.append(y)
        for heads, (q1, k1, v, q2, k2) in text.heads(piece):
            for some in text.patterns(piece):
                first = q1[:, some] @ k1[:, some].mT
                second = first if text.symmetric else q2[:, some] @ k2[:, some].mT
                y[heads, some] = _causal(first * second) @ v[:, some]
            reading, writing = features.factors(q1, q2), features.factors(k1, k2)
            for i, before, behind in text.chunks(piece, carried=state is not None):
                if before:
                    y[heads, i].add_(features.read(memory[heads], *_chunk(i, *reading)))
                if behind:
                    features.write(memory[heads], *_chunk(i, *writing, v))
    scaled = (text.join(found, inputs[0]) * scale).to(inputs[2].dtype)
    return scaled, None if state is None else memory.view_as(state)


def _gradients(
    inputs: Inputs, state: Tensor | None, dy: Tensor, dstate: Tensor | None
) -> list[Tensor | None]:
    """Gradients of the inputs and of the state."""
    text, carried = Text(inputs), state is not None
    features, before, after = text.features, text.state(state), text.state(dstate)
    if text.symmetric:
        # As a state is, in which one of each pair stands for both.
        after /= weights(features.rows, after)
    found = [[torch.empty_like(x) for x in piece] for piece in text.pieces]
    pieces = [*zip(text.pieces, text.cut(dy), found, strict=True)]
    for piece, above, sums in pieces:
        _pull_forward(text, piece, above, sums, before, carried=carried)
    for piece, above, sums in reversed(pieces):
        _pull_back(text, piece, above, sums, after, carried=carried)
    given = [x for x in inputs if x is not None]
    joined: list[Tensor | None] = [
        text.join(spans, x).to(x.dtype)
        for spans, x in zip(zip(*found, strict=True), given, strict=True)
    ]
    if text.symmetric:
        joined += [None, None]
        after *= weights(features.rows, after)
    return [*joined, after.view_as(state) if state is not None else None]


def _pull_forward(
    text: Text, piece: Chunks, above: Tensor, sums: Chunks, memory: Tensor, *, carried: bool
) -> None:
    """Gradients by way of the patterns, and those of queries by way of the state before them."""
    features = text.features
    for heads, (q1, k1, v, q2, k2) in text.heads(piece):
        dy, (dq1, *_, dq2, _) = above[heads], (own := _all(x[heads] for x in sums))
        for some in text.patterns(piece):
            parts = (x[:, some] for x in (q1, k1, v, q2, k2, dy))
            gradients = _pattern_gradients(*parts, symmetric=text.symmetric)
            for whole, one in zip(own, gradients, strict=False):
                whole[:, some] = one
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
    """Gradients of keys and values by way of the gradient of the state behind them."""
    features = text.features
    for heads, (q1, k1, v, q2, k2) in text.heads(piece):
        dy, (_, dk1, dv, _, dk2) = above[heads], _all(x[heads] for x in sums)
        reading, writing = features.factors(k1, k2), features.factors(q1, q2)
        for i, comes, goes in reversed(text.chunks(piece, carried=carried)):
            if goes:
                to_k1, to_k2 = features.pull(memory[heads], *_chunk(i, reading[0], k2, v))
                dk1[:, i].add_(to_k1)
                dk2[:, i].add_(to_k2)
                dv[:, i].add_(features.read(memory[heads], *_chunk(i, *reading)))
            if comes:
                features.write(memory[heads], *_chunk(i, *writing, dy))


def _all(parts: Iterable[Tensor]) -> list[Tensor]:
    """Those of five, where a squared score has the same queries and keys in both places."""
    found = list(parts)
    return [*found, *found[:2]][:5]


def _chunk(number: int, *parts: Tensor) -> Iterator[Tensor]:
    return (part[:, number] for part in parts)


def _pattern_gradients(
    q1: Tensor, k1: Tensor, v: Tensor, q2: Tensor, k2: Tensor, dy: Tensor, *, symmetric: bool
) -> tuple[Tensor, ...]:
    """Gradients of q1, k1, v and, of two scores, q2 and k2 by way of the patterns of chunks."""
    first, dpattern = q1 @ k1.mT, dy @ v.mT
    if symmetric:
        dv = _causal(first * first).mT @ dy
        dfirst = _causal(2 * dpattern * first)
        return dfirst @ k1, dfirst.mT @ q1, dv
    second = q2 @ k2.mT
    dv = _causal(first * second).mT @ dy
    dfirst, dsecond = _causal(dpattern * second), _causal(dpattern * first)
    return dfirst @ k1, dfirst.mT @ q1, dv, dsecond @ k2, dsecond.mT @ q2


def _causal(patterns: Tensor) -> Tensor:
    """In place, zero where a key stands behind a query, whatever was there: an overflow too."""
    tokens = patterns.shape[-1]
    patterns.unflatten(-2, (-1, tokens)).tril_()
    return patterns


chunked = Kernel(_attend, _gradients)
