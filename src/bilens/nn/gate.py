"""The functions that a gate may apply, and when one of them is a straight line."""

from typing import Literal, get_args

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional

from bilens.errors import BilensError

__all__ = ["GATES", "Gate", "GateName"]

GateName = Literal["identity", "relu", "gelu", "silu", "swish"]
"""Gates by their names; see `Gate`."""
GATES: tuple[str, ...] = get_args(GateName)
"""All of them."""


class Gate(torch.nn.Module):
    """sigma of a gated layer (L x) * sigma(R x).

    `swish` is Swish_beta(z) = z sigmoid(beta z): SiLU at beta = 1, nearly GELU at 1.702, and the
    straight line z / 2 at beta = 0, so lowering beta anneals a gated layer into a bilinear one.

    Args:
        name: identity, relu, gelu, silu or swish.
        beta: of swish; the other gates have none.

    Source:
        Pearce et al. 2024, section 3.1.
    """

    def __init__(self, name: GateName = "identity", beta: float = 1.0) -> None:
        super().__init__()
        if name not in GATES:
            raise BilensError(f"gate={name!r}, expected one of {', '.join(GATES)}")
        self.name = name
        self.beta = beta

    @property
    def slope(self) -> float | None:
        """The slope of a gate that is linear; None for one that is not."""
        if self.name == "identity":
            return 1.0
        return 0.5 if self.name == "swish" and self.beta == 0 else None

    def forward(self, z: Float[Tensor, "*batch rank"]) -> Float[Tensor, "*batch rank"]:
        """Apply the gate elementwise."""
        match self.name:
            case "identity":
                return z
            case "relu":
                return functional.relu(z)
            case "gelu":
                return functional.gelu(z)
            case "silu":
                return functional.silu(z)
            case _:
                return z * torch.sigmoid(self.beta * z)

    def extra_repr(self) -> str:
        """Name the gate in the module's printout."""
        return f"{self.name}, beta={self.beta}" if self.name == "swish" else self.name
