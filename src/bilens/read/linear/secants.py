"""Exact linear maps between two runs of a model, one for each kind of operation.

Let 1 and 0 be the runs, D the difference of a quantity between them and a bar its mean. The secant
of an operation f is a linear map J with J D x = D f(x). It holds without an error term, since it
depends on both runs. A product has D(ab) = b_mean Da + a_mean Db, and other operations follow.

Source:
    Shrikumar et al. 2017, "Learning important features through propagating activation
    differences" (the rescale rule); Ang 2004, "Decomposition analysis for policymaking in energy"
    (logarithmic means).
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from bilens.residual.parts import ConstantNorm, LinearMap, Norm


@dataclass(frozen=True, eq=False)
class NormMap:
    """A norm as a linear map at each position: v -> scale c + slope (middle . c) middle.

    c is v, without its mean if the norm centres.
    """

    # Factor of c; the mean of both runs' scales, or the scale of the one run.
    scale: Float[Tensor, "*batch"]
    centres: bool = False  # whether the norm subtracts the mean
    # Mean of the norm's centred inputs in both runs; None if the scale is frozen.
    middle: Float[Tensor, "*batch d"] | None = None
    # Change of the scale for each unit of middle . c; None if the scale is frozen.
    slope: Float[Tensor, "*batch"] | None = None

    def __getitem__(self, at: int | slice | Tensor | tuple[Tensor | slice, ...]) -> "NormMap":
        """Return the maps at some of the positions."""
        if self.middle is None or self.slope is None:
            return NormMap(self.scale[at], self.centres)
        return NormMap(self.scale[at], self.centres, self.middle[at], self.slope[at])

    def push(self, v: Float[Tensor, "*batch d"]) -> Float[Tensor, "*batch d"]:
        """Return the change of the normalised output, given the change of the input."""
        c = self.centred(v)
        return self.scale[..., None] * c + self._along_middle(c)

    def pull(self, w: Float[Tensor, "*batch d"]) -> Float[Tensor, "*batch d"]:
        """Return the direction of the input that a direction of the output reads: the adjoint."""
        # Centring is symmetric and comes last here, since `push` does it first.
        return self.centred(self.scale[..., None] * w + self._along_middle(w))

    def _along_middle(self, v: Tensor) -> Tensor | float:
        if self.middle is None or self.slope is None:
            return 0.0
        along = (self.middle * v).sum(-1, keepdim=True)
        return self.slope[..., None] * along * self.middle

    def centred(self, v: Float[Tensor, "*batch d"]) -> Float[Tensor, "*batch d"]:
        """Return v, without its mean if the norm subtracts it."""
        return v - v.mean(-1, keepdim=True) if self.centres else v


def frozen_norm(norm: Norm | None, scale: Float[Tensor, "*batch"]) -> NormMap:
    """Return a norm with its scale held fixed; the identity without a norm."""
    return NormMap(scale, norm is not None and norm.centres)


def norm_secant(
    norm: Norm | None, x1: Float[Tensor, "*batch d"], x0: Float[Tensor, "*batch d"]
) -> NormMap:
    """Return the secant of a norm between two inputs; the identity without a norm."""
    if norm is None or isinstance(norm, ConstantNorm):
        return NormMap(torch.ones_like(x1[..., 0]))
    return mean_square_secant(norm.centred(x1), norm.centred(x0), norm.eps, centres=norm.centres)


def mean_square_secant(
    c1: Float[Tensor, "*batch d"],
    c0: Float[Tensor, "*batch d"],
    eps: float,
    *,
    centres: bool = False,
) -> NormMap:
    """Return the secant of c / sqrt(mean(c^2) + eps) between two vectors.

    With r = mean(c^2) + eps and s = r^(-1/2), D(s c) = s_mean Dc + c_mean Ds, where
    Ds = -Dr / (sqrt(r1 r0) (sqrt r1 + sqrt r0)) and Dr = 2/d c_mean . Dc.
    """
    # The slope has no difference in it: Ds is written by a sum of roots, so nothing cancels.
    root1, root0 = ((c.square().mean(-1) + eps).sqrt() for c in (c1, c0))
    slope = -2 / c1.shape[-1] / (root1 * root0 * (root1 + root0))
    return NormMap((1 / root1 + 1 / root0) / 2, centres, (c1 + c0) / 2, slope)


@dataclass(frozen=True, eq=False)
class OutputMap:
    """The linear map from hidden numbers to the stream: W, the norm after it, and its gain."""

    weight: Float[Tensor, "d_model hidden"]  # W
    norm: NormMap  # between W and the stream; the identity without one
    gain: Float[Tensor, " #d_model"]  # of the norm, times the factor of all writes
    # The part of the biases that is written at each position. Between two texts it is the change by
    # the router of experts, or 0.
    bias: Float[Tensor, "time d_model"]

    @classmethod
    def frozen(
        cls, part: LinearMap, norm: Norm | None, scale: Float[Tensor, " time"], factor: float
    ) -> "OutputMap":
        """Return the map on one text, its norm's scale held fixed."""
        weight, bias, fixed = part.weight(), part.bias(), frozen_norm(norm, scale)
        gain = _gain(norm, weight, factor)
        written = weight.new_zeros(len(scale), len(weight))
        if bias is not None:
            written = gain * fixed.push(written + bias)
        return cls(weight, fixed, gain, written)

    @classmethod
    def between(
        cls,
        part: LinearMap,
        norm: Norm | None,
        hidden: tuple[Float[Tensor, "time hidden"], Float[Tensor, "time hidden"]],
        factor: float,
        routed: Float[Tensor, "time hidden"] | None = None,
    ) -> "OutputMap":
        """Return the secant between two texts, given the hidden numbers of both.

        `routed` is a change of the hidden numbers that is written like a bias.
        """
        weight, bias = part.weight(), part.bias()
        secant = NormMap(torch.ones_like(hidden[0][:, 0]))
        if norm is not None:
            # A bias cancels in a difference, but the norm after it depends on it.
            outputs = [h @ weight.T + (0 if bias is None else bias) for h in hidden]
            secant = norm_secant(norm, outputs[0], outputs[1])
        gain, written = _gain(norm, weight, factor), weight.new_zeros(len(hidden[0]), len(weight))
        if routed is not None:
            written = gain * secant.push(routed @ weight.T)
        return cls(weight, secant, gain, written)

    def pull(
        self, w: Float[Tensor, "m d_model"], at: Int[Tensor, " m"] | slice = slice(None)
    ) -> Float[Tensor, "m d_model"]:
        """Return directions of W's output that directions of the stream read at some positions."""
        return self.norm[at].pull(w * self.gain)

    def push(
        self, rows: Float[Tensor, "m d_model"], at: Int[Tensor, " m"] | slice
    ) -> Float[Tensor, "m d_model"]:
        """Return the writes to the stream of outputs of W at some positions."""
        return self.norm[at].push(rows) * self.gain


def _gain(norm: Norm | None, like: Tensor, factor: float) -> Tensor:
    return factor * (like.new_ones(1) if norm is None else norm.gain())


def secant_slope(
    function: Callable[[Tensor], Tensor], x1: Float[Tensor, "*n"], x0: Float[Tensor, "*n"]
) -> Float[Tensor, "*n"]:
    """Return [f(x1) - f(x0)] / (x1 - x0), and the slope at the mean if the change is noise."""
    y1, y0, change = function(x1), function(x0), x1 - x0
    # A change below 1,000 units of rounding counts as none, as its quotient would be noise.
    size = torch.stack([x1.abs(), x0.abs(), y1.abs(), y0.abs()]).amax(0)
    tiny = change.abs() <= 1e3 * torch.finfo(x1.dtype).eps * size
    with torch.enable_grad():
        middle = ((x1 + x0) / 2).detach().requires_grad_()
        (slope,) = torch.autograd.grad(function(middle).sum(), middle)
    return torch.where(tiny, slope, (y1 - y0) / torch.where(tiny, torch.ones_like(change), change))


def logarithmic_mean(log1: Float[Tensor, "*n"], log0: Float[Tensor, "*n"]) -> Float[Tensor, "*n"]:
    """Return (a1 - a0) / (log a1 - log a0), given the logarithms; a1 if they are equal."""
    gap = (log1 - log0).abs()
    # (1 - exp(-gap)) / gap has no cancellation however small the gap is.
    ratio = torch.where(gap > 0, -torch.expm1(-gap) / gap, torch.ones_like(gap))
    return torch.maximum(log1, log0).exp() * ratio


def softmax_secant(
    scores1: Float[Tensor, "*batch n"],
    scores0: Float[Tensor, "*batch n"],
    seen: Bool[Tensor, "*#batch n"],
    sink: Float[Tensor, "*#batch"] | None = None,
) -> tuple[list[Float[Tensor, "*batch n"]], Float[Tensor, "*batch n"], Float[Tensor, "*batch"]]:
    """Return two softmaxes, the logarithmic means of their entries, and their sum with a sink's.

    With L the logarithmic means, DA = L (Dz - sum L Dz / sum L), as log A = z - log sum exp z. A
    sink is a constant score in the denominator; it takes part in sum L and has Dz = 0.
    """
    logs, totals = [], []
    for scores in (scores1, scores0):
        # Logarithms of softmax entries come from scores, since the entries themselves underflow.
        total = scores.masked_fill(~seen, -torch.inf).logsumexp(-1, keepdim=True)
        if sink is not None:
            total = torch.logaddexp(total, sink[..., None].to(total))
        logs.append(scores - total)
        totals.append(total)
    means = logarithmic_mean(logs[0], logs[1]).masked_fill(~seen, 0)
    total = means.sum(-1)
    if sink is not None:
        log_sinks = [sink[..., None].to(t) - t for t in totals]
        total = total + logarithmic_mean(*log_sinks)[..., 0]
    return [log.exp().masked_fill(~seen, 0) for log in logs], means, total
