"""The causal transformer, a Hugging Face model. Its import includes that of transformers."""

from bilens.nn.language.attention import Attention
from bilens.nn.language.model import LanguageConfig, LanguageModel

__all__ = ["Attention", "LanguageConfig", "LanguageModel"]
