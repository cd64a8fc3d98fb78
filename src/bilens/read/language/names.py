"""Tokens by number and by name."""

from collections.abc import Sequence

import torch
from jaxtyping import Int
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from bilens.errors import BilensError
from bilens.nn.language import LanguageModel

__all__ = ["chosen_tokens", "token_names"]


def token_names(tokenizer: PreTrainedTokenizerBase, ids: Int[Tensor, " n"]) -> list[str]:
    """What the tokenizer calls each token; a row of the model that is none of them, its number."""
    numbers = ids.tolist()
    names = tokenizer.convert_ids_to_tokens([min(i, len(tokenizer) - 1) for i in numbers])
    return [
        name if i < len(tokenizer) else f"[{i}]" for i, name in zip(numbers, names, strict=True)
    ]


def chosen_tokens(model: LanguageModel, among: Sequence[int] | None) -> Int[Tensor, " n"]:
    """The numbers of some tokens, or of all.

    Raises:
        BilensError: there are none, or one is not of the vocabulary.
    """
    size = model.config.vocab_size
    if among is None:
        return torch.arange(size, device=model.device)
    if not among or min(among) < 0 or max(among) >= size:
        raise BilensError(f"among: expected numbers of tokens from 0 to {size - 1}, at least one")
    return torch.tensor(among, device=model.device)
