"""Layers of a model by name: gates, gated layers and their tensors, plain MLPs, and norms."""

from collections.abc import Callable

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional

from bilens.checks import checked
from bilens.errors import BilensError, NotBilinearError
from bilens.nn.settings import GateName, MlpName, NormName
from bilens.settings import Size
from bilens.tensor import BilinearTensor

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "identity": lambda z: z,
    "sigmoid": torch.sigmoid,
    "relu": functional.relu,
    "relu2": lambda z: functional.relu(z).square(),
    "gelu": functional.gelu,
    "silu": functional.silu,
}
"""Elementwise activations of gates, and of MLPs without a gate."""


class Gate(nn.Module):
    """sigma of a gated layer (L x) * sigma(R x).

    `swish` is Swish_beta(z) = z sigmoid(beta z): SiLU at beta = 1, nearly GELU at 1.702, and the
    straight line z / 2 at beta = 0. Lowering beta anneals a gated layer into a bilinear one.

    Args:
        name: identity, sigmoid, relu, gelu, silu or swish.
        beta: beta of swish; the other gates have none.

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
        if self.name == "swish":
            return z * torch.sigmoid(self.beta * z)
        return ACTIVATIONS[self.name](z)

    def extra_repr(self) -> str:
        return f"{self.name}, beta={self.beta}" if self.name == "swish" else self.name


class GatedLayer(nn.Module):
    """g(x) = D((L x + b_L) * sigma(R x + b_R)) + b_D, plus x with a residual.

    Args:
        d_in: width of the input.
        d_out: width of the output.
        d_hidden: number of hidden units, which D projects to the output. With None there is no D,
            and the hidden units are the output.
        gate: sigma.
        beta: beta of the swish gate.
        bias: add biases to L, R and D.
        out_bias: add a bias to D; None for the value of bias.
        residual: add the input to the output.

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
        y: Tensor = self.left(x) * self.gate(self.right(x))
        if self.out is not None:
            y = self.out(y)
        return x + y if self.residual else y

    @property
    def W_L(self) -> Float[Tensor, "hidden d_in"]:
        """Weights L of the factor without the gate."""
        return self.left.weight

    @property
    def W_R(self) -> Float[Tensor, "hidden d_in"]:
        """Weights R of the gate."""
        return self.right.weight

    @property
    def W_D(self) -> Float[Tensor, "d_out hidden"]:
        """Output weights D of the hidden units; the identity without a projection."""
        if self.out is not None:
            return self.out.weight
        left = self.left.weight
        return torch.eye(left.shape[0], dtype=left.dtype, device=left.device)

    def tensor(self, name: str = "this layer") -> BilinearTensor:
        """Return the layer as a tensor that shares its memory, biases and residual folded in.

        Raises:
            NotBilinearError: the gate is not a straight line; the message has `name`.

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
            right_bias = None if right is None else self.gate.slope * right
            tensor = tensor.with_bias(left, right_bias, out)
        return tensor.with_residual() if self.residual else tensor


class Bilinear(GatedLayer):
    """g(x) = D((L x + b_L) * (R x + b_R)) + b_D: the `GatedLayer` with the identity as gate.

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


GATES: dict[str, GateName] = {
    "bilinear": "identity",
    "glu": "sigmoid",
    "swiglu": "silu",
    "geglu": "gelu",
    "reglu": "relu",
}
"""Gates of the MLPs that have one, by the names of the MLPs."""


class PlainMLP(nn.Module):
    """g(x) = D sigma(W x + b) + b_D, for comparison: no product, so no tensor.

    `activation` is sigma: relu, relu2 (its square) or gelu. `bias` adds biases to both maps;
    `out_bias` overrides it for D.
    """

    @checked
    def __init__(
        self,
        d_model: Size,
        d_hidden: Size,
        activation: MlpName,
        *,
        bias: bool,
        out_bias: bool | None = None,
    ) -> None:
        super().__init__()
        self.inner = nn.Linear(d_model, d_hidden, bias=bias)
        self.out = nn.Linear(d_hidden, d_model, bias=bias if out_bias is None else out_bias)
        self.activation = activation

    def forward(self, x: Float[Tensor, "*batch d_model"]) -> Float[Tensor, "*batch d_model"]:
        return self.out(self.activate(self.inner(x)))

    def activate(self, z: Float[Tensor, "*batch hidden"]) -> Float[Tensor, "*batch hidden"]:
        """Return sigma(z)."""
        return ACTIVATIONS[self.activation](z)

    def tensor(self, name: str = "this layer") -> BilinearTensor:
        """Raise NotBilinearError: an MLP without a gate is no tensor."""
        raise NotBilinearError(
            f"{name} is an MLP with {self.activation} and no gate, which is not a tensor; train "
            "with mlp='bilinear', or anneal a gated one."
        )


@checked
def make_mlp(
    name: MlpName, d_model: int, d_hidden: int, *, bias: bool, out_bias: bool | None = None
) -> GatedLayer | PlainMLP:
    """Return an MLP by its name; see `GatedLayer` and `PlainMLP`.

    Source: Shazeer 2020 for the gated ones.
    """
    if name in GATES:
        return GatedLayer(
            d_model, d_model, d_hidden, gate=GATES[name], bias=bias, out_bias=out_bias
        )
    return PlainMLP(d_model, d_hidden, name, bias=bias, out_bias=out_bias)


class ScalarNorm(nn.Module):
    """x / s: in training s^2 is the mean square of the batch, and then a running mean of those.

    One number for all samples and coordinates, and a constant once the model is trained, so that a
    polynomial stays one.

    Args:
        eps: number that is added to the mean square; None for 1e-6.

    Source: Chi-nets divide by a running root mean square, without a gradient.
    """

    momentum = 0.02

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
        is_positive = self.weight > 0
        mean = self.mean_square / torch.where(is_positive, self.weight, 1.0)
        return torch.where(is_positive, (mean + self.eps).rsqrt(), 1.0)

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            return x * self.scale.to(x.dtype)
        # Squares overflow float16, and sums of them lose digits in bfloat16.
        now = x.to(torch.promote_types(x.dtype, torch.float32)).square().mean()
        with torch.no_grad():
            # As in Adam, division by the weight makes the mean right from the first step on.
            self.mean_square.mul_(1 - self.momentum).add_(self.momentum * now)
            self.weight.mul_(1 - self.momentum).add_(self.momentum)
        return x * (now + self.eps).rsqrt().to(x.dtype)


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
            # RMSNorm takes None for its own eps, LayerNorm does not.
            return nn.LayerNorm(width) if eps is None else nn.LayerNorm(width, eps)
