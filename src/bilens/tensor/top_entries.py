"""The largest or smallest entries of a matrix too large to hold, which comes in blocks of rows."""

from collections.abc import Iterable
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from bilens.checks import check_finite
from bilens.errors import BilensError
from bilens.settings import Count
from bilens.tensor.exact import exact

__all__ = ["TopEntries", "top_entries"]


@dataclass(frozen=True, eq=False)
class TopEntries:
    """The most extreme entries of a matrix or of each of a batch, the most extreme first.

    Attributes:
        values: M[row, column].
        rows: the row of each.
        columns: the column of each.
    """

    values: Float[Tensor, "*batch k"]
    rows: Int64[Tensor, "*batch k"]
    columns: Int64[Tensor, "*batch k"]


@torch.no_grad()
@exact
def top_entries(
    blocks: Iterable[Float[Tensor, "*batch rows columns"]], k: Count, *, largest: bool = True
) -> TopEntries:
    """The k largest entries of a matrix whose rows come block after block, from row 0 on.

    Each block is looked at once and let go. Which of equal entries are taken is not said. Not
    differentiable. `FactoredMatrix.top_entries` makes the blocks itself.

    Args:
        blocks: the rows of the matrix, or of each of a batch, in any numbers.
        k: how many entries; all of them where there are fewer.
        largest: the largest, or else the smallest.

    Raises:
        BilensError: k is not positive, there is no block, or an entry that counts is not finite.
    """
    start, best = 0, None
    for block in blocks:
        found = _of_block(block if largest else -block, start, k, best)
        best = found if best is None else _merged(best, found, k)
        start += block.shape[-2]
    if best is None:
        raise BilensError("blocks is empty, expected at least one block of rows")
    check_finite(blocks=best.values)
    return best if largest else replace(best, values=-best.values)


def _of_block(block: Tensor, start: int, k: int, best: TopEntries | None) -> TopEntries:
    """The k largest entries of a block, or those of them that can still count.

    All are in the k rows of the largest maxima, in rows that exceed the least entry found so far.
    NaN exceeds every number, so it is never passed over.
    """
    maxima, n_columns = block.amax(-1), block.shape[-1]
    n_rows = min(k, block.shape[-2])
    if best is not None and best.values.shape[-1] == k:
        counting = ~(maxima <= best.values[..., -1:])
        n_rows = min(n_rows, int(counting.sum(-1).max()))
    rows = maxima.topk(n_rows).indices
    chosen = block.gather(-2, rows[..., None].expand(*rows.shape, n_columns)).flatten(-2)
    values, places = chosen.topk(min(k, chosen.shape[-1]))
    return TopEntries(values, start + rows.gather(-1, places // n_columns), places % n_columns)


def _merged(a: TopEntries, b: TopEntries, k: int) -> TopEntries:
    values = torch.cat([a.values, b.values], -1)
    values, order = values.topk(min(k, values.shape[-1]))
    rows, columns = (
        torch.cat(pair, -1).gather(-1, order) for pair in ((a.rows, b.rows), (a.columns, b.columns))
    )
    return TopEntries(values, rows, columns)
