"""Products of two vectors' coordinates, in which a product of scores is one score.

    (q1 . k1)(q2 . k2) = sum_ij (q1_i q2_j)(k1_i k2_j),

so attention without softmax is linear in d_head^2 features. Its memory of a text is a state: the
sum over its tokens of the features of their keys times their values.

If both vectors are the same, so are the features ij and ji. One of each such pair is stored: row i
has the columns i, i + 1, ..., i + d/2, counted in a circle, so that all rows are equally long. A
state holds them as they are, and each counts twice when it is read. Exceptions are i = j, and
i + d/2, which is in two rows.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from math import prod

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
    stored = torch.where(away < columns, i * columns + away, j * columns + width - away)
    every = i * width + (i + j[:columns]) % width
    return stored.flatten(), every.flatten()


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
            pulled = self._room(*shape)
            torch.bmm(dy, part.flatten(1, 2).mT, out=pulled.flatten(2))
            # A row times a matrix is up to four times as fast as a matrix times a column.
            to_a[..., block] = (right[:, :, None] @ pulled.mT).view(*left.shape[:3], -1)
            factors = left[..., block].flatten(0, 1)[:, :, None]
            to_b += (factors @ pulled)[:, :, 0]
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
