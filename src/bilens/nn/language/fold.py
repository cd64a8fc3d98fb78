"""Scalar norms of a trained language model, folded into the weights that read behind them."""

from typing import Any, cast

import torch
from torch import nn

from bilens.nn.language.model import Block, LanguageModel

__all__ = ["fold_scalar_norms"]

READERS = {"query", "key", "query2", "key2", "value", "left", "right", "inner"}
"""The parts of attention and MLPs that read the normed stream."""


@torch.no_grad()
def fold_scalar_norms(model: LanguageModel) -> LanguageModel:
    """Make an ordinary model without norms of one with scalar norms, in place.

    W (x / s) = (W / s) x for everything that reads the normed stream; a shared embedding becomes
    two. The function is the same within rounding. Other models stay as they are.
    """
    if model.config.norm != "scalar":
        return model
    if model.config.tie_word_embeddings:
        model.config.tie_word_embeddings = False
        model.unembed.weight = nn.Parameter(model.unembed.weight.clone())
    for block in cast(list[Block], model.blocks):
        for norm, part in (("attn_norm", block.attn), ("mlp_norm", block.mlp)):
            _fold(getattr(block, norm), [m for name, m in part.named_children() if name in READERS])
            setattr(block, norm, nn.Identity())
    _fold(model.norm, [model.unembed])
    model.norm = nn.Identity()
    model.config.norm = "none"
    return model


def _fold(norm: Any, readers: list[Any]) -> None:
    for reader in readers:
        reader.weight *= norm.scale
