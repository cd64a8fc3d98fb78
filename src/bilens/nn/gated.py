"""Gates, the gated layer, and its special case that is exactly a tensor."""

from collections.abc import Callable
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional

from bilens.checks import checked
from bilens.errors import BilensError, NotBilinearError
from bilens.settings import Size
from bilens.tensor import BilinearTensor

__all__ = ["ACTIVATIONS", "Bilinear", "Gate", "GateName", "GatedLayer"]

GateName = Literal["identity", "relu", "gelu", "silu", "swish"]
"""Gates by their names; see `Gate`."""
ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "identity": lambda z: z,
    "relu": functional.relu,
    "relu2": lambda z: functional.relu(z).square(),
    "gelu": functional.gelu,
    "silu": functional.silu,
}
"""What gates and MLPs without a gate apply, elementwise."""


class Gate(nn.Module):
    """sigma of a gated layer (L x) * sigma(R x).

    `swish` is Swish_beta(z) = z sigmoid(beta z): SiLU at beta = 1, nearly GELU at 1.702, and the
    straight line z / 2 at beta = 0, so lowering beta anneals a gated layer into a bilinear one.

    Args:
        name: identity, relu, gelu, silu or swish.
        beta: of swish; the other gates have none.

    Source: Pearce et al. 2024, section 3.1.
    """

    @checked
    def __init__(self, name: GateName = "identity", beta: float = 1.0) -> None:
        super().__init__()
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
        if self.name == "swish":
            return z * torch.sigmoid(self.beta * z)
        return ACTIVATIONS[self.name](z)

    def extra_repr(self) -> str:
        """Name the gate in the module's printout."""
        return f"{self.name}, beta={self.beta}" if self.name == "swish" else self.name


class GatedLayer(nn.Module):
    """g(x) = D((L x + b_L) * sigma(R x + b_R)) + b_D, plus x where there is a residual.

    Args:
        d_in: width of the input.
        d_out: width of the output.
        d_hidden: number of hidden units, D projecting them to the output; None leaves D out, and
            the hidden units are the output.
        gate: sigma.
        beta: of the swish gate.
        bias: whether L, R and D have biases.
        out_bias: whether D has one; None for bias.
        residual: whether the input is added to the output.

    Raises:
        BilensError: a residual between different widths, or an unknown gate.

    Source: Pearce et al. 2024, equation 1; Shazeer 2020. Their W, V are L, R here.
    """

    @checked
    def __init__(
        self,
        d_in: Size,
        d_out: Size,
        d_hidden: Size | None = None,
        *,
        gate: GateName = "identity",
        beta: float = 1.0,
        bias: bool = False,
        out_bias: bool | None = None,
        residual: bool = False,
    ) -> None:
        super().__init__()
        if residual and d_in != d_out:
            raise BilensError(
                f"residual=True needs d_in and d_out to be equal; they are {d_in} and {d_out}"
            )
        self.left = nn.Linear(d_in, d_hidden or d_out, bias=bias)
        self.right = nn.Linear(d_in, d_hidden or d_out, bias=bias)
        self.gate = Gate(gate, beta)
        out_bias = bias if out_bias is None else out_bias
        self.out = nn.Linear(d_hidden, d_out, bias=out_bias) if d_hidden else None
        self.residual = residual

    def forward(self, x: Float[Tensor, "*batch d_in"]) -> Float[Tensor, "*batch d_out"]:
        """Apply the layer to rows of x."""
        y: Tensor = self.left(x) * self.gate(self.right(x))
        if self.out is not None:
            y = self.out(y)
        return x + y if self.residual else y

    @property
    def W_L(self) -> Float[Tensor, "hidden d_in"]:
        """What the factor without the gate reads with, L."""
        return self.left.weight

    @property
    def W_R(self) -> Float[Tensor, "hidden d_in"]:
        """What the gate reads with, R."""
        return self.right.weight

    @property
    def W_D(self) -> Float[Tensor, "d_out hidden"]:
        """What the hidden units write with, D; the identity where there is no projection."""
        if self.out is not None:
            return self.out.weight
        left = self.left.weight
        return torch.eye(left.shape[0], dtype=left.dtype, device=left.device)

    def tensor(self, name: str = "this layer") -> BilinearTensor:
        """The layer as a tensor, biases and residual folded in; exact, and sharing its memory.

        Raises:
            NotBilinearError: the gate is not a straight line; calls the layer by `name`.

        Source: Pearce et al. 2024, section 3.4.
        """
        if self.gate.slope is None:
            raise NotBilinearError(
                f"{name} has the gate {self.gate.extra_repr()}, which is not linear, so the layer "
                "is not a tensor. Annealing it makes it bilinear: train with gate='swish' while "
                "beta goes to 0, where Swish is z/2."
            )
        tensor = BilinearTensor(self.W_L, self.gate.slope * self.W_R, self.W_D)
        left, right = self.left.bias, self.right.bias
        out = None if self.out is None else self.out.bias
        if not (left is None and right is None and out is None):
            gated = None if right is None else self.gate.slope * right
            tensor = tensor.with_bias(left, gated, out)
        return tensor.with_residual() if self.residual else tensor


class Bilinear(GatedLayer):
    """g(x) = D((L x + b_L) * (R x + b_R)) + b_D: the `GatedLayer` whose gate does nothing.

    Source: Pearce et al. 2024, section 3.2.
    """

    @checked
    def __init__(
        self,
        d_in: Size,
        d_out: Size,
        d_hidden: Size | None = None,
        *,
        bias: bool = False,
        residual: bool = False,
    ) -> None:
        super().__init__(d_in, d_out, d_hidden, bias=bias, residual=residual)
