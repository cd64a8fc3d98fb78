"""Composition scores: the overlap of each writer's output with each later reader's input."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import pandas as pd
import torch
from jaxtyping import Float, Float64
from torch import Tensor

from bilens.checks import checked, detached
from bilens.lazy_imports import go
from bilens.read.figures.plots import heat_figure
from bilens.reading import Fact, Reading
from bilens.registry import reading
from bilens.residual import Moment, ResidualModel
from bilens.tensor import FactoredMatrix

DRAWN = 24
"""Writers and readers that a figure has, so that their names can be read."""


class Group(NamedTuple):
    """Heads of a layer, or its MLP, as writers or readers of the stream.

    Attributes:
        moment: moment of the stream that they read, or write to.
        names: name of each.
        cores: matrices with the Frobenius norms of their maps, (names, r, n).
    """

    moment: Moment
    names: list[str]
    cores: Float[Tensor, "names r n"]


@dataclass(frozen=True, eq=False, repr=False)
class Composition(Reading):
    """Scores of every writer to the residual stream with every later reader.

    Attributes:
        writers: names such as `head 0.2`, layer and head, or `mlp 0`; the last MLP has no readers.
        readers: names such as `head 1.2 Q`, `K` or `V`, and `mlp 1 L` or `R`, the sides of a gated
            MLP, or `in`. Two pairs of queries and keys have numbers, as in `Q2`. Heads of the
            first layer, which see only the embedding, are not among them.
        scores: 0 to 1; NaN if the reader is not after the writer.
        baseline: root mean square of the score over all rotations of one against the other.
    """

    writers: tuple[str, ...]
    readers: tuple[str, ...]
    scores: Float64[Tensor, "writers readers"]
    baseline: float

    title: ClassVar[str] = "Composition of heads and MLPs"
    axes: ClassVar[dict[str, str]] = {"x": "reader", "y": "score", "color": "writer"}
    explanation: ClassVar[str] = (
        "The score is the share of a writer's output that is in a reader's input space. Random "
        "maps have the baseline as their root mean square."
    )

    def facts(self) -> list[Fact]:
        """Return the numbers of writers and readers, and the baseline."""
        return [
            ("writers", len(self.writers)),
            ("readers", len(self.readers)),
            ("baseline", self.baseline),
        ]

    def frame(self, k: int = 20) -> pd.DataFrame:
        """Return the k pairs of highest score.

        Returns:
            Columns writer, reader, score and excess, the score minus the baseline.
        """
        scores = self.scores.nan_to_num(-1).flatten()
        order = scores.argsort(descending=True, stable=True)[: min(k, int((scores >= 0).sum()))]
        rows, columns = order // len(self.readers), order % len(self.readers)
        return pd.DataFrame(
            {
                "writer": [self.writers[i] for i in rows.tolist()],
                "reader": [self.readers[i] for i in columns.tolist()],
                "score": scores[order].tolist(),
                "excess": (scores[order] - self.baseline).tolist(),
            }
        )


@reading("composition")
@detached
def composition_scores(model: ResidualModel) -> Composition:
    """Compute |W R|_F / (|W|_F |R|_F) for every writer W and every later reader R.

    Writers are W_V W_O of a head and D of an MLP. Readers of a head are W_Q W_K' and its transpose
    (Q- and K-composition) and W_V W_O (V-composition). Readers of an MLP are its L and R, or its
    inner map if it has no gate. If either is rotated at random against the other, the score's mean
    square is exactly 1 / d_model, which is the baseline.

    Gains and centring of norms are included. Their scale cancels in the ratio, as do the shares of
    `value_mix` and `embed_mix`. Rotary positions are those of a token that attends to itself.

    Source:
        Elhage et al. 2021, "Two-layer attention-only transformers" and its footnote on composition
        scores of random matrices.
    """
    # The last MLP has no readers, and heads of the first layer have no writers.
    writers = list(_writers(model))[:-1]
    names: list[str] = []
    columns = []
    # Only writers are held: there are fewer of them, and each reader meets all before it.
    for reader in _readers(model):
        if reader.moment > Moment.input(0):
            names += reader.names
            columns.append(torch.cat([_scores(writer, reader) for writer in writers]))
    return Composition(
        writers=tuple(name for group in writers for name in group.names),
        readers=tuple(names),
        scores=torch.cat(columns, 1).cpu() if columns else torch.zeros(0, 0, dtype=torch.float64),
        baseline=model.d_model**-0.5,
    )


def _writers(model: ResidualModel) -> Iterator[Group]:
    for layer in range(model.n_layers):
        OV, D = model.ov(layer), model.layer(layer).mlp.output_weights()
        # Norms are those of small cores, so no (d_model, d_model) map is formed.
        W = _core(OV.left) @ OV.right
        yield Group(Moment.attention(layer), _head_names(model, layer), W)
        yield Group(Moment.mlp(layer), [f"mlp {layer}"], _core(D.T)[None])


def _readers(model: ResidualModel) -> Iterator[Group]:
    for layer in range(model.n_layers):
        QK = model.qk(layer)
        sides: dict[str, FactoredMatrix] = {}
        for number, matrices in enumerate(QK, start=1):
            suffix = number if len(QK) > 1 else ""
            # A query and a key read the same form from its two sides.
            sides |= {f"Q{suffix}": matrices, f"K{suffix}": matrices.T}
        for side, matrices in (sides | {"V": model.ov(layer)}).items():
            # |W L Q| = |W L| for orthonormal rows Q, so the right factor shrinks to its core.
            R = matrices.left @ _core(matrices.right.mT).mT
            names = [f"{head} {side}" for head in _head_names(model, layer)]
            yield Group(Moment.input(layer), names, R)
        for side, weight in model.layer(layer).mlp.input_weights().items():
            moment, names = model.parts.mlp_moment(layer), [f"mlp {layer} {side}"]
            yield Group(moment, names, _core(weight).T[None])


def _head_names(model: ResidualModel, layer: int) -> list[str]:
    return [f"head {layer}.{head}" for head in range(model.n_heads)]


def _core(A: Float[Tensor, "*batch n_out n"]) -> Float[Tensor, "*batch small n"]:
    """Return the R factor of the QR decomposition: |R W| = |A W| for every W."""
    return torch.linalg.qr(A.double(), mode="r").R.to(A.dtype)


def _scores(writer: Group, reader: Group) -> Float64[Tensor, "writers readers"]:
    W, R = writer.cores, reader.cores
    shape = len(W), len(R)
    if writer.moment > reader.moment:
        return torch.full(shape, torch.nan, dtype=torch.float64, device=W.device)
    # One product of all with all: a batch of products would copy each core for each partner.
    flat = W.flatten(0, 1) @ R.transpose(0, 1).flatten(1)
    squares = flat.square_().view(shape[0], -1, shape[1], R.shape[2])
    norms = squares.sum((1, 3), dtype=torch.float64).sqrt()
    sizes = [torch.linalg.matrix_norm(x, dtype=torch.float64) for x in (W, R)]
    size = sizes[0][:, None] * sizes[1]
    # A map of zeros reads nothing.
    return torch.where(size > 0, norms / size, 0.0)


@checked
def composition_figure(composition: Composition) -> "go.Figure":
    """Draw the share of each head's and MLP's output that each later one reads, beyond chance.

    Of a deep model the strongest writers and readers are drawn.
    """
    excess = composition.scores - composition.baseline
    known = excess.nan_to_num(-1)
    rows, columns = (
        known.amax(axis).topk(min(DRAWN, known.shape[1 - axis])).indices.sort().values
        for axis in (1, 0)
    )
    return heat_figure(
        excess[rows][:, columns],
        [composition.writers[i] for i in rows.tolist()],
        [composition.readers[i] for i in columns.tolist()],
        title="Composition beyond chance",
        across="reads",
        down="writes",
    )
