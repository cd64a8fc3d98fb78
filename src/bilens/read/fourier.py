"""The waves by which a classifier adds two numbers modulo a third."""

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Complex128, Float64
from torch import Tensor

from bilens.checks import full_precision
from bilens.errors import BilensError
from bilens.nn import ImageClassifier
from bilens.tensor import BilinearTensor

__all__ = ["FourierReading", "read_fourier"]


@dataclass(frozen=True, eq=False)
class FourierReading:
    """How a classifier of pairs (a, b) makes the logit of c.

    What of the logits depends on a, b and c together is a sum of waves exp(2 pi i (j a + k b + l c)
    / p) with none of j, k and l zero. Addition needs those of a + b - c alone, j = k = -l; a model
    that knows it uses a few frequencies k.

    Attributes:
        power: of frequency 1, 2, ... p // 2, the share of cos(2 pi k (a + b - c) / p + phase) in
            the sum of squares of that part.
        frequencies: those of at least the share that was asked for, the strongest first.
        accuracy: over all pairs.
        accuracy_kept: the same where the logits keep their waves of these frequencies alone.
        accuracy_removed: where they lose these.
        unit_share: of what the first layer's hidden units read of a number, the share that is of
            each unit's strongest frequency; 1 where every unit reads a single wave.
    """

    power: Float64[Tensor, " frequencies"]
    frequencies: tuple[int, ...]
    accuracy: float
    accuracy_kept: float
    accuracy_removed: float
    unit_share: float


@torch.no_grad()
@full_precision
def read_fourier(model: ImageClassifier, least: float = 0.01) -> FourierReading:
    """Read the waves out of all the logits of a model of `bilens.data.modular_addition`.

    There are p^2 inputs, each with one pixel in each row, so that the p^3 logits are all there is
    to the model: for one layer they are entries of its tensor, T[c, a, a] + T[c, p + b, p + b] +
    2 T[c, a, p + b], of which the last is the part that is read. Frequencies of at least the share
    `least` are named. O(p^3 log p) behind p^2 forward passes.

    Raises:
        BilensError: the model reads other inputs.
        NotBilinearError: a gate is not linear, or there is a norm.

    Source:
        Nanda et al. 2023, "Progress measures for grokking via mechanistic interpretability",
        arXiv:2301.05217.
    """
    p = model.config.n_classes
    if model.config.n_inputs != 2 * p:
        raise BilensError(
            f"The model has {model.config.n_inputs} pixels and {p} classes, expected twice as many "
            "pixels as classes: two numbers, as bilens.data.modular_addition gives them"
        )
    number = torch.eye(p, device=model.embed.weight.device, dtype=model.embed.weight.dtype)
    pairs = torch.cat([number.repeat_interleave(p, 0), number.repeat(p, 1)], dim=1)
    logits = model(pairs).double().cpu().reshape(p, p, p)
    waves = torch.fft.fftn(logits)
    k = torch.arange(1, p // 2 + 1)
    together = torch.ones_like(logits, dtype=torch.bool)
    for axis in range(3):
        together.select(axis, 0)[:] = False
    mirrored = torch.where(2 * k == p, 0, 1)
    found = waves[k, k, -k].abs() ** 2 * (1 + mirrored)
    power = found / (waves[together].abs() ** 2).sum()
    order = power.argsort(descending=True)
    frequencies = tuple(int(i) + 1 for i in order if power[i] >= least)
    chosen = torch.zeros_like(together)
    for f in frequencies:
        chosen[f, f, -f] = chosen[-f, -f, f] = True
    return FourierReading(
        power,
        frequencies,
        _accuracy(waves, torch.ones_like(chosen)),
        _accuracy(waves, chosen),
        _accuracy(waves, ~chosen),
        _unit_share(model.tensors()[0], p),
    )


def _unit_share(tensor: BilinearTensor, p: int) -> float:
    factors = torch.cat([tensor.left, tensor.right]).double().cpu()
    parts = torch.fft.rfft(torch.stack([factors[:, :p], factors[:, p : 2 * p]]))[..., 1:].abs() ** 2
    return float(parts.amax(-1).sum() / parts.sum())


def _accuracy(waves: Complex128[Tensor, "p p p"], kept: Bool[Tensor, "p p p"]) -> float:
    """Share of the pairs whose largest logit is their sum's, of some waves alone."""
    p = len(waves)
    logits = torch.fft.ifftn(waves * kept).real
    sums = torch.arange(p)[:, None] + torch.arange(p)
    return float((logits.argmax(-1) == sums % p).double().mean())
