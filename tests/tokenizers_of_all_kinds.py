"""Small tokenizers of each kind that models have, with tokens for a few words."""

from collections.abc import Callable
from itertools import pairwise
from typing import Any

from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from tokenizers.pre_tokenizers import ByteLevel, Metaspace
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from bilens.transformer import ResidualModel
from tests.families import LIKE_LLAMA

WORDS = ["The", "keys", "to", "the", "cabinet", "key", "are", "is", "was", "New", "York", "Paris"]
WORDS += ["and", "then", "Tom", "gave", "it"]
SIGNS = (".", ",", "é", "\n", "!", "s")
SPECIAL = ("<unk>", "<s>", "</s>")
BYTES = tuple(f"<0x{byte:02X}>" for byte in range(256))


def _pieces(words: list[str]) -> tuple[list[str], list[tuple[str, str]]]:
    """Return the beginnings of words as tokens, and the merges that lead to them."""
    tokens = list(dict.fromkeys(letter for word in words for letter in word))
    merges: dict[tuple[str, str], None] = {}
    for word in words:
        starts = [word[: end + 1] for end in range(len(word))]
        tokens += starts
        merges |= dict.fromkeys((start, after[-1]) for start, after in pairwise(starts))
    return list(dict.fromkeys(tokens)), list(merges)


def _numbered(tokens: list[str]) -> dict[str, int]:
    return {token: number for number, token in enumerate(dict.fromkeys([*SPECIAL, *tokens]))}


def _byte_level(prefix: bool) -> Tokenizer:
    letters = ByteLevel(add_prefix_space=False, use_regex=False)
    spelled = [letters.pre_tokenize_str(word)[0][0] for word in (*SIGNS, *WORDS)]
    tokens, merges = _pieces([*(f"Ġ{word}" for word in WORDS), *spelled])
    tokenizer = Tokenizer(models.BPE(_numbered([*sorted(ByteLevel.alphabet()), *tokens]), merges))
    tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=prefix)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _sentencepiece(prefix: bool) -> Tokenizer:
    """Spaces are letters; unknown letters are bytes. Llama 2 has a space before each text."""
    tokens, merges = _pieces([*(f"▁{word}" for word in WORDS), *WORDS])
    known = [*BYTES, "▁", *tokens, ".", ",", "!", "▁.", "▁,"]
    merges += [("▁", "."), ("▁", ",")]
    bpe = models.BPE(_numbered(known), merges, unk_token="<unk>", byte_fallback=True)
    tokenizer = Tokenizer(bpe)
    first = [normalizers.Prepend("▁")] if prefix else []
    tokenizer.normalizer = normalizers.Sequence([*first, normalizers.Replace(" ", "▁")])
    parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    parts += [decoders.Strip(" ", 1, 0)] if prefix else []
    tokenizer.decoder = decoders.Sequence(parts)
    return tokenizer


def _unigram() -> Tokenizer:
    tokens = [*SPECIAL, *BYTES, "▁", ".", ",", "!", *sorted(set("".join(WORDS)))]
    tokens += [f"▁{word}" for word in WORDS] + ["are", "ey"]
    scored = [(token, -float(number)) for number, token in enumerate(dict.fromkeys(tokens))]
    tokenizer = Tokenizer(models.Unigram(scored, unk_id=0, byte_fallback=True))
    tokenizer.pre_tokenizer = Metaspace(prepend_scheme="always")
    parts = [decoders.ByteFallback(), decoders.Metaspace(prepend_scheme="always")]
    tokenizer.decoder = decoders.Sequence(parts)
    return tokenizer


def _metaspace() -> Tokenizer:
    """The newer form of Llama 2's: a space before the first word, and none after <s>."""
    tokenizer = _sentencepiece(prefix=True)
    tokenizer.normalizer = None
    tokenizer.pre_tokenizer = Metaspace(prepend_scheme="first", split=False)
    return tokenizer


def _word_piece() -> Tokenizer:
    tokens = [*WORDS, *SIGNS, "##s", "##are", "##t"]
    tokenizer = Tokenizer(models.WordPiece(_numbered(tokens), unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece(prefix="##")
    return tokenizer


KINDS: dict[str, Callable[[], Tokenizer]] = {
    "byte-level": lambda: _byte_level(prefix=False),
    "byte-level with a space before texts": lambda: _byte_level(prefix=True),
    "SentencePiece": lambda: _sentencepiece(prefix=True),
    "SentencePiece without a space before texts": lambda: _sentencepiece(prefix=False),
    "Metaspace": _metaspace,
    "Unigram": _unigram,
    "WordPiece": _word_piece,
}
PREFIXING = ("byte-level with a space before texts", "SentencePiece", "Metaspace", "Unigram")


def tokenizer_of(kind: str, template: str = "<s> $A") -> Any:
    """Return a tokenizer of a kind that adds the tokens of a template to texts."""
    tokenizer = KINDS[kind]()
    tokenizer.add_special_tokens(list(SPECIAL))
    ends = [(name, number) for number, name in enumerate(SPECIAL)]
    tokenizer.post_processor = processors.TemplateProcessing(single=template, special_tokens=ends)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    )


def small_llama(vocab_size: int, **settings: Any) -> LlamaForCausalLM:
    """Return a model with random weights and an embedding for each token."""
    sizes = {"vocab_size": vocab_size, "max_position_embeddings": 64, "pad_token_id": None}
    return LlamaForCausalLM(LlamaConfig(**{**LIKE_LLAMA, **sizes, **settings})).eval()


def view_with(tokenizer: Any) -> ResidualModel:
    return ResidualModel(small_llama(len(tokenizer)), tokenizer)
