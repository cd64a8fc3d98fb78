"""The gated MLPs of a language model, recognised by what they compute."""

from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from bilens.convert.anatomy import Map
from bilens.errors import BilensError
from bilens.nn import GatedLayer

__all__ = ["GatedMLP", "gated_mlps"]


@dataclass(frozen=True, eq=False)
class GatedMLP:
    """x -> W_down (up(x) * sigma(gate(x))), with up and gate in maps of their own or in one.

    Attributes:
        name: of the module in the model.
        module: it.
        activation: name of the module's attribute that is sigma.
        gate: the map that holds the gate.
        up: the map that holds the other factor; the same where they are fused.
        down: the map back to the stream.
        gate_rows: which outputs of its map the gate is.
        up_rows: which outputs of its map the other factor is.
    """

    name: str
    module: nn.Module
    activation: str
    gate: Map
    up: Map
    down: Map
    gate_rows: slice
    up_rows: slice

    def sigma(self) -> Any:
        """The function on the gate."""
        return getattr(self.module, self.activation)

    def scale_gate(self, factor: float) -> None:
        """Multiply the gate's weights, and its biases where it has some, by a factor."""
        weight, bias = self.gate.weight().clone(), self.gate.bias()
        weight[self.gate_rows] *= factor
        self.gate.set_weight(weight)
        if bias is not None:
            bias = bias.clone()
            bias[self.gate_rows] *= factor
            self.gate.set_bias(bias)

    def computes(self, x: Float[Tensor, "rows d_model"]) -> Float[Tensor, "rows d_model"]:
        """What such an MLP makes of x, out of its parts."""
        gate = self.gate.module(x)[..., self.gate_rows]
        hidden = self.up.module(x)[..., self.up_rows] * self.sigma()(gate)
        y: Tensor = self.down.module(hidden)
        return y


def gated_mlps(model: Any) -> list[GatedMLP]:
    """The gated MLP of every layer.

    Raises:
        BilensError: a layer has none, or several, or one that computes something else.
    """
    found = [mlp for name, module in model.named_modules() if (mlp := _read(name, module))]
    layers = model.config.num_hidden_layers
    if len(found) != layers:
        raise BilensError(
            f"{type(model).__name__} has {layers} layers and {len(found)} gated MLPs; expected one "
            "in each, up(x) * activation(gate(x)), as in Llama, Mistral, Qwen, Gemma or Phi-3"
        )
    for mlp in found:
        _check(mlp)
    return found


def _read(name: str, module: Any) -> GatedMLP | None:
    has = module._modules.keys()
    every = slice(None)

    def part(attribute: str) -> Map:
        return Map(f"{name}.{attribute}", getattr(module, attribute))

    if isinstance(module, GatedLayer):
        return GatedMLP(
            name, module, "gate", part("right"), part("left"), part("out"), every, every
        )
    if {"gate_proj", "up_proj", "down_proj", "act_fn"} <= has:
        maps = part("gate_proj"), part("up_proj"), part("down_proj")
        return GatedMLP(name, module, "act_fn", *maps, every, every)
    if {"gate_up_proj", "down_proj", "activation_fn"} <= has:
        both, half = part("gate_up_proj"), module.gate_up_proj.out_features // 2
        rows = slice(None, half), slice(half, None)
        return GatedMLP(name, module, "activation_fn", both, both, part("down_proj"), *rows)
    return None


@torch.no_grad()
def _check(mlp: GatedMLP) -> None:
    weight: Any = mlp.gate.module.weight
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(4, weight.shape[1], generator=generator).to(weight)
    rounding = 100 * torch.finfo(weight.dtype).eps
    whole, parts = mlp.module(x), mlp.computes(x)
    if not torch.allclose(whole, parts, rtol=rounding, atol=rounding, equal_nan=True):
        raise BilensError(
            f"{mlp.name} has the parts of a gated MLP but computes something else than "
            "down(up(x) * activation(gate(x))), so it cannot be made bilinear"
        )
