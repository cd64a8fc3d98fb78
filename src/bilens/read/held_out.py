"""The error of a smaller model on images that did not choose it, with confidence intervals."""

import math
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from bilens.checks import full_precision
from bilens.errors import BilensError

CONFIDENCE = 0.95
"""Confidence of the interval of the accuracy."""
DEVIATIONS = 5
"""Standard errors between an estimate and its upper bound.

By Cantelli's inequality the mean exceeds the bound with a chance of at most 1 / 26, for any
distribution of this variance.
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
        error_bound: upper bound on the error for images of the same kind, 5 standard errors above
            its mean square.
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
    """Compare the logits of a smaller model with those of the model, on held-out images.

    Raises:
        BilensError: shapes do not fit, or the images are fewer than 2.
    """
    n_images = len(labels)
    if n_images < 2:
        raise BilensError(f"labels has {n_images} entries, expected at least 2 images")
    parts = (logits.double(), smaller.double())
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
        error_bound=math.sqrt(ratio + DEVIATIONS * deviation),
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
    counts = torch.arange(k, n + 1, dtype=torch.float64, device="cpu")
    ways = math.lgamma(n + 1) - torch.lgamma(counts + 1) - torch.lgamma(n - counts + 1)
    low, high = 0.0, 1.0
    for _ in range(BISECTIONS):
        p = (low + high) / 2
        logs = ways + counts * math.log(p) + (n - counts) * math.log1p(-p)
        low, high = (p, high) if float(logs.logsumexp(0)) < math.log(tail) else (low, p)
    return (low + high) / 2
