"""Torch modules whose non-linearity is a product, with a method that returns their tensor."""

from typing import TYPE_CHECKING

from bilens.lazy_imports import lazy_names

if TYPE_CHECKING:
    from bilens.nn.checkpoint import read_config
    from bilens.nn.classifier import AutoencoderConfig, ImageClassifier, SparseAutoencoder
    from bilens.nn.layers import Bilinear, Gate, GatedLayer, PlainMLP, make_mlp
    from bilens.nn.settings import (
        ATTENTIONS,
        AttentionKind,
        AttentionNorm,
        ClassifierConfig,
        GateName,
        MlpBias,
        MlpName,
        NormName,
        PositionName,
    )
else:  # Settings of commands do without torch.
    __getattr__, __dir__ = lazy_names(__name__)

__all__ = [
    "ATTENTIONS",
    "AttentionKind",
    "AttentionNorm",
    "AutoencoderConfig",
    "Bilinear",
    "ClassifierConfig",
    "Gate",
    "GateName",
    "GatedLayer",
    "ImageClassifier",
    "MlpBias",
    "MlpName",
    "NormName",
    "PlainMLP",
    "PositionName",
    "SparseAutoencoder",
    "make_mlp",
    "read_config",
]
