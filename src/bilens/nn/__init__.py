"""Torch modules whose non-linearity is a product, with a method that returns their tensor."""

from bilens.nn.checkpoint import read_config
from bilens.nn.classifier import (
    AutoencoderConfig,
    ClassifierConfig,
    ImageClassifier,
    SparseAutoencoder,
)
from bilens.nn.language_settings import ATTENTIONS, AttentionKind, PositionName
from bilens.nn.layers import (
    AttentionNorm,
    Bilinear,
    Gate,
    GatedLayer,
    GateName,
    MlpBias,
    MlpName,
    NormName,
    PlainMLP,
    make_mlp,
)

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
