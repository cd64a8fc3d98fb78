"""Torch modules whose non-linearity is a product, with a method that returns their tensor."""

from typing import TYPE_CHECKING

from bilens.lazy_imports import lazy_names

if TYPE_CHECKING:
    from bilens.nn.classifier import ImageClassifier
    from bilens.nn.layers import Bilinear, Gate, GatedLayer
    from bilens.nn.settings import ATTENTIONS, AttentionKind, ClassifierConfig, LanguageSettings
else:  # Settings of commands do without torch.
    __getattr__, __dir__ = lazy_names(__name__)

__all__ = [
    "ATTENTIONS",
    "AttentionKind",
    "Bilinear",
    "ClassifierConfig",
    "Gate",
    "GatedLayer",
    "ImageClassifier",
    "LanguageSettings",
]
