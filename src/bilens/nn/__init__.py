"""Torch modules whose non-linearity is a product, with a method that returns their tensor."""

from bilens.nn.attention import ATTENTIONS, AttentionKind
from bilens.nn.autoencoder import AutoencoderConfig, SparseAutoencoder
from bilens.nn.checkpoint import read_config
from bilens.nn.classifier import ClassifierConfig, ImageClassifier
from bilens.nn.gated import Bilinear, Gate, GatedLayer, GateName
from bilens.nn.mlp import MlpBias, MlpName, PlainMLP, make_mlp
from bilens.nn.norm import AttentionNorm, NormName
from bilens.nn.position import PositionName

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
