"""Tokenizers of GGUF files, which cut texts by the rules that the file names."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import transformers
from tokenizers import Regex, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase
from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS
from transformers.models.auto.tokenization_auto import TOKENIZER_MAPPING_NAMES

from bilens.convert.gguf_header import read_header
from bilens.convert.weights import reading_files
from bilens.data.texts import tokenize
from bilens.errors import CheckpointError

GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"


@dataclass(frozen=True)
class _Rules:
    """How texts are cut before their bytes are merged."""

    # Texts are cut at the matches of the first, the pieces at those of the second, and so on.
    cuts: tuple[str, ...]
    # A word of the vocabulary is a token, even if no merges lead to it.
    words_are_whole: bool = False
    # Texts begin with the token for that, unless the file says otherwise.
    begins: bool = False


LIKE_LLAMA_3 = ("llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1", "pixtral", "midm-2.0")
LIKE_LLAMA_3 += ("lfm2", "jina-v5-nano", "tekken")  # type: ignore[assignment]
LIKE_GPT2 = ("gpt-2", "phi-2", "gigachat", "a.x-4.0", "mellum", "exaone4", "mpt", "olmo", "jais")
DIGIT_BY_DIGIT = ("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b")
RULES = {
    # transformers knows these by one expression each.
    **{name: _Rules((cut,)) for name, cut in GGUF_PRE_TOKENIZER_SPLITS.items()},
    **{name: _Rules((GGUF_PRE_TOKENIZER_SPLITS[name],), True, True) for name in LIKE_LLAMA_3},
    **dict.fromkeys(LIKE_GPT2, _Rules((GPT2,))),
    **dict.fromkeys(DIGIT_BY_DIGIT, _Rules((r"\p{N}", GPT2))),
    "deepseek-coder": _Rules(
        (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", r"[一-龥ࠀ-一가-퟿]+", r"\p{N}")
    ),
    "default": _Rules((r"[\p{P}\$\+<=>\^~\|]+", GPT2, r"\p{N}+", "[0-9][0-9][0-9]")),
}
"""Rules by the names in `tokenizer.ggml.pre`, as llama.cpp has them in llama-vocab.cpp."""


def gguf_tokenizer(path: Path, model: PreTrainedModel) -> PreTrainedTokenizerBase:
    """Return the tokenizer of a GGUF file.

    Raises:
        CheckpointError: it is damaged, or its rules are not known.
    """
    settings = read_header(path).settings
    rules = None
    if settings.get("tokenizer.ggml.model") == "gpt2":  # byte-level; others have no such rules
        # What llama.cpp takes if a file says nothing.
        name = settings.get("tokenizer.ggml.pre", "default")
        rules = RULES.get(name)
        if rules is None:
            raise CheckpointError(
                f"{path} has tokenizer.ggml.pre={name!r:.80}, by which texts are cut in a way that "
                f"bilens does not know; expected one of {', '.join(sorted(RULES))}. Open the "
                "model's folder in the format of transformers instead."
            )
    opener, options = _opener(path, model)
    with reading_files(path, "tokenizer"):
        tokenizer: Any = opener.from_pretrained(path.parent, trust_remote_code=False, **options)
        if rules is not None:
            _cut_by(rules, tokenizer.backend_tokenizer)
            if rules.begins and "tokenizer.ggml.add_bos_token" not in settings:
                tokenizer.add_bos_token = True
        # A tokenizer without its token for unknown words opens, and fails at the first one.
        tokenize(tokenizer, "\U000f0000")
    return tokenizer


def _cut_by(rules: _Rules, backend: Any) -> None:
    """Let a tokenizer of the library tokenizers cut texts by rules."""
    cuts = [pre_tokenizers.Split(Regex(pattern), behavior="isolated") for pattern in rules.cuts]
    letters = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.pre_tokenizer = pre_tokenizers.Sequence([*cuts, letters])
    backend.model.ignore_merges = rules.words_are_whole


def _opener(path: Path, model: PreTrainedModel) -> tuple[Any, dict[str, str]]:
    """Return the class of a GGUF file's tokenizer and its options.

    Without the type of the model, AutoTokenizer reads the whole file to find it, for seconds.
    """
    options, kind = {"gguf_file": path.name}, model.config.model_type
    if TOKENIZER_MAPPING_NAMES.get(kind):
        return AutoTokenizer, {**options, "tokenizer_type": kind}
    return transformers.PreTrainedTokenizerFast, options
