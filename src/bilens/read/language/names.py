"""The names of tokens."""

from jaxtyping import Int
from torch import Tensor
from transformers import PreTrainedTokenizerBase

__all__ = ["token_names"]


def token_names(tokenizer: PreTrainedTokenizerBase, ids: Int[Tensor, " n"]) -> list[str]:
    """What the tokenizer calls each token; a row of the model that is none of them, its number."""
    numbers = ids.tolist()
    names = tokenizer.convert_ids_to_tokens([min(i, len(tokenizer) - 1) for i in numbers])
    return [
        name if i < len(tokenizer) else f"[{i}]" for i, name in zip(numbers, names, strict=True)
    ]
