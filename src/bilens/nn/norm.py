"""Normalisation, or none."""

from typing import Literal

import torch
from torch import Tensor, nn

from bilens.checks import checked

NormName = Literal["none", "scalar", "rms", "layer"]
"""Norms by name; a model is a polynomial of its input only with none or scalar."""

AttentionNorm = Literal["none", "sum", "rms"]
"""Norms of attention without softmax: none, sum (rows of the pattern over their sum), or rms (the
output over its root mean square)."""


class ScalarNorm(nn.Module):
    """x / s: in training s^2 is the mean square of the batch, and then a running mean of those.

    One number for all samples and coordinates, and a constant once the model is trained, so that a
    polynomial stays one.

    Args:
        eps: number that is added to the mean square; None for 1e-6.

    Source: Chi-nets divide by a running root mean square, without a gradient.
    """

    def __init__(self, eps: float | None = None) -> None:
        super().__init__()
        self.eps = 1e-6 if eps is None else eps
        self.register_buffer("mean_square", torch.empty(1))
        self.register_buffer("weight", torch.empty(1))
        self.mean_square: Tensor
        self.weight: Tensor
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Reset the running mean."""
        self.mean_square.zero_()
        self.weight.zero_()

    @property
    def scale(self) -> Tensor:
        """1 / s of a trained model, or 1 before any training; (1,)."""
        seen = self.weight > 0
        mean = self.mean_square / torch.where(seen, self.weight, 1.0)
        return torch.where(seen, (mean + self.eps).rsqrt(), 1.0)

    def forward(self, x: Tensor) -> Tensor:
        """Divide by the scale."""
        if not self.training:
            return x * self.scale.to(x.dtype)
        now = x.to(torch.promote_types(x.dtype, torch.float32)).square().mean()
        with torch.no_grad():
            # As in Adam, division by the weight makes the mean right from the first step on.
            self.mean_square.mul_(1 - MOMENTUM).add_(MOMENTUM * now)
            self.weight.mul_(1 - MOMENTUM).add_(MOMENTUM)
        return x * (now + self.eps).rsqrt().to(x.dtype)


MOMENTUM = 0.02


@checked
def make_norm(name: NormName, width: int, eps: float | None = None) -> nn.Module:
    """Return a norm by name: none, scalar (`ScalarNorm`), rms (with a gain), layer (gain and bias).

    `eps` is added to the mean square; None for torch's value.
    """
    match name:
        case "none":
            return nn.Identity()
        case "scalar":
            return ScalarNorm(eps)
        case "rms":
            return nn.RMSNorm(width, eps)
        case "layer":
            return nn.LayerNorm(width) if eps is None else nn.LayerNorm(width, eps)
