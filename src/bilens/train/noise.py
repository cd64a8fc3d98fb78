"""Gaussian noise in front of the parts of a classifier while it trains."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from jaxtyping import Float
from torch import Tensor, nn

from bilens.nn import ImageClassifier

__all__ = ["LatentNoise", "add_noise"]


def add_noise(
    x: Float[Tensor, "*batch n"], noise: Float[Tensor, "*batch n"], scale: float
) -> Float[Tensor, "*batch n"]:
    """Add standard noise times `scale` times the standard deviation of each vector's elements.

    Source:
        Pearce et al. 2024 (first version), appendix A.
    """
    return torch.addcmul(x, noise, scale * x.detach().std(dim=-1, keepdim=True))


class LatentNoise:
    """Noise in front of the embedding, every layer and the unembedding of a model.

    Args:
        model: the classifier; it meets noise inside `drawn` alone.
        scale: of the noise; see `add_noise`.
    """

    def __init__(self, model: ImageClassifier, scale: float) -> None:
        self.scale = scale
        parts: list[nn.Module] = [model.embed, *model.layers, model.unembed] if scale else []
        self.widths = [model.config.n_inputs, *[model.config.d_model] * len(parts)][: len(parts)]
        self._left: Iterator[Tensor] | None = None
        self._handles = [part.register_forward_pre_hook(self._before) for part in parts]

    def remove(self) -> None:
        """Leave the model as it was."""
        for handle in self._handles:
            handle.remove()

    @contextmanager
    def drawn(self, noise: Sequence[Tensor]) -> Iterator[None]:
        """Inside the block the parts meet this noise, one after another."""
        self._left = iter(noise)
        try:
            yield
        finally:
            self._left = None

    def _before(self, module: nn.Module, inputs: tuple[Tensor]) -> tuple[Tensor] | None:
        if self._left is None:
            return None
        return (add_noise(inputs[0], next(self._left), self.scale),)
