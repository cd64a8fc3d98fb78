"""Ranks of a cut by the accuracy that they need, and its error on held-out images."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Float, Float64, Int
from torch import Tensor

from bilens.checks import full_precision
from bilens.data import ImageData
from bilens.errors import BilensError
from bilens.progress import progress_bar
from bilens.settings import Share
from bilens.tensor import Bonds, Cut

DEVIATIONS = 3.09
"""Standard errors of a measured loss by which a cut has to stay below its limit."""
MEASURED_SHARE = 0.5
"""Images on which the loss will be measured, over those of the check."""
RANKS = (1, 2, 3, 4, 5, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30, 35, 40, 50, 60, 80, 100)
"""Ranks of the uniform cuts whose accuracy is measured."""
TRAINING_IMAGES = 30_000
"""Number of training images for the choice of ranks, a third for the search, others for a check."""
PER_DECADE = 10
"""Numbers of products, per factor of 10, at which accuracy is measured."""
CONFIDENCE = 0.95
"""Confidence of the interval of the accuracy."""
BOUND_DEVIATIONS = 6
"""Standard errors between an estimate and its upper bound.

They are 4.2 of the difference between the estimates from two sets of as many images. By Cantelli's
inequality the second exceeds the bound with a chance of at most 1 / 19, for any distribution of
this variance.
"""
BISECTIONS = 60


@dataclass(frozen=True)
class HeldOut:
    """The error of a smaller model on held-out images.

    Attributes:
        n_images: number of images.
        accuracy: share of images that it classifies as labelled.
        interval: Clopper-Pearson interval of the accuracy, at a confidence of 95 %.
        changed: share of images with another prediction than the model's.
        error: RMS change of the logits over their RMS, both after subtraction of their mean.
        error_bound: upper bound on the error for as many other images of the same kind, 6 standard
            errors above its mean square.
    """

    n_images: int
    accuracy: float
    interval: tuple[float, float]
    changed: float
    error: float
    error_bound: float

    def record(self) -> dict[str, Any]:
        """Return the numbers for JSON."""
        return {**vars(self), "interval": list(self.interval)}


@full_precision
def held_out(
    logits: Float[Tensor, "images classes"],
    smaller: Float[Tensor, "images classes"],
    labels: Int[Tensor, " images"],
) -> HeldOut:
    """Compare the logits of a smaller model with those of the model, on held-out images."""
    n_images = len(labels)
    if n_images < 2:
        raise BilensError(f"labels has {n_images} entries, expected at least 2 images")
    parts = (logits.double(), smaller.double())
    # A number added to all logits is no change of the function.
    centred, other = (part - part.mean(-1, keepdim=True) for part in parts)
    change, size = ((part**2).sum(-1) for part in (centred - other, centred))
    ratio = float(change.mean() / size.mean())
    # Delta method: the variance of a ratio of means is that of the residuals.
    residuals = (change - ratio * size) / size.mean()
    deviation = float(residuals.std()) / n_images**0.5
    right = int((smaller.argmax(-1) == labels.to(smaller.device)).sum())
    changed = (smaller.argmax(-1) != logits.to(smaller.device).argmax(-1)).double().mean()
    return HeldOut(
        n_images=n_images,
        accuracy=right / n_images,
        interval=clopper_pearson(right, n_images, CONFIDENCE),
        changed=float(changed),
        error=math.sqrt(ratio),
        error_bound=math.sqrt(ratio + BOUND_DEVIATIONS * deviation),
    )


def clopper_pearson(successes: int, n: int, confidence: float) -> tuple[float, float]:
    """Return the exact interval of the probability of a success, from successes in n trials.

    Source: Clopper & Pearson 1934.
    """
    tail = (1 - confidence) / 2
    low = 0.0 if successes == 0 else _solve(successes, n, tail)
    # The upper end for k successes is the lower end for n - k failures.
    high = 1.0 if successes == n else 1 - _solve(n - successes, n, tail)
    return low, high


def _solve(k: int, n: int, tail: float) -> float:
    """Return the p at which the chance of k or more successes of n is `tail`."""
    # Logarithms, since single probabilities of thousands of trials underflow.
    counts = torch.arange(k, n + 1, dtype=torch.float64, device="cpu")
    ways = math.lgamma(n + 1) - torch.lgamma(counts + 1) - torch.lgamma(n - counts + 1)
    # The chance grows with p, so bisection finds the only solution.
    low, high = 0.0, 1.0
    for _ in range(BISECTIONS):
        p = (low + high) / 2
        logs = ways + counts * math.log(p) + (n - counts) * math.log1p(-p)
        low, high = (p, high) if float(logs.logsumexp(0)) < math.log(tail) else (low, p)
    return (low + high) / 2


@full_precision
def accurate_ranks(model_bonds: Bonds, data: ImageData, drop: Share = 0.01) -> tuple[int, ...]:
    """Find few directions that lose at most `drop` of the model's accuracy.

    They are searched on 10,000 training images and checked on 20,000 others. There the loss, image
    by image, has to be 3.09 standard errors below `drop`. Otherwise every bond gets one direction
    more. The standard error is that of a loss which is then measured on half as many images. So
    this loss is within `drop` with a confidence of 99.9 %, for images of the same kind.
    """
    full = tuple(bond.k for bond in model_bonds.bonds)
    # Evenly spaced, since images may be sorted by class.
    spaced = slice(None, None, max(1, len(data.train_images) // TRAINING_IMAGES))
    x, labels = data.train_images[spaced], data.train_labels[spaced]
    # The input coordinates of every cut are the first of these, so they are computed once. Single
    # precision decides the same images within rounding, in half the time.
    z = model_bonds.cut(full).coordinates(x)[0].float()
    searched = torch.arange(len(z)) % 3 == 0
    checks = int((~searched).sum())

    def is_right(cut: Cut, images: Bool[Tensor, " images"]) -> Float64[Tensor, " _"]:
        outputs = z[images, : cut.ranks[0]]
        for core in cut.cores:
            outputs = core.to(torch.float32)(outputs)
        return (outputs.argmax(-1) == labels[images]).double()

    def loss_bound(cut: Cut, images: Bool[Tensor, " images"]) -> float:
        lost = reference[images] - is_right(cut, images)
        # The mean over the check and the loss that is measured later both vary.
        variance = (1 + 1 / MEASURED_SHARE) / checks
        return float(lost.mean() + DEVIATIONS * lost.std() * variance**0.5)

    with progress_bar() as bar:
        task = bar.add_task("choosing directions", total=None, note="")
        # The loss of a cut is counted image by image against all directions.
        reference = is_right(model_bonds.cut(full), torch.ones_like(searched))

        def score(cut: Cut) -> float:
            bound = loss_bound(cut, searched)
            bar.update(
                task,
                advance=1,
                note=f"{' + '.join(map(str, cut.ranks))} directions: {bound:.2%} lost",
            )
            return -bound

        ranks = model_bonds.ranks_scoring(score, -drop)
        # The search has seen its images many times, and may have been lucky on them.
        while ranks != full and loss_bound(model_bonds.cut(ranks), ~searched) > drop:
            ranks = tuple(min(rank + 1, k) for rank, k in zip(ranks, full, strict=True))
        return ranks


@full_precision
def rank_accuracies(
    model_bonds: Bonds, data: ImageData, ranks: Sequence[int] = ()
) -> tuple[tuple[int, float, float], ...]:
    """Return (k, test accuracy, error of the logits) of the cut to k directions at each bond.

    The error is the RMS change of the centred logits on the test images, over their RMS. By default
    k runs from 1 to all directions in growing steps.
    """
    most = max(bond.k for bond in model_bonds.bonds)
    logits = full_cut(model_bonds)(data.test_images)
    rows = []
    for k in ranks or [*(rank for rank in RANKS if rank < most), most]:
        outputs = model_bonds.cut(k)(data.test_images)
        error = float((outputs - logits).norm() / logits.norm())
        rows.append((k, _accuracy(outputs, data.test_labels), error))
    return tuple(rows)


def full_cut(model_bonds: Bonds) -> Cut:
    """Return the model on all directions."""
    return model_bonds.cut(max(bond.k for bond in model_bonds.bonds))


@full_precision
def product_accuracies(cut: Cut, data: ImageData) -> tuple[tuple[int, float], ...]:
    """Return (k, test accuracy) with only the k products of largest share, for growing k."""
    most = len(cut.products())
    steps = range(PER_DECADE, 1 + int(PER_DECADE * math.log10(most)))
    counts = sorted({round(10 ** (step / PER_DECADE)) for step in steps} | {most})
    x = data.test_images.to(cut.read)
    rows = []
    for k in counts:
        z = x
        for tensor in cut.keep_products(k):
            z = tensor(z)
        rows.append((k, _accuracy(z, data.test_labels)))
    return tuple(rows)


def _accuracy(logits: Float[Tensor, "images classes"], labels: Tensor) -> float:
    return int((logits.argmax(-1) == labels.to(logits.device)).sum()) / len(labels)
