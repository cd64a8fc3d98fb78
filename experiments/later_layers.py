"""Runs of the later layers of a model only, on a stream that was computed before."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from bilens.residual import ResidualModel


def modules(model: ResidualModel) -> list[nn.Module]:
    """Return the modules of the layers, to be looked up before any hook is there."""
    return [model.layer(layer).module for layer in range(model.n_layers)]


@torch.no_grad()
def stream_before(model: ResidualModel, layer: int, ids: Tensor) -> Tensor:
    """Return the stream before a layer, (texts, time, d_model)."""
    layers, streams = modules(model), []
    hook = layers[layer].register_forward_pre_hook(lambda _, args: streams.append(args[0]))
    # Layers from there on add nothing to the answer.
    with hook, _skipped(layers[layer:]):
        model.model(ids, use_cache=False, logits_to_keep=1)
    stream: Tensor = streams[0]
    return stream


@contextmanager
def starting_at(model: ResidualModel, layer: int, stream: Tensor) -> Iterator[None]:
    """Let the model run from a layer on, with this stream before it."""
    layers = modules(model)
    hook = layers[layer].register_forward_pre_hook(lambda _, args: (stream, *args[1:]))
    with hook, _skipped(layers[:layer]):
        yield


@contextmanager
def _skipped(layers: Sequence[nn.Module]) -> Iterator[None]:
    """Let layers return their input."""
    forwards = [module.forward for module in layers]
    for module in layers:
        module.forward = lambda x, *_, **__: x
    try:
        yield
    finally:
        for module, forward in zip(layers, forwards, strict=True):
            module.forward = forward
