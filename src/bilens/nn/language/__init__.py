"""The causal transformer, a Hugging Face model; importing it takes as long as transformers does."""

from bilens.nn.language.attention import Attention
from bilens.nn.language.config import LanguageConfig
from bilens.nn.language.fold import fold_scalar_norms
from bilens.nn.language.model import Block, LanguageModel

__all__ = ["Attention", "Block", "LanguageConfig", "LanguageModel", "fold_scalar_norms"]
