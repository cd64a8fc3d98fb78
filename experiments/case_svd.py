"""MNIST case study, SVD: the components of the whole layer, without looking at the readout.

Reproduces "SVD on the bilinear tensor" of Pearce & Dooms 2024. The layer, from pixels to its d
outputs before the readout, is a matrix of outputs against pairs of pixels. Each singular component
is an output direction and an interaction matrix. Components are matched with those of another
initialisation, by the largest |cosine| of the interaction matrices, exact. Measured too is the
share of matches in the same place.

The source, with d = 1000 and weight decay 1, loses 1 % of its accuracy with 20 components and
nothing with 50; the first 5 components come back in the same order. Ours has an embedding before
the layer, folded in here, and is trained without input noise. Intervals are of 95 % over
initialisations; for matches each has its mean over the others, so that they are a little too
narrow.

Small: d = 300, 10 epochs, 3 initialisations: 2 minutes on one core, 10 seconds if the models exist
already. Paper: d = 1000, 20 epochs, 5 initialisations, 6 to 10 minutes a model; run with two.
"""

from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Float, Float64, Int
from matplotlib.figure import Figure
from torch import Tensor

from bilens.images import TruncationCurve
from bilens.tensor import QuadraticForm, TensorSVD
from experiments.case import case_models, direction_names, eigenvector_figure, layer_tensor
from experiments.context import Outcome, RecipeContext
from experiments.curves import confidence_line, line_figure
from experiments.results import Row, interval

SEEDS = (3, 5)
"""Initialisations at either scale."""
LEAST_SEEDS = 2
"""Each model is compared with others."""
SHOWN, FOLLOWED, FIRST = 10, 50, 5
STOPS = (20, 50)


def run(context: RecipeContext) -> Outcome:
    """Cut the layers of several models short, and compare their components."""
    data, models = context.mnist, case_models(context, context.seed_range(SEEDS))
    svds = [layer_tensor(model).svd() for model in models]
    readouts = [model.unembed.weight for model in models]
    curves = [
        bottleneck_curve(svd, readout, data.test_images, data.test_labels)
        for svd, readout in zip(svds, readouts, strict=True)
    ]
    best, in_place = reproducibility(svds)
    read = svds[0].outputs @ readouts[0].T
    share = read.pow(2).sum(-1).cumsum(0) / read.pow(2).sum()
    numbers = {
        "accuracy": interval([curve.full for curve in curves]),
        **{f"drop_at_{k}": interval([curve.drop(k) for curve in curves]) for k in STOPS},
        "needed_for_no_drop": interval([curve.needed(0) for curve in curves]),
        "best_match_of_first": interval(best[:, :FIRST].mean(-1).tolist()),
        "best_match": best[:, :FOLLOWED].mean(0).tolist(),
        "in_the_same_place": in_place[:FOLLOWED].tolist(),
        "singular_values": svds[0].values[:FOLLOWED].tolist(),
        "share_of_readout": {str(k): float(share[k - 1]) for k in STOPS},
        "source": {"drop_at_20": 0.01, "drop_at_50": 0.0, "reproducible_components": 5},
    }
    lost = {k: [100 * curve.drop(k) for curve in curves] for k in STOPS}
    rows = [
        Row.of_shares("accuracy", [curve.full for curve in curves], scale=100, unit="%"),
        *(
            Row.of(
                f"points lost with the first {k} singular components",
                lost[k],
                source=at_most,
                held=round(sum(lost[k]) / len(lost[k])) <= at_most,
            )
            for k, at_most in zip(STOPS, (1, 0), strict=True)
        ),
        Row.of_shares(
            f"best match of components 1 to {FIRST} in another model",
            best[:, :FIRST].mean(-1).tolist(),
        ),
        Row(
            f"share of components 1 to {FIRST} whose match is in the same place",
            float(in_place[:FIRST].mean()),
            n=len(models),
            source=1,
            held=bool((in_place[:FIRST] == 1).all()),
        ),
    ]
    settings = {"d_model": context.choose(300, 1000), "components": [1, FIRST, *STOPS]}
    names = direction_names(svds[0].outputs[:SHOWN], models[0], data)
    spectra = svds[0].components[:SHOWN].eigh()
    return Outcome(
        numbers,
        {
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
        },
        rows=rows,
        settings=settings,
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
) -> tuple[Float64[Tensor, "models k"], Float64[Tensor, " k"]]:
    """Each component's best match, a mean over the other models, and how often it is in place."""
    places = torch.arange(len(svds[0]))
    matches, same = [], []
    for a in svds:
        others = [b for b in svds if b is not a]
        cosines = [form_cosines(a.components, b.components).abs().max(-1) for b in others]
        matches.append(torch.stack([match.values for match in cosines]).mean(0))
        same += [match.indices == places for match in cosines]
    return torch.stack(matches), torch.stack(same).double().mean(0)


def _figure(samples: Sequence[Sequence[float]], **titles: Any) -> Figure:
    name = "mean over models, 95 % interval"
    return line_figure([confidence_line(name, range(1, len(samples[0]) + 1), samples)], **titles)
