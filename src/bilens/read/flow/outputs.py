"""Outputs of heads and MLPs on their way to the stream, on one text or between two."""

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from bilens.read.flow.secants import NormMap, frozen_norm, norm_secant
from bilens.residual.parts import LinearMap, Norm


@dataclass(frozen=True, eq=False)
class OutputMap:
    """The linear map from hidden numbers to the stream: W, the norm after it, and its gain.

    Attributes:
        weight: W.
        norm: between W and the stream; the identity without one.
        gain: of the norm, times the factor of all writes.
        bias: the part of the biases that is written at each position. Between two texts it is the
            change by the router of experts, or 0.
    """

    weight: Float[Tensor, "d_model hidden"]
    norm: NormMap
    gain: Float[Tensor, " #d_model"]
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
        outputs = [h @ weight.T + (0 if bias is None else bias) for h in hidden]
        secant = norm_secant(norm, outputs[0], outputs[1])
        gain, written = _gain(norm, weight, factor), torch.zeros_like(outputs[0])
        if routed is not None:
            written = gain * secant.push(routed @ weight.T)
        return cls(weight, secant, gain, written)

    def pull(self, w: Float[Tensor, "time d_model"]) -> Float[Tensor, "time d_model"]:
        """Return directions of W's output that directions of the stream read."""
        return self.norm.pull(w * self.gain)

    def push(
        self, rows: Float[Tensor, "m d_model"], at: Int[Tensor, " m"]
    ) -> Float[Tensor, "m d_model"]:
        """Return the writes to the stream of outputs of W at some positions."""
        return self.norm[at].push(rows) * self.gain


def _gain(norm: Norm | None, like: Tensor, factor: float) -> Tensor:
    return factor * (like.new_ones(1) if norm is None else norm.gain())
