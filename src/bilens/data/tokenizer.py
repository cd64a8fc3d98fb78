"""A tokenizer for reading weights: one token for a word, in any case and at any position."""

from collections.abc import Iterable
from pathlib import Path
from string import ascii_lowercase
from typing import Any

from bilens.checks import checked
from bilens.errors import BilensError, DataError
from bilens.lazy_imports import tokenizers, transformers
from bilens.settings import Size

SPECIAL_TOKENS = {
    "pad_token": "[PAD]",
    "unk_token": "[UNK]",
    "bos_token": "[BOS]",
    "eos_token": "[EOS]",
}
LONGEST_WORD = 100
"""Largest number of letters of a word; WordPiece maps a longer one to the unknown token."""

DAMAGE = (OSError, ValueError, LookupError, TypeError, AttributeError)


@checked
def train_tokenizer(
    texts: Iterable[str], vocab_size: Size = 4096
) -> "transformers.PreTrainedTokenizerFast":
    """Train a WordPiece tokenizer in which every common word is a single token.

    Every character that is not a letter is a token, and white space only separates. Letters are
    lower case, without accents. A word that is not a token is cut into pieces; those after the
    first are written ##like ##this. `[PAD]`, `[UNK]`, `[BOS]` and `[EOS]` are tokens 0 to 3. The
    tokenizer adds none of them to a text: the caller marks its beginning and end.

    Args:
        texts: cleaned texts (`bilens.data.clean`). The same texts yield the same tokenizer.
        vocab_size: the largest number of tokens, with the special ones; short texts yield fewer.

    Raises:
        BilensError: `vocab_size` is smaller than the number of single characters, which are needed.

    Source: Pearce et al. 2024, appendix C.4; WordPiece: Wu et al. 2016, arXiv:1609.08144.
    """
    # tokenizers numbers the inner letters in the order of a hash map, which differs from run to
    # run, and breaks ties between pieces by these numbers. Naming them first makes it repeatable.
    special = [*SPECIAL_TOKENS.values(), *(f"##{letter}" for letter in ascii_lowercase)]
    trainer = tokenizers.trainers.WordPieceTrainer(
        vocab_size=vocab_size, special_tokens=special, show_progress=False
    )
    draft = _with_rules(tokenizers.models.WordPiece(unk_token="[UNK]"), LONGEST_WORD)
    draft.train_from_iterator(texts, trainer)
    vocabulary = draft.get_vocab()
    if len(vocabulary) > vocab_size:
        raise BilensError(
            f"vocab_size={vocab_size}, expected at least {len(vocabulary)}, room for the special "
            "tokens and every single character"
        )
    # A second tokenizer around the same vocabulary, in which the inner letters are not special.
    trained = _with_rules(tokenizers.models.WordPiece(vocab=vocabulary, unk_token="[UNK]"))
    return with_special_tokens(trained)


def with_special_tokens(
    tokenizer: "tokenizers.Tokenizer",
) -> "transformers.PreTrainedTokenizerFast":
    """Wrap `tokenizer`, whose vocabulary has the special tokens, for transformers."""
    tokenizer.add_special_tokens(list(SPECIAL_TOKENS.values()))
    decoders, regex = tokenizers.decoders, tokenizers.Regex
    # The first word has its space too, since pipelines decode a continuation without its prompt.
    spaced = decoders.Replace(regex(r"^(?!##|[.,?!]$)"), " ")
    tokenizer.decoder = decoders.Sequence(
        [spaced, decoders.Replace(regex("^##"), ""), decoders.Fuse()]
    )
    return transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, **SPECIAL_TOKENS)


def _with_rules(model: Any, longest_word: int | None = None) -> "tokenizers.Tokenizer":
    """Return a tokenizer with the rules on case, accents, white space and other characters.

    Words above `longest_word` letters are dropped: training time grows with their square.
    """
    tokenizer = tokenizers.Tokenizer(model)
    norms, cuts, regex = tokenizers.normalizers, tokenizers.pre_tokenizers, tokenizers.Regex
    tokenizer.normalizer = norms.Sequence([norms.NFKD(), norms.StripAccents(), norms.Lowercase()])
    steps = [cuts.WhitespaceSplit(), cuts.Split(regex(r"\P{L}"), "isolated")]
    if longest_word is not None:
        steps.append(cuts.Split(regex(rf"\p{{L}}{{{longest_word + 1},}}"), "removed"))
    tokenizer.pre_tokenizer = cuts.Sequence(steps)
    return tokenizer


def read_tokenizer(folder: Path) -> "transformers.PreTrainedTokenizerFast":
    """Open the tokenizer in a folder, without running code from it.

    Raises:
        DataError: it is missing or damaged.
    """
    try:
        return transformers.AutoTokenizer.from_pretrained(  # type: ignore[return-value]
            folder, trust_remote_code=False, local_files_only=True
        )
    except Exception as error:
        # tokenizers raises a plain Exception for damaged files.
        if type(error) is not Exception and not isinstance(error, DAMAGE):
            raise
        reason = f"{type(error).__name__}: {error}"
        raise DataError(
            f"{folder} holds no complete tokenizer ({reason}). Save it again."
        ) from error
