"""Sparse autoencoders as the MNIST case study trains them."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from jaxtyping import Float
from torch import Tensor, nn

from bilens.errors import BilensError
from bilens.nn.checkpoint import Checkpointed

__all__ = ["AutoencoderConfig", "SparseAutoencoder"]


@dataclass(frozen=True)
class AutoencoderConfig:
    """The sizes of a sparse autoencoder.

    Attributes:
        d_in: width of the vectors it reads.
        n_features: how many features it has.
    """

    d_in: int
    n_features: int

    def __post_init__(self) -> None:
        for name in ("d_in", "n_features"):
            if getattr(self, name) < 1:
                raise BilensError(f"{name}={getattr(self, name)}, expected at least 1")


class SparseAutoencoder(Checkpointed):
    """f = ReLU(E (y - b_D) + b_E),  y' = F f + b_D, with features F of unit length as columns.

    Args:
        config: its sizes.

    Source:
        Pearce & Dooms 2024, appendix "SAE training".
    """

    model_type = "sparse-autoencoder"
    config_class = AutoencoderConfig

    def __init__(self, config: AutoencoderConfig) -> None:
        super().__init__()
        self.config = config
        features = torch.randn(config.d_in, config.n_features)
        self.features = nn.Parameter(features / features.norm(dim=0))
        # Contiguous: a fused optimizer walks over a parameter and its loaded state side by side.
        encoder = self.features.detach().T.clone(memory_format=torch.contiguous_format)
        self.encoder = nn.Parameter(encoder)
        self.encoder_bias = nn.Parameter(torch.zeros(config.n_features))
        self.decoder_bias = nn.Parameter(torch.zeros(config.d_in))

    if TYPE_CHECKING:
        __call__ = nn.Module.__call__

    def encode(self, y: Float[Tensor, "*batch d_in"]) -> Float[Tensor, "*batch n_features"]:
        """The activations of the features, none negative."""
        return torch.relu((y - self.decoder_bias) @ self.encoder.T + self.encoder_bias)

    def decode(self, f: Float[Tensor, "*batch n_features"]) -> Float[Tensor, "*batch d_in"]:
        """The vectors that activations stand for."""
        return f @ self.features.T + self.decoder_bias

    def forward(self, y: Float[Tensor, "*batch d_in"]) -> Float[Tensor, "*batch d_in"]:
        """Encode and decode."""
        return self.decode(self.encode(y))

    @torch.no_grad()
    def normalise(self) -> None:
        """Give every feature unit length."""
        self.features.div_(self.features.norm(dim=0).clamp_min(1e-12))
