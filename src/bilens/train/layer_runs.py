"""A model run one layer at a time over many texts, so that layers may change in between."""

from contextlib import ExitStack, suppress
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor
from transformers import PreTrainedModel

from bilens.residual.attention import StopForwardError
from bilens.residual.layers import MLP

__all__ = ["BATCH", "LayerRuns"]

BATCH = 8
"""Texts that run at once."""


class LayerRuns:
    """Texts on their way through a model, layer by layer.

    What a layer is handed beside the stream (positions, masks) depends on how many texts run at
    once and not on which, so it is caught once for each such number. The parents of `mlps` are the
    layers.
    """

    def __init__(
        self, model: PreTrainedModel, mlps: list[MLP], texts: Int[Tensor, "texts time"]
    ) -> None:
        names = [mlp.name.rpartition(".")[0] for mlp in mlps]
        self._layers: list[Any] = [model.get_submodule(name) for name in names]
        self._mlps = mlps
        self._beside: dict[int, list[tuple[Any, Any]]] = {}
        self._streams = [self._enter(model, some) for some in texts.split(BATCH)]

    @torch.no_grad()
    def run(
        self, layer: int
    ) -> tuple[
        Float[Tensor, "rows d_in"], Float[Tensor, "rows d_out"], Float[Tensor, "rows d_model"]
    ]:
        """What the MLP of a layer reads and gives, and the stream in front of the layer.

        The texts stay in front of the layer; see `go_on`.
        """
        seen: list[tuple[Tensor, Tensor]] = []
        with self._mlps[layer].module.register_forward_hook(
            lambda module, given, made: seen.append((given[0], made))
        ):
            self._next = [self._apply(layer, stream) for stream in self._streams]
        reads, writes = (
            torch.cat([part.flatten(0, 1) for part in parts]) for parts in zip(*seen, strict=True)
        )
        return reads, writes, torch.cat([stream.flatten(0, 1) for stream in self._streams])

    @torch.no_grad()
    def go_on(self, layer: int, *, changed: bool) -> None:
        """Take the texts behind a layer, which runs once more where it has changed."""
        if changed:
            self._next = [self._apply(layer, stream) for stream in self._streams]
        self._streams = self._next

    def _apply(self, layer: int, stream: Tensor) -> Tensor:
        given, named = self._beside[len(stream)][layer]
        made = self._layers[layer](stream, *given, **named)
        return made[0] if isinstance(made, tuple) else made

    @torch.no_grad()
    def _enter(self, model: PreTrainedModel, texts: Int[Tensor, "texts time"]) -> Tensor:
        """The stream in front of the first layer; catches what goes beside it where that is new."""
        entered: list[Tensor] = []
        beside: list[tuple[Any, Any]] = []
        new = len(texts) not in self._beside

        def catch(module: Any, given: tuple[Any, ...], named: dict[str, Any]) -> None:
            if not entered:
                entered.append(given[0])
            if not new:
                raise StopForwardError
            beside.append((given[1:], named))

        with ExitStack() as stack:
            for layer in self._layers:
                stack.enter_context(layer.register_forward_pre_hook(catch, with_kwargs=True))
            stack.enter_context(suppress(StopForwardError))
            model.base_model(texts, use_cache=False)
        if new:
            self._beside[len(texts)] = beside
        return entered[0]
