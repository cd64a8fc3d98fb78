"""MNIST case study, SVD: the components of the whole layer, without looking at the readout.

Reproduces "SVD on the bilinear tensor" of Pearce & Dooms 2024. The layer, from pixels to its d
outputs before the readout, is a matrix of outputs against pairs of pixels. Each singular component
is an output direction and an interaction matrix. Components are matched with those of another
initialisation, by the largest |cosine| of the interaction matrices, exact. Measured too is the
share of matches in the same place.

The source, with d = 1000 and weight decay 1, loses 1 % of its accuracy with 20 components and
nothing with 50; the first 5 components come back in the same order. Models are those of
`case_digits`, in the source's setting, at two widths. Intervals are of 95 % over initialisations;
for matches each has its mean over the others, so that they are a little too narrow.

Small: d = 300 and 1000, 10 epochs, 3 initialisations: 5 minutes on one core, a minute if the models
exist already. Paper: 20 epochs.
"""

from collections.abc import Sequence
from statistics import fmean
from typing import Any

import torch
from jaxtyping import Float, Float64, Int
from matplotlib.figure import Figure
from torch import Tensor

from bilens.images import TruncationCurve
from bilens.tensor import QuadraticForm, TensorSVD
from experiments.case import SEEDS, PixelModel, direction_names, eigenvector_figure, pixel_models
from experiments.context import Outcome, RecipeContext
from experiments.curves import confidence_line, line_figure
from experiments.results import Row

__all__ = ["SEEDS", "run"]

LEAST_SEEDS = 2
"""Each model is compared with others."""
SHOWN, FOLLOWED, FIRST = 10, 50, 5
STOPS = (20, 50)
WIDTHS = (300, 1000)


def run(context: RecipeContext) -> Outcome:
    """Cut the layers of several models short, and compare their components."""
    data, rows = context.mnist, list[Row]()
    for width in WIDTHS:
        models = pixel_models(context, width)
        svds = [model.layer.tensor().svd() for model in models]  # type: ignore[operator]
        curves = [
            bottleneck_curve(svd, model.unembed.weight, data.test_images, data.test_labels)
            for svd, model in zip(svds, models, strict=True)
        ]
        best, in_place = reproducibility(svds)
        rows += _rows(f"d = {width}", curves, best, in_place)
        rows.append(_read_row(f"d = {width}", svds, models))
    settings = {"d_model": WIDTHS, "components": [1, FIRST, *STOPS]}
    names = direction_names(svds[0].outputs[:SHOWN], models[0], data)
    spectra = svds[0].components[:SHOWN].eigh()
    figures = {
        "components": eigenvector_figure(
            spectra, names, data, title="Eigenvectors of the first components"
        ),
        "singular_values": _figure(
            [svd.values[:FOLLOWED].tolist() for svd in svds],
            title="Singular values",
            x_title="component",
            y_title="singular value",
        ),
        "bottleneck": _figure(
            [[100 * curve.drop(k) for k in range(1, FOLLOWED + 1)] for curve in curves],
            title="Accuracy lost with the first components alone",
            x_title="components kept",
            y_title="test accuracy lost (points)",
            floor=0.01,
        ),
        "reproducibility": _figure(
            best[:, :FOLLOWED].tolist(),
            title="Best match of each component in other models",
            x_title="component",
            y_title="|cosine| of interaction matrices",
        ),
    }
    return Outcome({}, figures, rows=rows, settings=settings)


def _rows(
    name: str,
    curves: Sequence[TruncationCurve],
    best: Float64[Tensor, "models k"],
    in_place: Float64[Tensor, "models k"],
) -> list[Row]:
    """Return what models of one width lose with few components, and how they come back."""
    k = in_place.shape[1]
    of_first = [matches[:FIRST].mean(-1) for matches in in_place]
    return [
        Row.of_shares(f"{name}: accuracy", [curve.full for curve in curves], scale=100, unit="%"),
        *(
            Row.of(
                f"{name}: points lost with the first {stop} singular components",
                [100 * curve.drop(stop) for curve in curves],
                baselines={"with half of them": 100 * fmean(c.drop(stop // 2) for c in curves)},
            )
            for stop in STOPS
        ),
        Row.of_shares(
            f"{name}: best match of components 1 to {FIRST} in another model",
            best[:, :FIRST].mean(-1).tolist(),
            baselines={"of all": float(best.mean())},
        ),
        Row.of_shares(
            f"{name}: share of components 1 to {FIRST} whose match is in the same place",
            [float(share) for share in of_first],
            baselines={"by chance": 1 / k},
        ),
    ]


def _read_row(name: str, svds: Sequence[TensorSVD], models: Sequence[PixelModel]) -> Row:
    """Return how much of what the readout reads is in the first components."""
    shares = list[float]()
    for svd, model in zip(svds, models, strict=True):
        read = (svd.outputs @ model.unembed.weight.to(svd.outputs).T).square().sum(-1)
        shares.append(float(read[: STOPS[0]].sum() / read.sum()))
    return Row.of_shares(
        f"{name}: share of the readout's squares in the first {STOPS[0]} components",
        shares,
        baselines={"of as many random directions": STOPS[0] / len(svds[0])},
    )


def bottleneck_curve(
    svd: TensorSVD,
    readout: Float[Tensor, "classes n_out"],
    x: Float[Tensor, "samples n_in"],
    labels: Int[Tensor, " samples"],
) -> TruncationCurve:
    """Compute the accuracy with the first 1, 2, ... components of a layer, in one pass.

    For each k this is the accuracy of readout(svd.truncate(k)(x)), which as a tensor is
    `layer.change_basis(outputs=readout @ svd.truncate(k).projector())`. The readout is the linear
    map from the layer's outputs to the logits.

    Source:
        Pearce & Dooms 2024, "SVD on the bilinear tensor".
    """
    component_logits = svd.values[:, None] * (svd.outputs @ readout.to(svd.outputs).T)

    def logits(rows: Tensor) -> Tensor:
        return (svd.components(rows)[..., None] * component_logits).cumsum(1)

    right = torch.zeros(len(svd), dtype=torch.float64)
    for rows, of_rows in zip(x.split(512), labels.split(512), strict=True):
        right += (logits(rows).argmax(-1) == of_rows[:, None]).sum(0)
    accuracy = (right / len(x)).tolist()
    return TruncationCurve(tuple(accuracy), accuracy[-1])


def form_cosines(a: QuadraticForm, b: QuadraticForm) -> Float64[Tensor, "k_a k_b"]:
    """Return the cosines <Q_i, Q'_j> / (|Q_i| |Q'_j|) of two batches of interaction matrices.

    A zero form has cosine 0. Computed from the factors, at O(rank_a rank_b n_in).
    """
    a, b = a.without_scale()[0], b.without_scale()[0]
    straight = (a.left.double() @ b.left.double().T) * (a.right.double() @ b.right.double().T)
    crossed = (a.left.double() @ b.right.double().T) * (a.right.double() @ b.left.double().T)
    inner = a.weights.double() @ (straight + crossed) @ b.weights.double().T / 2
    norms = a.norm()[:, None] * b.norm()
    return torch.where(norms > 0, inner / norms, torch.zeros_like(inner))


def reproducibility(
    svds: Sequence[TensorSVD],
) -> tuple[Float64[Tensor, "models k"], Float64[Tensor, "models k"]]:
    """Each component's best match, and how often it is in place: means over the other models."""
    places = torch.arange(len(svds[0]))
    matches, same = [], []
    for a in svds:
        others = [b for b in svds if b is not a]
        cosines = [form_cosines(a.components, b.components).abs().max(-1) for b in others]
        matches.append(torch.stack([match.values for match in cosines]).mean(0))
        same.append(torch.stack([match.indices == places for match in cosines]).double().mean(0))
    return torch.stack(matches), torch.stack(same)


def _figure(samples: Sequence[Sequence[float]], **titles: Any) -> Figure:
    name = "mean over models, 95 % interval"
    return line_figure([confidence_line(name, range(1, len(samples[0]) + 1), samples)], **titles)
