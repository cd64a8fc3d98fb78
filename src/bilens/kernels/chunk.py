"""One chunk of a text: its own pattern, what the state adds to it, and the gradients of both."""

from dataclasses import dataclass

import torch
from torch import Tensor

from bilens.kernels.features import Block, features, pull

__all__ = ["Chunk", "columns", "rows"]


@dataclass(frozen=True, eq=False)
class Chunk:
    """Queries, keys and values of some tokens, as columns.

    Attributes:
        q1: first queries (heads, d_head, sharing * tokens): heads that share keys stand side by
            side, the tokens of one behind those of another.
        k1: first keys (heads, d_head, tokens).
        v: values (heads, d_value, tokens).
        q2: second queries, or the first ones again.
        k2: second keys, or the first ones again.
        blocks: of features, in the order of the state's last axis.
        seen: one where a token (row) may be seen by another (column), for at least as many tokens.
    """

    q1: Tensor
    k1: Tensor
    v: Tensor
    q2: Tensor
    k2: Tensor
    blocks: list[Block]
    seen: Tensor

    def mix(self, state: Tensor) -> Tensor:
        """What the tokens read from the chunk and the state, to which they add themselves."""
        first, second = self._scores()
        y: Tensor = self.v @ self._masked(first * second)
        for block in self.blocks:
            y.baddbmm_(state[..., block.at], features(self.q1, self.q2, block))
            self._write(state, block)
        return y

    def pull_queries(self, state: Tensor, dy: Tensor) -> tuple[Tensor, Tensor]:
        """Gradients of both queries by way of the state, to which the tokens add themselves."""
        dq1, dq2 = torch.zeros_like(self.q1), torch.zeros_like(self.q2)
        for block in self.blocks:
            to_rows, to_columns = pull(state[..., block.at].mT @ dy, self.q1, self.q2, block)
            dq1[:, block.rows] += to_rows
            dq2[:, block.columns] += to_columns
            self._write(state, block)
        return dq1, dq2

    def pull_memory(self, state: Tensor, dy: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Gradients of both keys and of values by way of the state's gradient, in reverse.

        The gradient of the state is that of later tokens; these tokens' queries add theirs.
        """
        dk1, dk2 = torch.zeros_like(self.k1), torch.zeros_like(self.k2)
        dv = torch.zeros_like(self.v)
        for block in self.blocks:
            later = state[..., block.at]
            to_rows, to_columns = pull(later.mT @ self.v, self.k1, self.k2, block)
            dk1[:, block.rows] += to_rows
            dk2[:, block.columns] += to_columns
            dv.baddbmm_(later, features(self.k1, self.k2, block))
            later.baddbmm_(dy, features(self.q1, self.q2, block).mT)
        return dk1, dk2, dv

    def pull_pattern(self, dy: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """Gradients of q1, q2, k1, k2 and v by way of the chunk's own pattern."""
        first, second = self._scores()
        dv = dy @ self._masked(first * second).mT
        dpattern = self._masked(self.v.mT @ dy)
        dfirst, dsecond = dpattern * second, dpattern * first
        return (
            self.k1 @ dfirst,
            self.k2 @ dsecond,
            self.q1 @ dfirst.mT,
            self.q2 @ dsecond.mT,
            dv,
        )

    def _scores(self) -> tuple[Tensor, Tensor]:
        first = self.k1.mT @ self.q1
        return first, first if self.q2 is self.q1 else self.k2.mT @ self.q2

    def _write(self, state: Tensor, block: Block) -> None:
        state[..., block.at].baddbmm_(self.v, features(self.k1, self.k2, block).mT)

    def _masked(self, pattern: Tensor) -> Tensor:
        tokens = pattern.shape[1]
        pattern.unflatten(2, (-1, tokens)).mul_(self.seen[:tokens, None, :tokens])
        return pattern


def columns(x: Tensor, dtype: torch.dtype) -> Tensor:
    """From (heads, sharing, tokens, width) to (heads, width, sharing * tokens)."""
    return x.to(dtype).permute(0, 3, 1, 2).flatten(2).contiguous()


def rows(x: Tensor, sharing: int) -> Tensor:
    """Back from columns."""
    split: Tensor = x.unflatten(2, (sharing, -1))
    return split.permute(0, 2, 3, 1)
