"""Gaussian noise during training: on the input alone, or in front of every layer."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from jaxtyping import Float
from torch import Tensor, nn

from bilens.nn import ImageClassifier

__all__ = ["add_noise", "noisy"]


def add_noise(
    x: Float[Tensor, "*batch n"], scale: float, generator: torch.Generator
) -> Float[Tensor, "*batch n"]:
    """Add Gaussian noise of `scale` times the standard deviation of each vector's elements.

    Source:
        Pearce et al. 2024 (first version), appendix A.
    """
    noise = torch.randn(x.shape, dtype=x.dtype, device=x.device, generator=generator)
    size = scale * x.detach().std(dim=-1, keepdim=True)
    return torch.addcmul(x, noise, size)


@contextmanager
def noisy(
    model: ImageClassifier, input_noise: float, latent_noise: float, generator: torch.Generator
) -> Iterator[None]:
    """Inside the block the model meets noise whenever it is in training mode.

    Args:
        model: the classifier.
        input_noise: scale of the noise on the pixels.
        latent_noise: scale of the noise before the embedding, every layer and the unembedding.
        generator: where the noise comes from.
    """
    places = [(model.embed, input_noise)]
    places += [(part, latent_noise) for part in (model.embed, *model.layers, model.unembed)]

    def hook(scale: float):  # type: ignore[no-untyped-def]
        def before(module: nn.Module, inputs: tuple[Tensor]) -> tuple[Tensor] | None:
            return (add_noise(inputs[0], scale, generator),) if module.training else None

        return before

    handles = [part.register_forward_pre_hook(hook(scale)) for part, scale in places if scale]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
