"""Texts as rows of token ids: read, split, tokenized and packed once, then cached."""

import hashlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import astuple, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, TypeVar

import numpy as np
from huggingface_hub import constants

from bilens.checks import check_count, checked
from bilens.data.languages import DeepGrammar, Grammar
from bilens.data.texts import clean, read_texts, read_tokenizer, text_files, train_tokenizer
from bilens.errors import CheckpointError, DataError
from bilens.files import file_errors, folder_written_whole
from bilens.lazy_imports import datasets, lazy_import, transformers
from bilens.settings import Between, CheckedSettings, Size

pc = lazy_import("pyarrow.compute", install="bilens[train]")

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
        name: name of the corpus.
        tokenizer: tokenizer of the rows.
        train: a column `input_ids` of int64 tensors. `Trainer` accepts it with a collator that adds
            the labels.
        validation: as `train`, from other texts.
    """

    name: str
    tokenizer: "transformers.PreTrainedTokenizerFast"
    train: "datasets.Dataset" = field(repr=False)
    validation: "datasets.Dataset"


class _Documents(Corpus):
    """A corpus whose training rows are tokenized on their first use: readings do without them."""

    def __init__(
        self,
        name: str,
        tokenizer: "transformers.PreTrainedTokenizerFast",
        split: Callable[[str], "datasets.Dataset"],
    ) -> None:
        # As a frozen dataclass has them; `train` is left to be made.
        held_out = split("validation")
        self.__dict__.update(name=name, tokenizer=tokenizer, validation=held_out, _split=split)

    @cached_property
    def train(self) -> "datasets.Dataset":
        """Rows of the texts that are not held out."""
        split: datasets.Dataset = self.__dict__["_split"]("train")
        return split


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


@checked
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

    Stories are cleaned (`clean`). Of stories that differ only in case the first stays. They are
    shuffled and split, and each becomes [BOS] story [EOS]. The stories of a split are joined and
    cut into rows; an incomplete last row is dropped. The rows are cached by the arguments and by
    the sizes and modification times of the files. Memory holds a digest of each story and the
    texts of one batch.

    Args:
        name: "grammar" or "deep-grammar", languages with known probabilities (`Grammar`,
            `DeepGrammar`; each row is a sentence), or a source for `read_texts`.
        n_ctx: tokens of a row.
        vocab_size: the largest number of tokens; a tokenizer is trained on the training split.
        tokenizer: used instead; it must have tokens for beginning and end.
        data_dir: as in `read_texts`.
        cache_dir: folder of the cached rows; by default the folder bilens in Hugging Face's
            (HF_HOME).
        validation_share: share of the stories for validation.
        seed: seed of the order and the split, and of the sentences of the grammar.

    Raises:
        DataError: as in `read_texts`; or a split is shorter than a row, the tokenizer does not fit,
            or the cache is damaged or cannot be written.

    Source: Pearce et al. 2024, appendices C.3 and C.4.
    """
    settings = _Settings(n_ctx, validation_share, vocab_size, seed)
    if tokenizer is not None:
        _check_tokenizer(tokenizer, vocab_size)
    if name in LANGUAGES:
        return _synthetic(str(name), settings, tokenizer)

    def build(draft: Path) -> None:
        _build(draft, map(clean, read_texts(name, data_dir)), settings, tokenizer)

    rules = None if tokenizer is None else tokenizer.backend_tokenizer.to_str()
    return _open(_cached(name, data_dir, cache_dir, (astuple(settings), rules), build), str(name))


@checked
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
    """Load texts in the tokens of a pretrained model.

    As `load_corpus`, but texts are neither cleaned nor shuffled. Each has the beginning and end
    tokens that its tokenizer adds, or else an end of text after it. The split depends only on a
    text itself, so it is the same for every model. `train` is tokenized on its first use.

    Args:
        name: a source for `read_texts`.
        tokenizer: tokenizer of the model.
        n_ctx: tokens of a row.
        shortest: least tokens of a text. Each text of `shortest` to `n_ctx` tokens is a row, and
            others are dropped. By default all are joined, and cut into rows of `n_ctx`.
        validation_share: share of the texts for validation.
        data_dir: as in `read_texts`.
        cache_dir: as in `load_corpus`.

    Raises:
        DataError: as in `load_corpus`.

    Source: Pearce et al. 2024, appendix D, where texts have 384 to 512 tokens.
    """
    settings = _Settings(n_ctx, validation_share, shortest=shortest)
    bare = tokenizer("a")["input_ids"][:1] != [tokenizer.bos_token_id]
    # A tokenizer that begins texts marks where each starts; without that the end has to.
    end = [tokenizer.eos_token_id] if bare and tokenizer.eos_token_id is not None else []
    held_out = round(SHARES * validation_share)

    def rows(split: str) -> "datasets.Dataset":
        def build(draft: Path) -> None:
            distinct = _distinct(read_texts(name, data_dir), str)
            held = split == "validation"
            # By its digest, not its place: another order or more texts move no text to the other
            # split.
            texts = (text for text in distinct if (_digest(text) % SHARES < held_out) == held)
            _write_split(draft / f"{split}.arrow", _encoded(texts, tokenizer, [], end), settings)

        folder = _cached(name, data_dir, cache_dir, (*parts, split), build)
        with _cache_errors(folder):
            return _open_split(folder, split, tokenizer)

    parts = (astuple(settings), tokenizer.backend_tokenizer.to_str(), end)
    return _Documents(str(name), tokenizer, rows)


def _check_tokenizer(tokenizer: "transformers.PreTrainedTokenizerFast", vocab_size: int) -> None:
    if len(tokenizer) > vocab_size:
        raise DataError(
            f"tokenizer has {len(tokenizer)} tokens, expected at most vocab_size={vocab_size}; "
            "use the tokenizer that was saved with the model"
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
    words = language.tokenizer()
    _check_tokenizer(words, settings.vocab_size)
    if tokenizer is not None and tokenizer.get_vocab() != words.get_vocab():
        raise DataError(
            f"tokenizer has other tokens than {name}, expected the tokenizer of {name}, or None; a "
            "model of another language cannot read it"
        )
    ids = language.sample(GRAMMAR_SENTENCES, settings.n_ctx, settings.seed).int().numpy()
    held_out = round(GRAMMAR_SENTENCES * settings.validation_share)
    validation, train = (
        datasets.Dataset.from_dict({"input_ids": part}).with_format("torch")
        for part in np.split(ids, [held_out])
    )
    return Corpus(name, words, train, validation)


def _build(
    folder: Path,
    texts: Iterable[str],
    settings: _Settings,
    tokenizer: "transformers.PreTrainedTokenizerFast | None",
) -> None:
    """Fill `folder` with the tokenizer and the rows of each split."""
    path = folder / "stories.arrow"
    _write(path, _distinct(texts, str.lower), "text")
    stories = datasets.Dataset.from_file(str(path))
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
    path.unlink()


def batched(items: Iterable[Item], size: int, length: int | None = None) -> Iterator[list[Item]]:
    """Yield the items of a stream in lists of `size`; the last list may be shorter.

    A list also ends when the lengths of its items add up to `length`.
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
    """Yield the first of all texts that are equal when folded."""
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
        # A text may spell a special token, which is then text.
        encoded = tokenizer(batch, split_special_tokens=True, verbose=False, **how)
        yield from ([*start, *ids, *end] for ids in encoded["input_ids"])


def _packed(texts: Iterable[list[int]], length: int) -> Iterator[list[int]]:
    """Join texts and cut them into rows of `length`; an incomplete last row is dropped."""
    joined: list[int] = []
    for ids in texts:
        joined += ids
        # Texts are joined before they are cut, so that no row is padded.
        end = len(joined) // length * length
        yield from (joined[i : i + length] for i in range(0, end, length))
        joined = joined[end:]


def _write_split(path: Path, texts: Iterable[list[int]], settings: _Settings) -> None:
    least, most = settings.shortest, settings.n_ctx
    if least is None:
        rows = _packed(texts, most)
    else:
        rows = (ids for ids in texts if least <= len(ids) <= most)
    if not _write(path, rows, "input_ids"):
        raise DataError(
            f"The corpus has too little text for {path.stem}, expected a row of {least or most} to "
            f"{most} tokens (n_ctx) or more; use more text, or other lengths"
        )


def _write(path: Path, rows: Iterable[Any], column: str) -> int:
    """Write texts, or rows of token ids, as an Arrow file, and return their number."""
    # Any vocabulary fits into int32, at half the space of the tensors' int64.
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
    """Return the folder for these texts and settings; `build` fills it if it does not exist."""
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
        raise DataError(f"{error} Token ids are cached there; HF_HOME moves it.") from error
    return folder


def _open(folder: Path, name: str) -> Corpus:
    with _cache_errors(folder):
        reader = read_tokenizer(folder / "tokenizer")
        splits = (_open_split(folder, split, reader) for split in ("train", "validation"))
        return Corpus(name, reader, *splits)


def _open_split(
    folder: Path, name: str, tokenizer: "transformers.PreTrainedTokenizerFast"
) -> "datasets.Dataset":
    split = datasets.Dataset.from_file(str(folder / f"{name}.arrow"))
    split.data.table.validate(full=True)
    # Arrow validates its own layout only, and an id beyond the vocabulary fails late, in training.
    ends = pc.min_max(pc.list_flatten(split.data.table["input_ids"])).as_py()
    if not 0 <= ends["min"] <= ends["max"] < len(tokenizer):
        raise LookupError(f"{ends['max']} is not one of the {len(tokenizer)} tokens")
    return split.with_format("torch")


@contextmanager
def _cache_errors(folder: Path) -> Iterator[None]:
    try:
        yield
    except (OSError, ValueError, LookupError, TypeError, NotImplementedError) as error:
        raise DataError(
            f"{folder}, the cache of token ids, is damaged ({error}). Delete it; it will be "
            "written again."
        ) from error
