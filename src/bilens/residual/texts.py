"""Texts in the tokens of a model."""

from typing import Any

from bilens.checks import check_text
from bilens.data.texts import clean
from bilens.errors import BilensError


def require_tokenizer(tokenizer: Any) -> Any:
    """Return the tokenizer; raise BilensError if it is None."""
    if tokenizer is None:
        raise BilensError(
            "The model came without a tokenizer, which texts need: pass the numbers of tokens, or "
            "ResidualModel(model, tokenizer)"
        )
    return tokenizer


def trained_on_clean_text(tokenizer: Any) -> bool:
    """Return True for tokenizers of bilens's own models, which learn from cleaned texts."""
    return getattr(tokenizer, "bos_token", None) == "[BOS]"


def max_tokens(config: Any) -> int:
    """Return the length of the longest text that a model accepts, by its configuration."""
    return int(getattr(config, "max_position_embeddings", 2**31 - 1))


def prepare_text(text: str, tokenizer: Any) -> str:
    """Clean a text if the model was trained on clean texts, or else return it unchanged."""
    return clean(text) if trained_on_clean_text(tokenizer) else text


def text_ids(text: str, tokenizer: Any, config: Any) -> list[int]:
    """Return the token ids of a text, after the token that the model's texts begin with.

    Raises:
        BilensError: the model has no tokenizer, or the text is empty, too long or has no known
            token.
    """
    tokenizer = require_tokenizer(tokenizer)
    check_text("text", text)
    if trained_on_clean_text(tokenizer):
        # The tokenizer's own rules would also add a token at the end.
        ids = tokenizer(clean(text), add_special_tokens=False)["input_ids"]
        ids = ids if config.bos_token_id is None else [config.bos_token_id, *ids]
    else:
        ids = tokenizer(text)["input_ids"]
    if all(number in tokenizer.all_special_ids for number in ids):
        raise BilensError(
            f"text={text[:80]!r} holds no token that the model knows; expected some text"
        )
    if len(ids) > max_tokens(config):
        raise BilensError(
            f"text has {len(ids)} tokens, expected up to {max_tokens(config)}, the longest text "
            "that the model reads"
        )
    return list(ids)
