"""Sparse autoencoders of the MNIST case study."""

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor, nn

from bilens.nn.checkpoint import Checkpointed
from bilens.settings import CheckedSettings, Size


@dataclass(frozen=True)
class AutoencoderConfig(CheckedSettings):
    """The sizes of a sparse autoencoder.

    Attributes:
        d_in: width of its input vectors.
        n_features: number of features.
    """

    d_in: Size
    n_features: Size


class SparseAutoencoder(Checkpointed):
    """f = ReLU(E (y - b_D) + b_E),  y' = F f + b_D, with features F of unit length as columns.

    Args:
        config: sizes of the autoencoder.

    Source: Pearce & Dooms 2024, appendix "SAE training".
    """

    model_type = "sparse-autoencoder"
    config_class = AutoencoderConfig

    def __init__(self, config: AutoencoderConfig) -> None:
        super().__init__()
        self.config = config
        self.features = nn.Parameter(torch.empty(config.d_in, config.n_features))
        self.encoder = nn.Parameter(torch.empty(config.n_features, config.d_in))
        self.encoder_bias = nn.Parameter(torch.empty(config.n_features))
        self.decoder_bias = nn.Parameter(torch.empty(config.d_in))
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self, generator: torch.Generator | None = None) -> None:
        """Draw initial weights anew: random features, and an encoder that reads along them."""
        self.features.normal_(generator=generator)
        self.normalise()
        self.encoder.copy_(self.features.T)
        self.encoder_bias.zero_()
        self.decoder_bias.zero_()

    def encode(self, y: Float[Tensor, "*batch d_in"]) -> Float[Tensor, "*batch n_features"]:
        """Return the activations of the features, none negative."""
        y = y.to(self.encoder.dtype)
        return torch.relu((y - self.decoder_bias) @ self.encoder.T + self.encoder_bias)

    def decode(self, f: Float[Tensor, "*batch n_features"]) -> Float[Tensor, "*batch d_in"]:
        """Return the vectors with these activations."""
        return f @ self.features.T + self.decoder_bias

    def forward(self, y: Float[Tensor, "*batch d_in"]) -> Float[Tensor, "*batch d_in"]:
        """Encode and decode."""
        return self.decode(self.encode(y))

    @torch.no_grad()
    def normalise(self) -> None:
        """Scale every feature to unit length."""
        self.features.div_(self.features.norm(dim=0).clamp_min(1e-12))
