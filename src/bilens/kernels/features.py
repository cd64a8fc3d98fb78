"""Products of two vectors' coordinates, a block of them at a time.

The square of an inner product is an inner product of products of coordinates,

    (q1 . k1)(q2 . k2) = sum_ij (q1_i q2_j)(k1_i k2_j),

so attention without softmax is linear in d_head^2 features, its state is their sum with values.
They are made in blocks of rows i, for a chunk of tokens, and never for a whole text. When
both vectors are the same, the features ij and ji are too: blocks below the diagonal are left out
and those above it weigh sqrt(2), once in queries and once in keys.

Vectors are columns here, (heads, d_head, tokens), so that every product runs along the tokens.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["Block", "blocks", "features", "pull", "state_size"]

HALF_ROWS = 8
"""Rows of a block of the symmetric half. The blocks on the diagonal are whole, so a state holds
d (d + 8) / 2 features; single rows would save a few and be many small products."""


@dataclass(frozen=True)
class Block:
    """Features a_i b_j of some rows i and columns j.

    Attributes:
        rows: which i.
        columns: which j.
        start: place of the first one in the state.
        stop: place behind the last one.
        plain: how many of the columns weigh one; the rest weigh sqrt(2).
    """

    rows: slice
    columns: slice
    start: int
    stop: int
    plain: int

    @property
    def at(self) -> slice:
        """Where the features stand in the state."""
        return slice(self.start, self.stop)


def blocks(width: int, rows: int, *, symmetric: bool) -> list[Block]:
    """All features of vectors of some width, or their symmetric half.

    Args:
        width: d_head.
        rows: of a block; the symmetric half has blocks of its own.
        symmetric: whether both vectors are the same.
    """
    found, at = [], 0
    rows = HALF_ROWS if symmetric else rows
    for first in range(0, width, rows):
        last = min(first + rows, width)
        left = first if symmetric else 0
        size = (last - first) * (width - left)
        plain = last - first if symmetric else width
        found.append(Block(slice(first, last), slice(left, width), at, at + size, plain))
        at += size
    return found


def state_size(width: int, *, symmetric: bool) -> int:
    """Number of features of vectors of some width."""
    return blocks(width, width, symmetric=symmetric)[-1].stop


def features(a: Tensor, b: Tensor, block: Block) -> Tensor:
    """The products (heads, features, tokens) of a block, from columns (heads, width, tokens)."""
    return (a[:, block.rows, None] * _weighed(b, block)[:, None]).flatten(1, 2)


def pull(gradient: Tensor, a: Tensor, b: Tensor, block: Block) -> tuple[Tensor, Tensor]:
    """Gradients of a's rows and of b's columns from that of a block's features."""
    left = a[:, block.rows, None]
    gradient = gradient.unflatten(1, (left.shape[1], -1))
    to_a = (gradient * _weighed(b, block)[:, None]).sum(2)
    to_b = (gradient * left).sum(1)
    to_b[:, block.plain :] *= 2**0.5
    return to_a, to_b


def _weighed(b: Tensor, block: Block) -> Tensor:
    chosen = b[:, block.columns]
    if block.plain == chosen.shape[1]:
        return chosen
    return torch.cat([chosen[:, : block.plain], chosen[:, block.plain :] * 2**0.5], 1)
