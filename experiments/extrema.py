"""Local extrema of logits over images of unit length: the shapes that a class asks for.

Pearce & Dooms 2024 propose the local extrema of x'Qx in place of eigenvectors ("Future Work"),
which might find a set of clear shapes. On the sphere the only maximum up to sign is the top
eigenvector. Pixels cannot be negative, and then there may be many. For each class of MNIST the
maxima are counted that 64 random starts find, and the first three are drawn with their values;
minima likewise, which are maxima of -Q. Beside them are those of forms with the same eigenvalues
and random eigenvectors. Both scales do the same, with one model of figure 2.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from jaxtyping import Float
from matplotlib.figure import Figure
from torch import Tensor

from bilens.tensor import QuadraticForm
from bilens.train import ClassifierTraining
from experiments.context import Outcome, RecipeContext
from experiments.curves import picture_figure
from experiments.results import Row

SEEDS = (1, 1)
"""Initialisations at either scale."""
STARTS = 64


def run(context: RecipeContext) -> Outcome:
    """Find the extrema of each class of a model of one layer."""
    data = context.mnist
    (model,) = context.classifiers(data, ClassifierTraining(), context.seed_range(SEEDS)[:1])
    forms = model.tensor().to(torch.float64).interaction(output=range(data.n_classes))
    numbers: dict[str, dict[str, Any]] = {}
    rows, figures = list[Row](), dict[str, Figure]()
    for kind, sign in (("maxima", 1), ("minima", -1)):
        signed = replace(forms, weights=sign * forms.weights)
        turned = [len(local_maxima(form)[0]) for form in in_random_directions(signed)]
        pictures = {}
        for label, name in enumerate(data.class_names):
            heights, points = local_maxima(signed[label])
            values = (sign * heights).tolist()
            numbers.setdefault(name, {})[kind] = {"count": len(values), "values": values[:3]}
            texts = [f"{value:.3g}" for value in values[:3]]
            pictures[name] = list(zip(points[:3], texts, strict=True))
        title = f"Local {kind} of each logit"
        figures[kind] = picture_figure(pictures, data.shape, title=title)
        counts = [of_class[kind]["count"] for of_class in numbers.values()]
        beside = {"of random eigenvectors": float(torch.tensor(turned).median())}
        rows.append(Row.of_range(f"local {kind} of a class", counts, baselines=beside))
    settings = {"low and high": "range over classes", "starts": STARTS}
    return Outcome({"classes": numbers}, figures, rows=rows, settings=settings)


def in_random_directions(forms: QuadraticForm) -> Iterator[QuadraticForm]:
    """Yield each form with the same eigenvalues and random eigenvectors."""
    generator = torch.Generator().manual_seed(0)
    normal = torch.randn(forms.n_in, forms.n_in, generator=generator, dtype=forms.left.dtype)
    turn = torch.linalg.qr(normal)[0]
    for label in range(len(forms.weights)):
        yield replace(forms[label], left=forms.left @ turn, right=forms.right @ turn)


@torch.no_grad()
def local_maxima(
    form: QuadraticForm, n_starts: int = STARTS, seed: int = 0
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
