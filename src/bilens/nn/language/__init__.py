"""The causal transformer, a Hugging Face model. Its import includes that of transformers."""

from bilens.nn.language.attention import Attention
from bilens.nn.language.model import Block, LanguageConfig, LanguageModel

__all__ = ["Attention", "Block", "LanguageConfig", "LanguageModel"]
