"""The best few of any number of scores that come in blocks."""

import torch
from jaxtyping import Float, Int
from torch import Tensor

__all__ = ["RunningTop"]


class RunningTop:
    """Keeps the k largest scores of each row, and what they belong to, block after block.

    Attributes:
        scores: the largest so far, in descending order; fewer than k at the beginning.
        labels: whole numbers that say where each came from.
    """

    def __init__(self, k: int) -> None:
        self.k = k
        self.scores: Float[Tensor, "rows kept"] | None = None
        self.labels: Int[Tensor, "rows kept labels"] | None = None

    def update(
        self, scores: Float[Tensor, "rows new"], labels: Int[Tensor, "rows new labels"]
    ) -> None:
        """Look at a block of scores; of equal ones the first stays."""
        if self.scores is not None and self.labels is not None:
            scores = torch.cat([self.scores, scores], 1)
            labels = torch.cat([self.labels, labels], 1)
        order = scores.argsort(dim=1, descending=True, stable=True)[:, : self.k]
        self.scores = scores.gather(1, order)
        self.labels = labels.gather(1, order[..., None].expand(-1, -1, labels.shape[-1]))

    def update_pairs(self, scores: Float[Tensor, "first second"], start: int) -> None:
        """Look at a block of a matrix of scores, whose rows are start, start + 1, ...

        The matrix has one ranking; labels are (row, column).
        """
        best = scores.flatten().topk(min(self.k, scores.numel()))
        rows = best.indices // scores.shape[1] + start
        columns = best.indices % scores.shape[1]
        self.update(best.values[None], torch.stack([rows, columns], -1)[None])
