"""The places of a model at which a flow is cut: embedding, layers, mixed values and MLPs."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from jaxtyping import Int
from torch import Tensor, nn

from bilens.residual import ResidualModel
from bilens.residual.running import run, wide_passes


@dataclass(frozen=True, eq=False)
class LayerPlaces:
    """The modules of a layer.

    Attributes:
        module: the layer, whose first input is the stream.
        heads: the module whose input are the mixed values of all heads, side by side.
        mlp: the MLP, before a norm after it; None without one.
    """

    module: nn.Module
    heads: nn.Module | None
    mlp: nn.Module | None


@dataclass(frozen=True, eq=False)
class Places:
    """The modules of a model at which its graph is cut.

    Attributes:
        embed: the embedding of tokens.
        layers: each layer.
        last: the module whose input is the stream after the last layer.
        forward: a function that runs the model on texts.
        n_heads: heads side by side in mixed values.
    """

    embed: nn.Module
    layers: tuple[LayerPlaces, ...]
    last: nn.Module
    forward: Callable[[Int[Tensor, "texts time"]], Any]
    n_heads: int


def places_of(model: ResidualModel) -> Places:
    """Return the places of a model whose parts are known."""
    layers = []
    for layer in model.parts.layers:
        layers.append(LayerPlaces(layer.module, layer.heads.out.module, layer.mlp.module))

    def forward(ids: Tensor) -> None:
        with wide_passes(model.model):
            run(model.model, ids)

    last = model.parts.norm_or_module
    return Places(model.parts.embed.module, tuple(layers), last, forward, model.n_heads)
