"""How much of what a head or an MLP writes is what a later head or MLP reads."""

from dataclasses import dataclass

import pandas as pd
import torch
from jaxtyping import Float64
from torch import Tensor

from bilens.checks import full_precision
from bilens.residual import Moment, ResidualModel
from bilens.tensor import FactoredMatrix

__all__ = ["Composition", "composition_scores"]

Group = tuple[int, list[str], Tensor]
"""Heads of a layer or its MLP: when they read or write, their names, and their maps' cores."""


@dataclass(frozen=True, eq=False)
class Composition:
    """Scores of all that writes to the residual stream with all that reads it later.

    Attributes:
        writers: names such as `head 0.2`, layer and head, or `mlp 0`; all that have readers.
        readers: names such as `head 1.2 Q`, `K` or `V`, with a number for each pair of queries and
            keys where there are two; and `mlp 1 L` or `R`, the sides of a gated MLP, or `in`. Heads
            of the first layer, which read the embedding alone, are not among them.
        scores: 0 to 1; NaN where the reader does not come after the writer.
        baseline: the root mean square of the score over all rotations of one against the other.
    """

    writers: tuple[str, ...]
    readers: tuple[str, ...]
    scores: Float64[Tensor, "writers readers"]
    baseline: float

    def frame(self, k: int = 20) -> pd.DataFrame:
        """The pairs of the highest scores.

        Returns:
            Columns writer, reader, score and excess, the score less the baseline.
        """
        there = self.scores.nan_to_num(-1).flatten()
        order = there.argsort(descending=True, stable=True)[: min(k, int((there >= 0).sum()))]
        rows, columns = order // len(self.readers), order % len(self.readers)
        found = there[order]
        return pd.DataFrame(
            {
                "writer": [self.writers[i] for i in rows.tolist()],
                "reader": [self.readers[i] for i in columns.tolist()],
                "score": found.tolist(),
                "excess": (found - self.baseline).tolist(),
            }
        )


@torch.no_grad()
@full_precision
def composition_scores(model: ResidualModel) -> Composition:
    """|W R|_F / (|W|_F |R|_F) for all that writes W and all that reads R after it.

    What writes is W_V W_O of a head, or D of an MLP. What reads is W_Q W_K' and its transpose (Q-
    and K-composition) and W_V W_O of a head (V-composition), and L and R of a gated MLP, or the
    inner map of a plain one. If either is rotated at random against the other, the score's mean
    square is exactly 1 / d_model, which is the baseline.

    Norms give their gain and their centring; their scale cancels in the ratio, as do the shares of
    `value_mix` and `embed_mix`. Rotary positions are those of a token that looks at itself.

    Source:
        Elhage et al. 2021, "Two-layer attention-only transformers" and its footnote on composition
        scores of random matrices.
    """
    # Nothing stands behind the last MLP, and before the first heads only the embedding.
    writers, readers = (
        _writers(model)[:-1],
        [group for group in _readers(model) if group[0] > Moment.input(0)],
    )
    rows = []
    for written, _, W in writers:
        blocks = [
            _scores(W, R) if written <= read else W.new_full((len(W), len(R)), torch.nan)
            for read, _, R in readers
        ]
        rows.append(torch.cat(blocks, 1))
    return Composition(
        writers=tuple(name for _, names, _ in writers for name in names),
        readers=tuple(name for _, names, _ in readers for name in names),
        scores=torch.cat(rows).cpu() if readers else torch.zeros(0, 0, dtype=torch.float64),
        baseline=model.d_model**-0.5,
    )


def _writers(model: ResidualModel) -> list[Group]:
    found: list[Group] = []
    for layer in range(model.n_layers):
        OV = model.ov(layer)
        found.append(
            (Moment.attention(layer), _names(model, layer), _core(OV.left) @ OV.right.double())
        )
        D = model.mlp_writes(layer)
        found.append((Moment.mlp(layer), [f"mlp {layer}"], _core(D.T)[None]))
    return found


def _readers(model: ResidualModel) -> list[Group]:
    found: list[Group] = []
    for layer in range(model.n_layers):
        QK = model.qk(layer)
        sides: dict[str, FactoredMatrix] = {}
        for number, matrices in enumerate(QK, start=1):
            which = number if len(QK) > 1 else ""
            sides |= {f"Q{which}": matrices, f"K{which}": matrices.T}
        for side, matrices in (sides | {"V": model.ov(layer)}).items():
            R = matrices.left.double() @ _core(matrices.right.mT).mT
            heads = [f"{head} {side}" for head in _names(model, layer)]
            found.append((Moment.input(layer), heads, R))
        for side, weight in model.mlp_reads(layer).items():
            moment = model.parts.mlp_moment(layer)
            found.append((moment, [f"mlp {layer} {side}"], _core(weight).T[None]))
    return found


def _names(model: ResidualModel, layer: int) -> list[str]:
    return [f"head {layer}.{head}" for head in range(model.n_heads)]


def _core(matrix: Tensor) -> Float64[Tensor, "*batch small n"]:
    """What has the same norm behind any map that is applied from the right, in float64."""
    return torch.linalg.qr(matrix.double(), mode="r").R


def _scores(
    W: Float64[Tensor, "writers r d_model"], R: Float64[Tensor, "readers d_model m"]
) -> Float64[Tensor, "writers readers"]:
    norms = torch.linalg.matrix_norm(W[:, None] @ R)
    sizes = torch.linalg.matrix_norm(W)[:, None] * torch.linalg.matrix_norm(R)
    return torch.where(sizes > 0, norms / sizes, 0.0)
