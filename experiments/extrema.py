"""Local maxima of logits over images of unit length: the shapes that a class asks for.

Pearce & Dooms 2024 propose the local extrema of x'Qx in place of eigenvectors ("Future Work"),
which might find a set of clear shapes. On the sphere the only maximum up to sign is the top
eigenvector. Pixels cannot be negative, and then there may be many. For each class of MNIST the
maxima are counted that 64 random starts find, and the first three are drawn with their values.
Both scales do the same, a minute on two cores after the training of figure 2's model.
"""

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from bilens.tensor import QuadraticForm
from bilens.train import ClassifierTraining
from experiments.context import Outcome, RecipeContext
from experiments.curves import picture_figure
from experiments.results import Row

SEEDS = (1, 1)
"""Initialisations at either scale."""


def run(context: RecipeContext) -> Outcome:
    """Find the maxima of each class of a model of one layer."""
    data = context.mnist
    (model,) = context.classifiers(data, ClassifierTraining(), context.seed_range(SEEDS)[:1])
    forms = model.tensor().interaction(output=range(data.n_classes))
    numbers: dict[str, dict[str, Any]] = {}
    rows = {}
    for label, name in enumerate(data.class_names):
        heights, points = local_maxima(forms[label])
        numbers[name] = {"maxima": len(heights), "values": heights[:3].tolist()}
        values = [f"{height:.3g}" for height in heights[:3].tolist()]
        rows[name] = list(zip(points[:3], values, strict=True))
    figure = picture_figure(rows, data.shape, title="Local maxima of each logit")
    counts = [of_class["maxima"] for of_class in numbers.values()]
    row = Row.of_range("local maxima of a class", counts)
    settings = {"low and high": "range over classes"}
    return Outcome({"classes": numbers}, {"maxima": figure}, rows=[row], settings=settings)


@torch.no_grad()
def local_maxima(
    form: QuadraticForm, n_starts: int = 64, seed: int = 0
) -> tuple[Float[Tensor, " m"], Float[Tensor, "m n_in"]]:
    """Return local maxima of x'Qx over |x| = 1, x >= 0, the highest first: values and points.

    Each is the top eigenvector of the block of Q on its support, with nothing to gain outside:

        (Qx)_i = (x'Qx) x_i if x_i > 0,   (Qx)_i <= 0 if x_i = 0

    Each start climbs by x <- max(0, (Q + sI) x), rescaled to unit length. With s such that Q + sI
    is positive definite, x'Qx + s is convex and no step goes down. Nothing proves that no maximum
    was missed. Ends that agree to a cosine of 0.999 count as the same. Q, of a form that is not
    zero, is built in float64, which costs O(n_in^3) once and O(n_starts n_in^2) for each step.

    Source: Pearce & Dooms 2024, "Future Work" and "The MNIST digit basis"; the step is the
        projected shifted power method of Kolda & Mayo 2011.
    """
    Q = form.dense().double()
    spectrum = torch.linalg.eigvalsh(Q)
    scale = spectrum.abs().max()
    # As small as is safe: a larger shift makes steps shorter.
    shift = scale / 100 - spectrum[0]
    points = _starts(n_starts, Q, torch.Generator().manual_seed(seed))
    active = torch.arange(n_starts)
    for _ in range(2000):
        x = points[active]
        slope = x @ Q
        tangent = slope - (slope * x).sum(-1, keepdim=True) * x
        unfinished = (x - (x + tangent / scale).clamp_min(0)).norm(dim=-1) > 1e-6
        active = active[unfinished]
        if not active.numel():
            break
        points[active] = _unit((slope + shift * x)[unfinished].clamp_min(0))
    values = ((points @ Q) * points).sum(-1)
    order = values.argsort(descending=True, stable=True)
    # The best point leads the first group, which all that resemble it join, and so on.
    best, left = list[int](), torch.ones(n_starts, dtype=torch.bool)
    for row in order.tolist():
        if left[row]:
            best.append(row)
            left &= (points @ points[row]).abs() < 0.999
    return values[best], points[best]


def _starts(count: int, like: Tensor, generator: torch.Generator) -> Float[Tensor, "starts n"]:
    """Return random unit vectors of which from one to all entries are large, the others small.

    With entries of equal size all would point much the same way and find few basins. So the number
    of large entries is drawn on a log scale. Small entries are not zero, as zeros could stay in a
    saddle.
    """
    n, dtype = len(like), like.dtype
    normal = torch.randn(count, n, dtype=dtype, generator=generator)
    draws = torch.rand(count, n, dtype=dtype, generator=generator)
    density = n ** -torch.rand(count, 1, dtype=dtype, generator=generator)
    # At least one entry is large: the one with the smallest draw.
    large = draws <= torch.maximum(density, draws.amin(-1, keepdim=True))
    return _unit(normal.abs() * torch.where(large, 1, 0.01))


def _unit(x: Tensor) -> Tensor:
    return x / torch.linalg.vector_norm(x, dim=-1, keepdim=True)
