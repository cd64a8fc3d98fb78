"""Texts as rows of token ids: read, split, tokenized and packed once, then opened from a cache."""

import hashlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Annotated, Any, TypeVar

import numpy as np
from huggingface_hub import constants

from bilens.checks import check_count
from bilens.data.deep_grammar import DeepGrammar
from bilens.data.grammar import Grammar
from bilens.data.texts import clean, read_texts, text_files
from bilens.data.tokenizer import read_tokenizer, train_tokenizer
from bilens.errors import CheckpointError, DataError
from bilens.files import file_errors, folder_written_whole
from bilens.lazy_imports import datasets, lazy_import, transformers
from bilens.settings import Between, CheckedSettings, Size

pc = lazy_import("pyarrow.compute")

Item = TypeVar("Item", bound=Any)

CACHE_VERSION = 2  # part of every cache's name: a changed layout or cleaning needs a new one
ROWS, CHARACTERS = 1000, 2**20  # taken at once
GRAMMAR_SENTENCES = 50_000
LANGUAGES = {"grammar": Grammar, "deep-grammar": DeepGrammar}
SHARES = 10_000


@dataclass(frozen=True, eq=False)
class Corpus:
    """Rows of token ids, split into training and validation.

    Attributes:
        name: what it was loaded by.
        tokenizer: its ids are those of the rows.
        train: a column `input_ids` of int64 tensors. `Trainer` takes it as it is, with a collator
            that makes the labels.
        validation: as `train`, from other texts.
    """

    name: str
    tokenizer: "transformers.PreTrainedTokenizerFast"
    train: "datasets.Dataset"
    validation: "datasets.Dataset"


@dataclass(frozen=True)
class _Settings(CheckedSettings):
    n_ctx: Annotated[int, Between(2, 2**20)]
    validation_share: Annotated[float, Between(0, 0.99, above=True)]
    vocab_size: Size = 4096
    seed: Annotated[int, Between(0, 2**32 - 1)] = 0
    shortest: Annotated[int, Between(2, 2**20)] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_count("shortest", self.shortest or 1, self.n_ctx, "tokens of a row")


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

    Stories are cleaned (`clean`), of equal ones (but for their case) the first stays, they are
    shuffled and split, each becomes [BOS] story [EOS], and all of a split are joined and cut into
    rows; what is left over at its end is dropped. The rows are kept for the next time, by the files
    (their size and time of change) and arguments. Memory holds a digest of each story and the texts
    of one batch.

    Args:
        name: "grammar" or "deep-grammar", languages whose true probabilities are known (`Grammar`,
            `DeepGrammar`; each row is a sentence), or what `read_texts` takes.
        n_ctx: tokens of a row.
        vocab_size: the largest number of tokens; a tokenizer is trained on the training split.
        tokenizer: used instead; it must have tokens for beginning and end.
        data_dir: as in `read_texts`.
        cache_dir: where rows are kept; by default the folder bilens in Hugging Face's (HF_HOME).
        validation_share: share of the stories that are held out.
        seed: draws the order and the split, and the sentences of the grammar.

    Raises:
        DataError: as in `read_texts`, a split is shorter than a row, the tokenizer does not fit,
            or what is kept is damaged or cannot be written.

    Source: Pearce et al. 2024, appendices C.3 and C.4.
    """
    settings = _Settings(n_ctx, validation_share, vocab_size, seed)
    if tokenizer is not None:
        _check_tokenizer(tokenizer, vocab_size)
    if name in LANGUAGES:
        return _synthetic(str(name), settings, tokenizer)

    def build(draft: Path) -> None:
        _build(draft, map(clean, read_texts(name, data_dir)), settings, tokenizer)

    own = None if tokenizer is None else tokenizer.backend_tokenizer.to_str()
    return _open(_cached(name, data_dir, cache_dir, (astuple(settings), own), build), str(name))


def load_documents(
    name: str | Path,
    tokenizer: "transformers.PreTrainedTokenizerFast",
    *,
    n_ctx: int = 512,
    shortest: int | None = None,
    validation_share: float = 0.05,
    data_dir: str | Path | None = None,
    cache_dir: str | Path | None = None,
) -> Corpus:
    """Load texts in the tokens of a model that is trained already.

    As `load_corpus`, but nothing is cleaned or shuffled: the model knows text as it is written.
    Each has the ends that its tokenizer gives it, or else an end of text behind it. Which are held
    out follows from the texts themselves, so it is the same for every model.

    Args:
        name: what `read_texts` takes.
        tokenizer: of the model.
        n_ctx: tokens of a row.
        shortest: texts of so many tokens to `n_ctx` are a row each, and others are left out. By
            default all are joined, and cut into rows of `n_ctx`.
        validation_share: share of the texts that are held out.
        data_dir: as in `read_texts`.
        cache_dir: as in `load_corpus`.

    Raises:
        DataError: as in `load_corpus`.

    Source: Pearce et al. 2024, appendix D, where texts have 384 to 512 tokens.
    """
    settings = _Settings(n_ctx, validation_share, shortest=shortest)
    bare = tokenizer("a")["input_ids"][:1] != [tokenizer.bos_token_id]
    end = [tokenizer.eos_token_id] if bare and tokenizer.eos_token_id is not None else []
    held_out = round(SHARES * validation_share)

    def build(draft: Path) -> None:
        for split in ("train", "validation"):
            distinct = _distinct(read_texts(name, data_dir), str)
            held = split == "validation"
            texts = (text for text in distinct if (_digest(text) % SHARES < held_out) == held)
            _write_split(draft / f"{split}.arrow", _encoded(texts, tokenizer, [], end), settings)

    own = tokenizer.backend_tokenizer.to_str()
    parts = (astuple(settings), own, end)
    return _open(_cached(name, data_dir, cache_dir, parts, build), str(name), tokenizer)


def _check_tokenizer(tokenizer: "transformers.PreTrainedTokenizerFast", vocab_size: int) -> None:
    if len(tokenizer) > vocab_size:
        raise DataError(
            f"tokenizer has {len(tokenizer)} tokens, expected at most vocab_size={vocab_size}; "
            "take the one that was saved with the model"
        )
    if tokenizer.bos_token_id is None or tokenizer.eos_token_id is None:
        raise DataError(
            f"tokenizer has bos_token={tokenizer.bos_token} and eos_token={tokenizer.eos_token}, "
            "expected a token for the beginning and one for the end of a story"
        )


def _synthetic(
    name: str, settings: _Settings, tokenizer: "transformers.PreTrainedTokenizerFast | None"
) -> Corpus:
    language = LANGUAGES[name]()
    own = language.tokenizer()
    _check_tokenizer(own, settings.vocab_size)
    if tokenizer is not None and tokenizer.get_vocab() != own.get_vocab():
        raise DataError(
            f"tokenizer has other tokens than {name}, expected its own, or none; a model of "
            "another language cannot read it"
        )
    ids = language.sample(GRAMMAR_SENTENCES, settings.n_ctx, settings.seed).int().numpy()
    held_out = round(GRAMMAR_SENTENCES * settings.validation_share)
    validation, train = (
        datasets.Dataset.from_dict({"input_ids": part}).with_format("torch")
        for part in np.split(ids, [held_out])
    )
    return Corpus(name, own, train, validation)


def _build(
    folder: Path,
    texts: Iterable[str],
    settings: _Settings,
    tokenizer: "transformers.PreTrainedTokenizerFast | None",
) -> None:
    """Fill `folder` with the tokenizer and the rows of each split."""
    kept = folder / "stories.arrow"
    _write(kept, _distinct(texts, str.lower), "text")
    stories = datasets.Dataset.from_file(str(kept))
    held_out = max(1, round(len(stories) * settings.validation_share))
    if len(stories) <= held_out:
        raise DataError(
            f"The corpus has {len(stories)} distinct stories, expected at least one for training "
            "and one for validation; end each story with a line <|endoftext|>"
        )
    order = np.random.default_rng(settings.seed).permutation(len(stories))
    train, validation = stories.select(order[held_out:]), stories.select(order[:held_out])
    if tokenizer is None:
        tokenizer = train_tokenizer(train["text"], settings.vocab_size)
    tokenizer.save_pretrained(folder / "tokenizer")
    ends = [tokenizer.bos_token_id], [tokenizer.eos_token_id]
    for split, rows in (("train", train), ("validation", validation)):
        ids = _encoded(rows["text"], tokenizer, *ends, add_special_tokens=False)
        _write_split(folder / f"{split}.arrow", ids, settings)
    kept.unlink()


def batched(items: Iterable[Item], size: int, length: int | None = None) -> Iterator[list[Item]]:
    """The items of any stream in lists of `size`, the last of which may be shorter.

    A list also ends where its items, texts or lists, have this `length` together.
    """
    batch: list[Item] = []
    total = 0
    for item in items:
        batch.append(item)
        total += len(item) if length else 0
        if len(batch) == size or (length and total >= length):
            yield batch
            batch, total = [], 0
    if batch:
        yield batch


def _digest(text: str) -> int:
    # 128 bits: among a billion texts no two meet by chance.
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=16).digest())


def _distinct(texts: Iterable[str], folded: Callable[[str], str]) -> Iterator[str]:
    """Give each text, but of those that are equal when folded only the first."""
    seen: set[int] = set()
    for text in texts:
        digest = _digest(folded(text))
        if text and digest not in seen:
            seen.add(digest)
            yield text


def _encoded(
    texts: Iterable[str],
    tokenizer: "transformers.PreTrainedTokenizerFast",
    start: list[int],
    end: list[int],
    **how: Any,
) -> Iterator[list[int]]:
    for batch in batched(texts, ROWS, CHARACTERS):
        # A text may spell a special token: there it is text.
        encoded = tokenizer(batch, split_special_tokens=True, verbose=False, **how)
        yield from ([*start, *ids, *end] for ids in encoded["input_ids"])


def _packed(texts: Iterable[list[int]], length: int) -> Iterator[list[int]]:
    """Cut the joined texts; what is left over at the end is dropped."""
    joined: list[int] = []
    for ids in texts:
        joined += ids
        whole = len(joined) // length * length
        yield from (joined[i : i + length] for i in range(0, whole, length))
        joined = joined[whole:]


def _write_split(path: Path, texts: Iterable[list[int]], settings: _Settings) -> None:
    least, most = settings.shortest, settings.n_ctx
    if least is None:
        rows = _packed(texts, most)
    else:
        rows = (ids for ids in texts if least <= len(ids) <= most)
    if not _write(path, rows, "input_ids"):
        raise DataError(
            f"The corpus has too little text for {path.stem}, expected a row of {least or most} to "
            f"{most} tokens (n_ctx) or more; give more text, or other lengths"
        )


def _write(path: Path, rows: Iterable[Any], column: str) -> int:
    """Write texts, or rows of token ids, as an Arrow file; return how many there were."""
    text, ids = datasets.Value("string"), datasets.List(datasets.Value("int32"))
    features = datasets.Features({column: text if column == "text" else ids})
    with datasets.arrow_writer.ArrowWriter(path=str(path), features=features) as writer:
        for batch in batched(rows, ROWS, CHARACTERS):
            writer.write_batch({column: batch})
        return int(writer.finalize()[0])


def _cached(
    name: str | Path,
    data_dir: str | Path | None,
    cache_dir: str | Path | None,
    parts: tuple[Any, ...],
    build: Callable[[Path], None],
) -> Path:
    """The folder for these texts and settings, which `build` fills if it is not there yet."""
    paths = [path.resolve() for path in text_files(name, data_dir)]
    files = [(str(path), path.stat().st_size, path.stat().st_mtime_ns) for path in paths]
    key = datasets.fingerprint.Hasher.hash((CACHE_VERSION, files or str(name), *parts))
    root = Path(constants.HF_HOME) / "bilens" if cache_dir is None else Path(cache_dir)
    folder = root / f"{Path(name).resolve().name[:100]}-{key}"
    try:
        with file_errors(folder):
            known = folder.is_dir()
        if not known:
            with folder_written_whole(folder) as draft:
                build(draft)
    except CheckpointError as error:
        raise DataError(f"{error} Token ids are kept there; HF_HOME moves it.") from error
    return folder


def _open(
    folder: Path, name: str, tokenizer: "transformers.PreTrainedTokenizerFast | None" = None
) -> Corpus:
    try:
        own = tokenizer or read_tokenizer(folder / "tokenizer")
        paths = (folder / f"{split}.arrow" for split in ("train", "validation"))
        splits = [datasets.Dataset.from_file(str(path)) for path in paths]
        for split in splits:
            split.data.table.validate(full=True)
            ends = pc.min_max(pc.list_flatten(split.data.table["input_ids"])).as_py()
            if not 0 <= ends["min"] <= ends["max"] < len(own):
                raise LookupError(f"{ends['max']} is not one of the {len(own)} tokens")
    except (OSError, ValueError, LookupError, TypeError, NotImplementedError) as error:
        raise DataError(
            f"{folder}, where token ids are kept, is damaged ({error}). Delete it, and it will be "
            "made again."
        ) from error
    return Corpus(name, own, *(split.with_format("torch") for split in splits))
