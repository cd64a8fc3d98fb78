"""The gated MLPs of a language model of any family, recognised by what they compute."""

from dataclasses import replace
from typing import Any

import torch

from bilens.errors import BilensError
from bilens.nn import GatedLayer
from bilens.residual.layers import MLP
from bilens.residual.parts import LinearMap

__all__ = ["gated_mlps"]


def gated_mlps(model: Any) -> list[MLP]:
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
        mlp.check()
    return found


def _read(name: str, module: Any) -> MLP | None:
    has = module._modules.keys()

    def part(attribute: str) -> LinearMap:
        return LinearMap(f"{name}.{attribute}", getattr(module, attribute))

    if isinstance(module, GatedLayer):
        return MLP(name, module, part("left"), part("right"), part("out"), "gate")
    if {"gate_proj", "up_proj", "down_proj", "act_fn"} <= has:
        maps = part("up_proj"), part("gate_proj"), part("down_proj")
        return MLP(name, module, *maps, "act_fn")
    if {"gate_up_proj", "down_proj", "activation_fn"} <= has:
        both = part("gate_up_proj")
        gate, up = (replace(both, rows=rows) for rows in torch.arange(both.n_out).chunk(2))
        return MLP(name, module, up, gate, part("down_proj"), "activation_fn")
    return None
