"""Texts in tokens, by the tokenizer and the configuration of a model."""

import re
from functools import cache
from typing import Any

import torch
from jaxtyping import Int
from jinja2 import TemplateError
from torch import Tensor

from bilens.data.texts import clean, tokenize
from bilens.errors import BilensError


def require_tokenizer(tokenizer: Any) -> Any:
    """Return the tokenizer; raise BilensError if it is None."""
    if tokenizer is None:
        raise BilensError(
            "The model came without a tokenizer, which this needs: put tokenizer.json into its "
            "folder, or open it as ResidualModel(model, tokenizer)"
        )
    return tokenizer


@cache
def byte_letters() -> dict[str, int]:
    """Return the byte of each letter in the names of byte-level tokens, as GPT-2 has them."""
    # Bytes that print stand for themselves; the others are moved to letters from 256 on.
    visible = {*range(33, 127), *range(161, 173), *range(174, 256)}
    hidden = (byte for byte in range(256) if byte not in visible)
    return {chr(b): b for b in visible} | {chr(256 + i): b for i, b in enumerate(hidden)}


def in_bytes(name: str) -> str:
    """Return the name of a byte-level token with its pieces of letters as <0xE3>; others as is."""
    try:
        text = bytes(map(byte_letters().__getitem__, name)).decode(errors="backslashreplace")
    except KeyError:
        return name
    return re.sub(r"\\x(\w\w)", lambda x: f"<0x{x[1].upper()}>", text)


def listed_ids(argument: str, text: str) -> list[int]:
    """Return the numbers of tokens that a text lists, as "5 17 3", for models without a tokenizer.

    Raises:
        BilensError: it holds something else.
    """
    words = [re.fullmatch(r"\[?(\d{1,9})\]?", word) for word in text.split()]
    if not words or None in words:
        raise BilensError(
            f"{argument}={text[:80]!r}, but the model came without a tokenizer: write the numbers "
            "of tokens, as 5 17 3, or put tokenizer.json into the model's folder, or open it as "
            "ResidualModel(model, tokenizer)"
        )
    return [int(word[1]) for word in words if word]


def trained_on_clean_text(tokenizer: Any) -> bool:
    """Return True for tokenizers of bilens's own models that learned from cleaned texts."""
    if not is_own(tokenizer):
        return False
    return type(tokenizer.backend_tokenizer.model).__name__ != "BPE"


def is_own(tokenizer: Any) -> bool:
    """Return True for tokenizers of bilens's own models, whose texts are split by `load_corpus`."""
    return getattr(tokenizer, "bos_token", None) == "[BOS]"


def max_tokens(config: Any) -> int:
    """Return the length of the longest text that a model accepts, by its configuration."""
    return int(getattr(config, "max_position_embeddings", 2**31 - 1))


def in_template(text: str, tokenizer: Any) -> str:
    """Return what a user says in a chat, in the tokenizer's template, up to the model's answer.

    Raises:
        BilensError: the tokenizer has no template, or its template refuses the text.
    """
    if getattr(require_tokenizer(tokenizer), "chat_template", None) is None:
        raise BilensError(
            "chat: the model's tokenizer has no chat template, expected that of a model that was "
            "tuned for chats; leave chat out, or set tokenizer.chat_template"
        )
    message = {"role": "user", "content": text}
    try:
        whole = tokenizer.apply_chat_template([message], add_generation_prompt=True, tokenize=False)
    except (TemplateError, ValueError) as error:
        raise BilensError(
            f"chat: the tokenizer's chat template refuses text={text[:80]!r}: {error}"
        ) from None
    return str(whole)


def text_ids(text: str, tokenizer: Any, config: Any, *, chat: bool = False) -> list[int]:
    """Return the token ids of a text, after the tokens that the model's texts begin with, once.

    A tokenizer that ends texts with a token gives none here: the answer follows the text itself.
    Without a tokenizer the text lists the ids, as "5 17 3". In a chat the text is in the
    tokenizer's template.
    """
    check_text("text", text)
    if chat:
        text = in_template(text, tokenizer)
    if tokenizer is None:
        return listed_ids("text", text)
    original = text
    if trained_on_clean_text(tokenizer):
        text = clean(text)
        begin = [] if config.bos_token_id is None else [config.bos_token_id]
    else:
        begin = _beginning(tokenizer)
    ids = plain_ids(text, tokenizer)
    # A text may name its beginning itself, as those of chat templates do.
    if ids[: len(begin)] != begin:
        ids = [*begin, *ids]
    if all(token in tokenizer.all_special_ids for token in ids):
        raise BilensError(
            f"text={original[:80]!r} holds no token that the model knows; expected some text"
        )
    if len(ids) > max_tokens(config):
        raise BilensError(
            f"text has {len(ids)} tokens, expected up to {max_tokens(config)}, the longest text "
            "that the model reads"
        )
    return ids


def padding(ids: Int[Tensor, "*texts time"], tokenizer: Any, config: Any) -> Int[Tensor, "*texts"]:
    """Return the number of tokens before each text that only pad it.

    One of them may be a token of the text, where it has another meaning too, such as that of an
    unknown word, unless the beginning of a text follows. A text of nothing else has none.
    """
    of = config if tokenizer is None else tokenizer
    pad, begin = getattr(of, "pad_token_id", None), getattr(of, "bos_token_id", None)
    if pad is None or ids.shape[-1] < 2:
        return ids.new_zeros(ids.shape[:-1])
    counts = (ids == pad).long().cumprod(-1).sum(-1)
    next_ids = ids.gather(-1, counts.clamp(max=ids.shape[-1] - 1)[..., None])[..., 0]
    others = [begin, of.eos_token_id, getattr(of, "unk_token_id", None), _unknown(tokenizer)]
    others.append(getattr(config, "bos_token_id", None))
    # Without a tokenizer the first number may be any.
    is_word = tokenizer is None or pad in others
    least = (
        torch.where(next_ids == begin, 0, int(is_word))
        if begin not in (None, pad)
        else int(is_word)
    )
    return counts.where((counts > least) & (counts < ids.shape[-1]), 0)


def _unknown(tokenizer: Any) -> int | None:
    """Return the token of unknown words by the vocabulary itself; None without one."""
    vocabulary = getattr(getattr(tokenizer, "backend_tokenizer", None), "model", None)
    name = getattr(vocabulary, "unk_token", None)
    return None if name is None else int(tokenizer.convert_tokens_to_ids(name))


def check_padding(ids: Int[Tensor, "*texts time"], tokenizer: Any, config: Any) -> None:
    """Raise if texts begin with padding, which a pass without a mask would read."""
    most = int(padding(ids, tokenizer, config).max())
    if most:
        raise BilensError(
            f"ids begin with {most} tokens of padding, which the model would read as text; leave "
            "them out, and pass texts of unlike lengths one by one"
        )


def plain_ids(text: str, tokenizer: Any) -> list[int]:
    """Return the token ids of a text without those that the tokenizer adds to it."""
    return tokenize(tokenizer, text, add_special_tokens=False)


def _beginning(tokenizer: Any) -> list[int]:
    """Return the tokens that a tokenizer puts before every text."""
    bare, whole = plain_ids("a", tokenizer), tokenize(tokenizer, "a")
    for start in range(len(whole)):
        if whole[start : start + len(bare)] == bare:
            return whole[:start]
    raise BilensError(
        f"The tokenizer changes a text where it adds special tokens to it: {bare} becomes {whole}. "
        "Pass the numbers of tokens"
    )


def ids_within_text(name: str, tokenizer: Any) -> list[int]:
    """Return the token ids of some words or signs as they follow a word in a text."""
    # Tokenizers of SentencePiece put a space before every text, so that "are" alone is the word
    # " are", and " are" would have two spaces.
    word = "a"
    first = tokenizer.convert_ids_to_tokens(plain_ids(word, tokenizer)[:1])
    if not first or not str(first[0]).startswith(("▁", "Ġ")):
        return plain_ids(name, tokenizer)
    # A word is apart from the one before it, a comma or a new line is not.
    after = f" {name}" if name[:1].isalnum() else name
    before, ids = plain_ids(word, tokenizer), plain_ids(word + after, tokenizer)
    if ids[: len(before)] != before:
        return plain_ids(name, tokenizer)
    return ids[len(before) :]


def check_text(name: str, text: str) -> None:
    """Raise unless a text can be written in UTF-8, as every tokenizer expects."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise BilensError(
            f"{name} holds {text[error.start]!a} at {error.start}, expected text in UTF-8; read it "
            "in the encoding in which it was written"
        ) from None
