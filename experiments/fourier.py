"""Fourier waves of a classifier that adds two numbers modulo a third."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from jaxtyping import Bool, Complex128, Float64
from torch import Tensor

from bilens.analysis import Columns, Fact, Percent, Reading, analysis
from bilens.errors import BilensError
from bilens.tensor import BilinearTensor, TensorChain


@dataclass(frozen=True, eq=False, repr=False)
class FourierReading(Reading):
    """Frequencies of a classifier of pairs (a, b) in its logit of c.

    The part of the logits that depends on a, b and c together is a sum of waves
    exp(2 pi i (j a + k b + l c) / p) with j, k and l all different from zero. Addition needs only
    those of a + b - c, j = k = -l. A model that has learned it uses a few frequencies k.

    Attributes:
        power: for frequency 1, 2, ... p // 2, the share of cos(2 pi k (a + b - c) / p + phase) in
            the sum of squares of that part.
        frequencies: the frequencies of at least the requested share, the strongest first.
        accuracy: accuracy over all pairs.
        accuracy_kept: accuracy if the logits are restricted to waves of these frequencies.
        accuracy_removed: accuracy if these waves are removed.
        unit_share: share of each first-layer hidden unit's strongest frequency in its weights for a
            number, over all units; 1 if every unit has a single frequency.
    """

    power: Float64[Tensor, " frequencies"]
    frequencies: tuple[int, ...]
    accuracy: float
    accuracy_kept: float
    accuracy_removed: float
    unit_share: float

    title: ClassVar[str] = "Fourier waves of the logits"
    axes: ClassVar[dict[str, str]] = {"x": "frequency", "y": "share"}
    explanation: ClassVar[str] = (
        "The joint part of the logits of a, b and c is a sum of waves. Addition needs only "
        "waves of a + b - c, and the table has the share of each of their frequencies."
    )

    def facts(self) -> list[Fact]:
        """Return the frequencies and the accuracies with and without them."""
        return [
            ("frequencies", " + ".join(map(str, self.frequencies))),
            ("accuracy", Percent(self.accuracy)),
            ("accuracy with these frequencies only", Percent(self.accuracy_kept)),
            ("accuracy without them", Percent(self.accuracy_removed)),
            ("share of a unit's strongest frequency", Percent(self.unit_share)),
        ]

    def columns(self) -> Columns:
        """Return a row for each frequency, in ascending order."""
        return {"frequency": range(1, len(self.power) + 1), "share": self.power.tolist()}


@analysis("fourier")
@torch.no_grad()
def read_fourier(model: TensorChain, least: float = 0.01) -> FourierReading:
    """Decompose all logits of a model of `bilens.data.modular_addition` into Fourier waves.

    The model has p^2 inputs, each with one pixel in each row, so its p^3 logits describe it
    completely. For one layer they are entries of its tensor, T[c, a, a] + T[c, p + b, p + b] +
    2 T[c, a, p + b], and the last term is the part that is decomposed. Frequencies of at least the
    share `least` are named. Costs O(p^3 log p) after p^2 forward passes.

    Args:
        model: classifier of pairs of numbers.
        least: smallest share of a frequency that is named.

    Raises:
        BilensError: the model has other inputs.
        NotBilinearError: a gate is not linear, or a norm divides by the input's length.

    Source:
        Nanda et al. 2023, "Progress measures for grokking via mechanistic interpretability",
        arXiv:2301.05217.
    """
    tensors, embedding = model.layer_tensors(), model.embedding()
    first = tensors[0] if embedding is None else tensors[0].change_basis(inputs=embedding)
    p, n_inputs = tensors[-1].n_out, first.n_in - first.constant
    if n_inputs != 2 * p:
        raise BilensError(
            f"The model has {n_inputs} pixels and {p} classes, expected twice as many "
            "pixels as classes: two numbers, as bilens.data.modular_addition encodes them"
        )
    # All p^2 inputs: nothing is sampled.
    one_hot = torch.eye(p, device="cpu")
    pairs = torch.cat([one_hot.repeat_interleave(p, 0), one_hot.repeat(p, 1)], dim=1)
    logits = model(pairs.to(first.left)).double().cpu().reshape(p, p, p)
    waves = torch.fft.fftn(logits)
    k = torch.arange(1, p // 2 + 1, device="cpu")
    # Waves with a zero frequency depend on fewer than three of a, b and c.
    joint = torch.ones_like(logits, dtype=torch.bool)
    for axis in range(3):
        joint.select(axis, 0)[:] = False
    # A real wave has a mirror image at -k, except at the frequency p / 2, which is its own.
    mirrored = torch.where(2 * k == p, 0, 1)
    power = waves[k, k, -k].abs() ** 2 * (1 + mirrored) / (waves[joint].abs() ** 2).sum()
    # Strongest first: few of p // 2 frequencies are used.
    order = power.argsort(descending=True)
    frequencies = tuple(int(i) + 1 for i in order if power[i] >= least)
    # With its mirror image a wave of real logits is real.
    selected = torch.zeros_like(joint)
    for f in frequencies:
        selected[f, f, -f] = selected[-f, -f, f] = True
    return FourierReading(
        power,
        frequencies,
        _accuracy(waves, torch.ones_like(selected)),
        _accuracy(waves, selected),
        _accuracy(waves, ~selected),
        _unit_share(first, p),
    )


def _unit_share(tensor: BilinearTensor, p: int) -> float:
    # Both numbers of a pair have weights of their own.
    factors = torch.cat([tensor.left, tensor.right]).double().cpu()
    parts = torch.fft.rfft(torch.stack([factors[:, :p], factors[:, p : 2 * p]]))[..., 1:].abs() ** 2
    return float(parts.amax(-1).sum() / parts.sum())


def _accuracy(waves: Complex128[Tensor, "p p p"], mask: Bool[Tensor, "p p p"]) -> float:
    """Return the share of pairs whose largest logit is that of their sum, from masked waves."""
    p = len(waves)
    # The inverse has an imaginary part of rounding only.
    logits = torch.fft.ifftn(waves * mask).real
    sums = torch.arange(p)[:, None] + torch.arange(p)
    return float((logits.argmax(-1) == sums % p).double().mean())
