"""A tokenizer for reading weights: one token for a word, however it is written and wherever."""

import difflib
from collections.abc import Iterable
from string import ascii_lowercase
from typing import TYPE_CHECKING

from bilens.errors import BilensError

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

__all__ = ["SPECIAL_TOKENS", "token_id", "train_tokenizer", "with_special_tokens"]

SPECIAL_TOKENS = {
    "pad_token": "[PAD]",
    "unk_token": "[UNK]",
    "bos_token": "[BOS]",
    "eos_token": "[EOS]",
}

_NEAREST = 5


def train_tokenizer(texts: Iterable[str], vocab_size: int = 4096) -> "PreTrainedTokenizerFast":
    """Train a WordPiece tokenizer in which every common word is a single token.

    Every character that is no letter is a token of its own, white space only separates, letters
    are lower case and without accents, and a word that is no token is cut into pieces, those after
    the first written ##like ##this. `[PAD]`, `[UNK]`, `[BOS]` and `[EOS]` are tokens 0 to 3; none
    of them is added when a text is tokenized: where a text begins and ends is for the caller to
    say.

    Args:
        texts: What to learn from, cleaned (`bilens.data.clean`). The same texts give the same
            tokenizer.
        vocab_size: The largest number of tokens, special ones included; short texts give fewer.

    Raises:
        BilensError: `vocab_size` has no room for the single characters, of which all are needed.

    Source: Pearce et al. 2024, appendix C.4; WordPiece: Wu et al. 2016, arXiv:1609.08144.
    """
    # tokenizers takes a while to import, and images do without it.
    from tokenizers import Tokenizer, decoders, models, trainers  # noqa: PLC0415

    special = list(SPECIAL_TOKENS.values())
    # tokenizers numbers the inner letters in the order of a hash map, which differs from run to
    # run, and breaks ties between pieces by these numbers. Naming them first takes chance out.
    inner = [f"##{letter}" for letter in ascii_lowercase]
    trainer = trainers.WordPieceTrainer(
        vocab_size=vocab_size, special_tokens=special + inner, show_progress=False
    )
    draft = _rules(Tokenizer(models.WordPiece(unk_token="[UNK]")))
    draft.train_from_iterator(texts, trainer)
    vocabulary = draft.get_vocab()
    if len(vocabulary) > vocab_size:
        raise BilensError(
            f"vocab_size: expected at least {len(vocabulary)}, room for the special tokens and "
            f"every single character, found {vocab_size}"
        )
    # A second tokenizer around the same vocabulary, in which the inner letters are not special.
    trained = _rules(Tokenizer(models.WordPiece(vocab=vocabulary, unk_token="[UNK]")))
    trained.decoder = decoders.WordPiece(prefix="##", cleanup=True)
    return with_special_tokens(trained)


def with_special_tokens(tokenizer: "Tokenizer") -> "PreTrainedTokenizerFast":
    """Wrap `tokenizer`, whose vocabulary has the special tokens, as transformers knows it."""
    # transformers takes seconds to import, and images do without it.
    from transformers import PreTrainedTokenizerFast  # noqa: PLC0415

    tokenizer.add_special_tokens(list(SPECIAL_TOKENS.values()))
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **SPECIAL_TOKENS)


def _rules(tokenizer: "Tokenizer") -> "Tokenizer":
    """Give `tokenizer` the rules on case, accents, white space and what is no letter."""
    from tokenizers import Regex, normalizers, pre_tokenizers  # noqa: PLC0415

    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.NFKD(), normalizers.StripAccents(), normalizers.Lowercase()]
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Split(Regex(r"\P{L}"), "isolated")]
    )
    return tokenizer


def token_id(tokenizer: "PreTrainedTokenizerBase", token: str) -> int:
    """Return the number of `token`, which must stand in the vocabulary exactly as it is written.

    Raises:
        BilensError: It does not; the message says how the tokenizer cuts it and which tokens are
            nearest.
    """
    vocabulary = tokenizer.get_vocab()
    if token in vocabulary:
        return int(vocabulary[token])
    pieces = " ".join(tokenizer.tokenize(token))
    nearest = difflib.get_close_matches(token.lower(), vocabulary, n=_NEAREST, cutoff=0.5)
    raise BilensError(
        f"token: expected a single token of the vocabulary, found {token!r}"
        + (f", which is cut into {pieces}" if pieces else "")
        + (f"; the nearest are {', '.join(nearest)}" if nearest else "")
    )
