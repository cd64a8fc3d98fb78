"""A corpus as blocks of token ids: cleaned, without duplicates, split, tokenized and cached."""

import hashlib
from collections.abc import Iterable, Iterator
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from jaxtyping import Int, Int32

from bilens.data.arrow import open_rows, write_blocks, write_stories
from bilens.data.batches import batched
from bilens.data.cache import cache_folder, fingerprint, identity
from bilens.data.grammar import Grammar
from bilens.data.text import clean, read_texts, text_files
from bilens.data.tokenizer import train_tokenizer
from bilens.errors import DataError
from bilens.files import folder_written_whole

if TYPE_CHECKING:
    import datasets
    import transformers

__all__ = ["Corpus", "load_corpus"]

_CACHE_VERSION = 1  # part of every cache's name: a changed layout or cleaning needs a new one
_BATCH = 1000
_GRAMMAR_SENTENCES = 50_000
_MAX_SEED = 2**32 - 1


@dataclass(frozen=True, eq=False)
class Corpus:
    """Blocks of tokens, split into training and validation.

    Attributes:
        name: What it was loaded by.
        tokenizer: Its ids are those of the blocks.
        train: A column `input_ids` of blocks of one length, as int64 tensors. `Trainer` takes it as
            it is, with a collator that makes the labels.
        validation: As `train`, from other stories.
    """

    name: str
    tokenizer: "transformers.PreTrainedTokenizerFast"
    train: "datasets.Dataset"
    validation: "datasets.Dataset"


@dataclass(frozen=True)
class _Settings:
    n_ctx: int
    vocab_size: int
    validation_share: float
    seed: int


def load_corpus(
    name: str | Path,
    *,
    n_ctx: int,
    vocab_size: int = 4096,
    tokenizer: "transformers.PreTrainedTokenizerFast | None" = None,
    data_dir: str | Path | None = None,
    cache_dir: str | Path | None = None,
    validation_share: float = 0.05,
    seed: int = 0,
) -> Corpus:
    """Load a corpus by its name or from files, ready for training.

    Stories are cleaned (`bilens.data.clean`); of those that are equal but for their case the first
    stays, whatever split or file the others were in; they are shuffled and split. Each becomes
    [BOS] story [EOS], all of a split are joined, and the whole is cut into blocks; what is left
    over at the end of a split is dropped. The result is kept in a cache and opened from there the
    next time, for the same files (by size and time of change) and arguments. Texts are streamed:
    of all stories memory holds a digest each, of their texts one batch.

    Args:
        name: "grammar", a synthetic language whose true probabilities are known (`Grammar`; each
            block is one sentence), or what `read_texts` takes.
        n_ctx: Tokens of a block.
        vocab_size: The largest number of tokens. A tokenizer of this size is trained on the
            training split.
        tokenizer: Used instead of training one; it must have [BOS] and [EOS] of its own.
        data_dir: As in `read_texts`.
        cache_dir: Where the caches are; by default the folder bilens in Hugging Face's (HF_HOME).
        validation_share: Share of the stories that are held out.
        seed: Draws the order and the split, and the sentences of the grammar.

    Raises:
        DataError: Files that are missing or unreadable, a split shorter than one block, a tokenizer
            that does not fit, a damaged cache, an argument out of range.

    Source: Pearce et al. 2024, appendices C.3 and C.4.
    """
    settings = _Settings(n_ctx, vocab_size, validation_share, seed)
    _check_arguments(settings)
    if tokenizer is not None:
        _check_tokenizer(tokenizer, vocab_size)
    if name == "grammar":
        return _grammar(settings, tokenizer)
    files = text_files(name, data_dir)
    key = fingerprint(
        _CACHE_VERSION,
        [identity(path) for path in files] or name,
        astuple(settings),
        None if tokenizer is None else tokenizer.backend_tokenizer.to_str(),
    )
    called = Path(name).resolve().name
    folder = cache_folder(cache_dir) / f"{called}-{key}"
    if not folder.is_dir():
        with folder_written_whole(folder) as draft:
            _build(draft, str(name), read_texts(name, data_dir), settings, tokenizer)
    return _open(folder, str(name))


def _check_arguments(settings: _Settings) -> None:
    if settings.n_ctx < 2:
        raise DataError(f"n_ctx: expected at least 2, found {settings.n_ctx}")
    if not 0 < settings.validation_share < 1:
        raise DataError(
            "validation_share: expected a share between 0 and 1, both excluded, found "
            f"{settings.validation_share}"
        )
    if not 0 <= settings.seed <= _MAX_SEED:
        raise DataError(f"seed: expected 0 to {_MAX_SEED}, found {settings.seed}")


def _check_tokenizer(tokenizer: "transformers.PreTrainedTokenizerFast", vocab_size: int) -> None:
    if len(tokenizer) > vocab_size:
        raise DataError(
            f"tokenizer: expected at most {vocab_size} tokens (vocab_size), found "
            f"{len(tokenizer)}; take the tokenizer that was saved with the model, or a larger "
            "vocabulary"
        )
    if tokenizer.bos_token_id is None or tokenizer.eos_token_id is None:
        raise DataError(
            "tokenizer: expected one with a token for the beginning (bos_token) and one for the "
            f"end (eos_token) of a story, found {tokenizer.bos_token} and {tokenizer.eos_token}"
        )


def _grammar(
    settings: _Settings, tokenizer: "transformers.PreTrainedTokenizerFast | None"
) -> Corpus:
    import datasets  # noqa: PLC0415

    grammar = Grammar()
    own = grammar.tokenizer()
    _check_tokenizer(own, settings.vocab_size)
    if tokenizer is not None and tokenizer.get_vocab() != own.get_vocab():
        raise DataError(
            "tokenizer: expected the grammar's own, or none, found one with other tokens; the "
            "grammar is a language of its own, and a model for another cannot read it"
        )
    ids = grammar.sample(_GRAMMAR_SENTENCES, settings.n_ctx, settings.seed).numpy()
    held_out = round(_GRAMMAR_SENTENCES * settings.validation_share)
    validation, train = (
        datasets.Dataset.from_dict({"input_ids": part.astype(np.int32)}).with_format("torch")
        for part in np.split(ids, [held_out])
    )
    return Corpus("grammar", own, train, validation)


def _build(
    folder: Path,
    name: str,
    texts: Iterable[str],
    settings: _Settings,
    tokenizer: "transformers.PreTrainedTokenizerFast | None",
) -> None:
    """Fill `folder` with the tokenizer and an Arrow file of blocks for each split."""
    # datasets takes seconds to import, and images do without it.
    import datasets  # noqa: PLC0415

    stories_file = folder / "stories.arrow"
    write_stories(stories_file, batched(_distinct(texts), _BATCH))
    stories = datasets.Dataset.from_file(str(stories_file))
    order = np.random.default_rng(settings.seed).permutation(len(stories))
    held_out = max(1, round(len(stories) * settings.validation_share))
    if len(stories) <= held_out:
        raise DataError(
            f"{name}: expected at least one story for training and one for validation, found "
            f"{len(stories)} distinct ones; end each story with a line <|endoftext|>"
        )
    splits = {"train": order[held_out:], "validation": order[:held_out]}
    if tokenizer is None:
        tokenizer = train_tokenizer(_chosen(stories, splits["train"]), settings.vocab_size)
    tokenizer.save_pretrained(folder / "tokenizer")
    for split, chosen in splits.items():
        blocks = _blocks(_tokens(_chosen(stories, chosen), tokenizer), settings.n_ctx)
        if not write_blocks(folder / f"{split}.arrow", blocks, settings.n_ctx):
            found = sum(map(len, _tokens(_chosen(stories, chosen), tokenizer)))
            raise DataError(
                f"{name}: expected at least {settings.n_ctx} tokens for {split}, one block "
                f"(n_ctx), found {found}; give more text, or a shorter n_ctx"
            )
    del stories
    stories_file.unlink()


def _distinct(texts: Iterable[str]) -> Iterator[str]:
    """Give each text cleaned, and of those that are equal but for their case only the first."""
    seen: set[bytes] = set()
    for text in map(clean, texts):
        # 128 bits: among a billion stories no two meet by chance.
        digest = hashlib.blake2b(text.lower().encode(), digest_size=16).digest()
        if text and digest not in seen:
            seen.add(digest)
            yield text


def _chosen(stories: "datasets.Dataset", order: Int[np.ndarray, " chosen"]) -> Iterator[str]:
    for start in range(0, len(order), _BATCH):
        yield from stories[order[start : start + _BATCH]]["text"]


def _tokens(
    texts: Iterable[str], tokenizer: "transformers.PreTrainedTokenizerFast"
) -> Iterator[list[int]]:
    """Give [BOS] text [EOS] of all texts, joined, in pieces."""
    for batch in batched(texts, _BATCH):
        joined: list[int] = []
        # A story may spell [BOS]: there it is text.
        encoded = tokenizer(
            batch, add_special_tokens=False, split_special_tokens=True, verbose=False
        )
        for ids in encoded["input_ids"]:
            joined += [tokenizer.bos_token_id, *ids, tokenizer.eos_token_id]
        yield joined


def _blocks(tokens: Iterable[list[int]], n_ctx: int) -> Iterator[Int32[np.ndarray, "blocks n_ctx"]]:
    """Cut the joined pieces; what is left over at the end is dropped."""
    left_over: list[int] = []
    for piece in tokens:
        left_over += piece
        whole = len(left_over) // n_ctx * n_ctx
        yield np.array(left_over[:whole], dtype=np.int32).reshape(-1, n_ctx)
        left_over = left_over[whole:]


def _open(folder: Path, name: str) -> Corpus:
    import transformers  # noqa: PLC0415

    try:
        train, validation = (
            open_rows(folder / f"{split}.arrow") for split in ("train", "validation")
        )
        tokenizer = transformers.PreTrainedTokenizerFast.from_pretrained(folder / "tokenizer")
    except (OSError, ValueError) as cause:
        raise DataError(
            f"{folder}: expected the cache of a corpus, found {type(cause).__name__}: {cause}; "
            "delete the folder, and it will be made again"
        ) from cause
    return Corpus(name, tokenizer, train, validation)
