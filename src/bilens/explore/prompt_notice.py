"""What a model does not see of a text: words that it does not know."""

from html import escape
from typing import Any

from bilens.residual import ResidualModel
from bilens.residual.texts import prepare_text

__all__ = ["prompt_notice"]

SHOWN = 8
"""Words that are named."""


def prompt_notice(model: ResidualModel, prompt: str) -> str:
    """A sentence that names them, as HTML; empty where the model knows all words.

    Args:
        model: with its tokenizer.
        prompt: the text.
    """
    text, tokenizer = prepare_text(prompt, model.tokenizer), model.tokenizer
    if tokenizer is None or tokenizer.unk_token_id is None:
        return ""
    encoded: Any = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    unknown = list(
        dict.fromkeys(
            text[start:end]
            for id_, (start, end) in zip(
                encoded["input_ids"], encoded["offset_mapping"], strict=True
            )
            if id_ == tokenizer.unk_token_id
        )
    )
    if not unknown:
        return ""
    more = f" and {len(unknown) - SHOWN} more" if len(unknown) > SHOWN else ""
    named = ", ".join(unknown[:SHOWN]) + more
    sentence = f"Not in the vocabulary, and read as {tokenizer.unk_token}: {named}."
    return f'<p class="bilens-notice">{escape(sentence)}</p>'
