"""MLPs of a transformer by name: gated ones, one of them a tensor, and plain ones."""

from typing import Literal

from jaxtyping import Float
from torch import Tensor, nn

from bilens.checks import checked
from bilens.errors import NotBilinearError
from bilens.nn.gated import ACTIVATIONS, GatedLayer, GateName
from bilens.settings import Size
from bilens.tensor import BilinearTensor

MlpName = Literal["bilinear", "swiglu", "geglu", "reglu", "relu", "relu2", "gelu"]
"""MLPs of a transformer by their names; only bilinear is a tensor."""

MlpBias = Literal["none", "out", "all"]
"""Maps of an MLP that have biases: none, only the last (out), or all."""

_GATES: dict[str, GateName] = {
    "bilinear": "identity",
    "swiglu": "silu",
    "geglu": "gelu",
    "reglu": "relu",
}


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
        """Apply the layer to rows of x."""
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
    if name in _GATES:
        return GatedLayer(
            d_model, d_model, d_hidden, gate=_GATES[name], bias=bias, out_bias=out_bias
        )
    return PlainMLP(d_model, d_hidden, name, bias=bias, out_bias=out_bias)
