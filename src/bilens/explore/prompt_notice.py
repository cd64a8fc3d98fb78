"""What a model does not see of a text: words that it does not know, and what is too long ago."""

from html import escape
from typing import TYPE_CHECKING

from bilens.data import clean

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = ["prompt_notice"]

SHOWN = 8
"""Words that are named."""


def prompt_notice(tokenizer: "PreTrainedTokenizerBase", prompt: str, n_ctx: int) -> str:
    """A sentence for each, as HTML; empty where the model sees the whole text.

    Args:
        tokenizer: of the model.
        prompt: the text.
        n_ctx: tokens that the model reads, a token for the beginning of the text among them.
    """
    text = clean(prompt)
    encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    ids, places = encoded["input_ids"], encoded["offset_mapping"]
    unknown = dict.fromkeys(
        text[start:end]
        for id_, (start, end) in zip(ids, places, strict=True)
        if id_ == tokenizer.unk_token_id
    )
    sentences = []
    if unknown:
        named = ", ".join(list(unknown)[:SHOWN])
        more = f" and {len(unknown) - SHOWN} more" if len(unknown) > SHOWN else ""
        sentences.append(
            f"Not in the vocabulary, and read as {tokenizer.unk_token}: {named}{more}."
        )
    if len(ids) + (tokenizer.bos_token_id is not None) > n_ctx:
        sentences.append(f"Only the last {n_ctx:,} of {len(ids):,} tokens are read.")
    return "".join(f'<p class="bilens-notice">{escape(text)}</p>' for text in sentences)
