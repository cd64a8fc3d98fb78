"""The places of a model at which a flow is cut: embedding, layers, mixed values and MLPs."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from inspect import signature
from typing import Any

from jaxtyping import Float, Int
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
        model: the model itself.
        embed: the embedding of tokens.
        layers: each layer.
        last: the module whose input is the stream after the last layer.
        forward: a function that runs the model on texts, and returns the last logits.
        context: a function that returns the context in which its modules run.
        n_heads: heads side by side in mixed values.
    """

    model: nn.Module
    embed: nn.Module
    layers: tuple[LayerPlaces, ...]
    last: nn.Module
    forward: Callable[[Int[Tensor, "texts time"]], Float[Tensor, "texts vocab"]]
    context: Callable[[], AbstractContextManager[Any]]
    n_heads: int


def places_of(model: ResidualModel) -> Places:
    """Return the places of a model whose parts are known."""
    layers = []
    for layer in model.parts.layers:
        layers.append(LayerPlaces(layer.module, layer.heads.out.module, layer.mlp.module))

    options = {}
    if "logits_to_keep" in signature(model.model.forward).parameters:
        options["logits_to_keep"] = 1

    def forward(ids: Tensor) -> Tensor:
        output = run(model.model, ids, **options)
        return getattr(output, "logits", output)[:, -1]

    return Places(
        model=model.model,
        embed=model.parts.embed.module,
        layers=tuple(layers),
        last=model.parts.norm_or_module,
        forward=forward,
        context=partial(wide_passes, model.model),
        n_heads=model.n_heads,
    )
