"""Local maxima of logits over images of unit length: the shapes that a class asks for.

Pearce & Dooms 2024 propose the local extrema of x'Qx in place of eigenvectors ("Future Work"),
which might find a set of clear shapes. On the sphere the only maximum up to sign is the top
eigenvector. Pixels cannot be negative, and then there may be many. For each class of MNIST the
maxima are counted that 64 random starts find, and the first three are drawn with their values.
Both scales do the same, a minute on two cores after the training of figure 2's model.
"""

from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor

from bilens.checks import checked
from bilens.errors import BilensError
from bilens.settings import Count, Seed, Size, Tolerance
from bilens.tensor import QuadraticForm
from bilens.tensor.similarity import leaders
from bilens.train import ClassifierTraining
from experiments.context import Outcome, RecipeContext
from experiments.curves import picture_figure

__all__ = ["Extrema", "local_extrema", "run"]

SAME = 0.999
"""Points of at least this cosine (up to sign, without nonnegative) count as the same."""

SMALL = 0.01
"""Size of the small entries of a start; the large ones are 1."""


def run(context: RecipeContext) -> Outcome:
    """Find the maxima of each class of a model of one layer."""
    data = context.mnist
    (model,) = context.classifiers(data, ClassifierTraining(), 1)
    forms = model.tensor().interaction(output=range(data.n_classes))
    numbers, rows = {}, {}
    for label, name in enumerate(data.class_names):
        extrema = local_extrema(forms[label], n_starts=64)
        numbers[name] = {"maxima": len(extrema), "values": extrema.values[:3].tolist()}
        values = [f"{value:.3g}" for value in extrema.values[:3].tolist()]
        rows[name] = list(zip(extrema.points[:3], values, strict=True))
    figure = picture_figure(rows, data.shape, title="Local maxima of each logit")
    return Outcome({"classes": numbers}, {"maxima": figure})


@dataclass(frozen=True, eq=False)
class Extrema:
    """Local maxima or minima of x'Qx over inputs of unit length, the most extreme first.

    Attributes:
        values: x'Qx at each.
        points: x, one unit row each; its sign is arbitrary unless it had to be non-negative.
        hits: number of starts that ended there, a measure of its basin.
        residuals: deviation from the first-order conditions, relative to the spectral norm of Q.
        converged: True if the residual is within the tolerance. Otherwise the climb ran out of
            steps and the value is only a bound.
    """

    values: Float[Tensor, " m"]
    points: Float[Tensor, "m n_in"]
    hits: Int64[Tensor, " m"]
    residuals: Float[Tensor, " m"]
    converged: Bool[Tensor, " m"]

    def __len__(self) -> int:
        """Return the number of distinct points."""
        return self.values.shape[0]


@checked
def local_extrema(
    form: QuadraticForm,
    *,
    sign: Literal[1, -1] = 1,
    nonnegative: bool = True,
    n_starts: Size = 256,
    steps: Count = 2000,
    tolerance: Tolerance = 1e-6,
    seed: Seed = 0,
) -> Extrema:
    """Return local maxima (sign=1) or minima (sign=-1) of x'Qx over |x| = 1, by default x >= 0.

    On the sphere without constraint the only maximum up to sign is the top eigenvector. Inputs such
    as pixels cannot be negative, and then there may be many. Each is the top eigenvector of the
    block of Q on its support, with nothing to gain outside:

        (Qx)_i = (x'Qx) x_i if x_i > 0,   (Qx)_i <= 0 if x_i = 0

    Each start climbs by x <- max(0, (Q + sI) x), rescaled to unit length. With s such that Q + sI
    is positive definite, x'Qx + s is convex and no step goes down. Nothing proves that no maximum
    was missed: `hits` counts the starts that reached each. The residual is
    |x - max(0, x + (Qx - (x'Qx) x) / |Q|)|, without the max if x may be negative. Ends that agree
    to a cosine of 0.999 count as the same. Q is built in float64, which costs O(n_in^3) once and
    O(n_starts n_in^2) for each step. Not differentiable.

    Args:
        form: a single form without constant coordinate.
        sign: 1 for maxima, -1 for minima.
        nonnegative: restrict x to x >= 0.
        n_starts: number of random starts, from dense to sparse ones.
        steps: most steps of each start.
        tolerance: largest residual of a point that has converged.
        seed: of the random starts.

    Source: Pearce & Dooms 2024, "Future Work" and "The MNIST digit basis"; the step is the
        projected shifted power method of Kolda & Mayo 2011.
    """
    _check(form)
    with torch.no_grad():
        unit, size = form.without_scale()
        Q = sign * unit.dense().double()
        spectrum = torch.linalg.eigvalsh(Q)
        scale = spectrum.abs().max()
        if not scale > 0:
            raise BilensError("form is zero, so every input is an extremum of it")
        # As small as is safe: a larger shift makes steps shorter.
        shift = scale / 100 - spectrum[0]
        generator = torch.Generator(Q.device).manual_seed(int(seed))
        points = _starts(n_starts, Q, nonnegative, generator)
        residuals = _climb(points, Q, shift, scale, nonnegative, steps, tolerance)
        values = ((points @ Q) * points).sum(-1)
        order = values.argsort(descending=True, stable=True)
        labels = leaders(points, order, SAME)
        # The groups are numbered in the order of their best points, which represent them.
        hits = torch.bincount(labels)
        best = torch.stack([order[labels[order] == group][0] for group in range(len(hits))])
    dtype = unit.weights.dtype
    return Extrema(
        values=(size * sign * values[best]).to(dtype),
        points=points[best].to(dtype),
        hits=hits,
        residuals=residuals[best].to(dtype),
        converged=residuals[best] <= tolerance,
    )


def _climb(
    points: Float[Tensor, "starts n"],
    Q: Float[Tensor, "n n"],
    shift: Float[Tensor, ""],
    scale: Float[Tensor, ""],
    nonnegative: bool,
    steps: int,
    tolerance: float,
) -> Float[Tensor, " starts"]:
    """Climb from each point, in place, until its residual is within tolerance; return residuals."""
    residuals = points.new_full((len(points),), torch.inf)
    active = torch.arange(len(points), device=points.device)
    for step in range(steps + 1):
        x = points[active]
        slope = x @ Q
        tangent = slope - (slope * x).sum(-1, keepdim=True) * x
        residuals[active] = (x - _allowed(x + tangent / scale, nonnegative)).norm(dim=-1)
        unfinished = residuals[active] > tolerance
        active = active[unfinished]
        if step == steps or not active.numel():
            break
        points[active] = _unit(_allowed((slope + shift * x)[unfinished], nonnegative))
    return residuals


def _starts(
    count: int, like: Float[Tensor, "n n"], nonnegative: bool, generator: torch.Generator
) -> Float[Tensor, "starts n"]:
    """Return random unit vectors; non-negative ones have from one to all entries large.

    With entries of equal size all would point much the same way and find few basins. So the number
    of large entries is drawn on a log scale. Small entries are not zero, as zeros could stay in a
    saddle.
    """
    n = len(like)

    def uniform(*shape: int) -> Tensor:
        return torch.rand(shape, dtype=like.dtype, device=like.device, generator=generator)

    normal = torch.randn(count, n, dtype=like.dtype, device=like.device, generator=generator)
    if not nonnegative:
        return _unit(normal)
    draws = uniform(count, n)
    density = n ** -uniform(count, 1)
    # At least one entry is large: the one with the smallest draw.
    large = draws <= torch.maximum(density, draws.amin(-1, keepdim=True))
    return _unit(normal.abs() * torch.where(large, 1, SMALL))


def _allowed(x: Tensor, nonnegative: bool) -> Tensor:
    return x.clamp_min(0) if nonnegative else x


def _unit(x: Tensor) -> Tensor:
    return x / torch.linalg.vector_norm(x, dim=-1, keepdim=True)


def _check(form: QuadraticForm) -> None:
    if form.batch_shape:
        raise BilensError(
            f"form is a batch of shape {tuple(form.batch_shape)}; expected one form: form[0]"
        )
    if form.constant:
        raise BilensError(
            "form has a constant coordinate, which is always 1 and not free to climb in. Leave "
            "biases out: build the form from a tensor without the last column of left and right."
        )
