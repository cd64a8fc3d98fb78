"""The kinds of attention by their names."""

from typing import Literal, get_args

__all__ = ["ATTENTIONS", "ATTENTION_NORMS", "AttentionName", "AttentionNorm"]

AttentionName = Literal["softmax", "squared", "bilinear", "differential"]
"""softmax; squared, a score times itself; bilinear, the product of two scores; differential, the
difference of two softmaxes."""
ATTENTIONS: tuple[str, ...] = get_args(AttentionName)
"""All of them."""

AttentionNorm = Literal["none", "sum", "rms"]
"""Of attention without softmax: none; the pattern's rows by their sum; the output by its size."""
ATTENTION_NORMS: tuple[str, ...] = get_args(AttentionNorm)
