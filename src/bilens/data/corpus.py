"""Texts as rows of token ids: read, split, tokenized and packed, in the cache of `datasets`."""

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Annotated, Any, TypeVar

import numpy as np

from bilens.checks import check_count, checked
from bilens.data.languages import DeepGrammar, Grammar
from bilens.data.texts import (
    HUB,
    SPECIAL_TOKENS,
    clean,
    read_texts,
    text_files,
    tokenize,
    train_tokenizer,
)
from bilens.errors import BilensError, DataError
from bilens.hub import named_folder
from bilens.lazy_imports import datasets, tokenizers, transformers
from bilens.options import Cleaning
from bilens.settings import Between, Seed, Size

Item = TypeVar("Item")

GRAMMAR_SENTENCES = 50_000
LANGUAGES = {"grammar": Grammar, "deep-grammar": DeepGrammar}

Tokens = Annotated[int, Between(2, 2**20)]
"""Number of tokens of a text to learn from."""
HeldOut = Annotated[float, Between(0, 0.99, above=True)]
"""Share of the texts for validation."""


@dataclass(frozen=True, eq=False)
class Corpus:
    """Rows of token ids, split into training and validation.

    Attributes:
        name: name of the corpus.
        tokenizer: tokenizer of the rows.
        rows: rows of the training split, or a function that makes them.
        validation: rows of other texts: a column `input_ids` of int64 tensors.
        origin: arguments that read the same texts from any working directory, as training.json
            names them, data and data_dir, and data_digest, the SHA-256 of their files.
    """

    name: str
    tokenizer: "transformers.PreTrainedTokenizerFast"
    rows: "datasets.Dataset | Callable[[], datasets.Dataset]" = field(repr=False)
    validation: "datasets.Dataset"
    origin: Mapping[str, str | None] = field(default_factory=dict, repr=False)

    @property
    def provenance(self) -> dict[str, str | None]:
        """Entries of training.json: the name and `origin`."""
        return {"data": self.name, **self.origin}

    @cached_property
    def train(self) -> "datasets.Dataset":
        """Rows as those of `validation`, made on their first use: readings do without them."""
        return self.rows() if callable(self.rows) else self.rows


@checked
def load_corpus(
    name: str | Path,
    *,
    n_ctx: Tokens,
    vocab_size: Size = 4096,
    tokenizer: "transformers.PreTrainedTokenizerFast | None" = None,
    data_dir: str | Path | None = None,
    validation_share: HeldOut = 0.05,
    seed: Seed = 0,
    clean: Cleaning | None = None,
) -> Corpus:
    """Load a corpus by its name or from files, ready for training.

    Of equal stories the first stays. They are shuffled and split, and each becomes [BOS] story
    [EOS]. The stories of a split are joined and cut into rows, a thousand stories at a time; an
    incomplete last row is dropped. Stories and rows are cached by `datasets`
    (HF_DATASETS_CACHE, HF_HOME), by the arguments and by the sizes and modification times of files.

    Args:
        name: "grammar" or "deep-grammar", languages with known probabilities (`Grammar`,
            `DeepGrammar`; each row is a sentence), or a source for `read_texts`.
        n_ctx: tokens of a row.
        vocab_size: the largest number of tokens; a tokenizer is trained on the training split.
        tokenizer: used instead; it must have tokens for beginning and end.
        data_dir: as in `read_texts`.
        validation_share: share of the stories for validation.
        seed: seed of the order and the split, and of the sentences of the grammar.
        clean: "none" keeps texts as they are, with capitals and line ends; "tinystories" is
            `bilens.data.clean`, and stories that differ only in case are equal. By default the
            source's own: "tinystories" for that name, and "none" for files.

    Raises:
        DataError: as in `read_texts`; or a split is shorter than a row, or the tokenizer does not
            fit.

    Source: Pearce et al. 2024, appendices C.3 and C.4.
    """
    if tokenizer is not None:
        _check_tokenizer(tokenizer, vocab_size)
    if name in LANGUAGES:
        if clean is not None:
            raise DataError(f"clean={clean!r} has no effect on {name}; leave it out")
        sizes = n_ctx, vocab_size, validation_share, seed
        return _synthetic(str(name), tokenizer, *sizes)
    clean = clean or cleaning_of(name)
    stories = _distinct_texts(name, data_dir, cleaned=clean == "tinystories")
    held_out = max(1, round(len(stories) * validation_share))
    if len(stories) <= held_out:
        raise DataError(
            f"Distinct stories in the corpus: {len(stories)}, expected at least one for training "
            "and one for validation; end each story with a line <|endoftext|>"
        )
    parts = stories.train_test_split(test_size=held_out, seed=seed)
    if tokenizer is None:
        arguments = {"stories": parts["train"], "vocab_size": vocab_size, "clean": clean}
        (row,) = _cached(_rows_of_tokenizer, arguments)
        backend = tokenizers.Tokenizer.from_str(row["text"])
        tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=backend, **SPECIAL_TOKENS)
    ends = [tokenizer.bos_token_id], [tokenizer.eos_token_id]
    train, validation = (
        _tokenized(parts[split], tokenizer, *ends, n_ctx, add_special_tokens=False)
        for split in ("train", "test")
    )
    origin = {**_origin(name, data_dir), "clean": clean}
    return Corpus(Path(name).name, tokenizer, train, validation, origin)


def cleaning_of(name: str | Path) -> Cleaning:
    """Return what is done to the texts of a source by default."""
    return "tinystories" if str(name) in HUB else "none"


@checked
def load_documents(
    name: str | Path,
    tokenizer: "transformers.PreTrainedTokenizerFast",
    *,
    n_ctx: Tokens = 512,
    shortest: Tokens | None = None,
    validation_share: HeldOut = 0.05,
    data_dir: str | Path | None = None,
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

    Raises:
        DataError: as in `load_corpus`.

    Source: Pearce et al. 2024, appendix D, where texts have 384 to 512 tokens.
    """
    check_count("shortest", shortest or 1, n_ctx, "tokens of a row")
    if str(name) in LANGUAGES:
        raise DataError(
            f"data={str(name)!r} is a language with tokens of its own, on which a model is trained "
            f"from scratch; expected {', '.join(HUB)}, or the path of texts"
        )
    bare = tokenize(tokenizer, "a")[:1] != [tokenizer.bos_token_id]
    # A tokenizer that begins texts marks where each starts; without that the end has to.
    end = [tokenizer.eos_token_id] if bare and tokenizer.eos_token_id is not None else []
    texts = _distinct_texts(name, data_dir, cleaned=False)

    def rows(held_out: bool) -> "datasets.Dataset":
        arguments = {"share": validation_share, "held_out": held_out}
        part = texts.filter(_belongs, input_columns="text", fn_kwargs=arguments)
        return _tokenized(part, tokenizer, [], end, n_ctx, shortest)

    origin = _origin(name, data_dir)
    return Corpus(Path(name).name, tokenizer, lambda: rows(False), rows(True), origin)


def batched(items: Iterable[Item], size: int) -> Iterator[list[Item]]:
    """Yield the items of a stream in lists of `size`; the last list may be shorter."""
    stream = iter(items)
    while batch := list(islice(stream, size)):
        yield batch


def _belongs(text: str, share: float, held_out: bool) -> bool:
    # By its digest, not its place: another order or more texts move no text to the other split.
    return (_digest(text) % 10_000 < round(10_000 * share)) == held_out


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
    name: str,
    tokenizer: "transformers.PreTrainedTokenizerFast | None",
    n_ctx: int,
    vocab_size: int,
    validation_share: float,
    seed: int,
) -> Corpus:
    language = LANGUAGES[name]()
    words = language.tokenizer()
    _check_tokenizer(words, vocab_size)
    if tokenizer is not None and tokenizer.get_vocab() != words.get_vocab():
        raise DataError(
            f"tokenizer has other tokens than {name}, expected the tokenizer of {name}, or None; a "
            "model of another language cannot read it"
        )
    ids = language.sample(GRAMMAR_SENTENCES, n_ctx, seed).int().numpy()
    held_out = round(GRAMMAR_SENTENCES * validation_share)
    validation, train = (
        datasets.Dataset.from_dict({"input_ids": part}).with_format("torch")
        for part in np.split(ids, [held_out])
    )
    return Corpus(name, words, train, validation)


def _distinct_texts(
    name: str | Path, data_dir: str | Path | None, *, cleaned: bool
) -> "datasets.Dataset":
    """Return the distinct texts of a source in a column `text`, read once."""
    files = _stamped_files(name, data_dir)
    arguments = {"source": str(name), "data_dir": data_dir, "cleaned": cleaned, "files": files}
    return _cached(_rows_of_texts, arguments)


def _origin(name: str | Path, data_dir: str | Path | None) -> dict[str, str | None]:
    """Return `Corpus.origin`; the hub gives no files, and so no digest."""
    files = _stamped_files(name, data_dir)
    folder = named_folder(data_dir) if str(name) in HUB else None
    digest = _cached(_rows_of_digest, {"files": files})[0]["text"] if files else None
    return {
        "data": str(name) if str(name) in HUB else str(Path(name).resolve()),
        "data_dir": None if folder is None else str(folder.resolve()),
        "data_digest": digest,
    }


Stamped = tuple[tuple[str, int, int], ...]
"""Files with their sizes and times of modification."""


def _stamped_files(name: str | Path, data_dir: str | Path | None) -> Stamped:
    """Return files in the key of a cache, so that a file that changes is read again."""
    paths = [path.resolve() for path in text_files(name, data_dir)]
    return tuple((str(path), path.stat().st_size, path.stat().st_mtime_ns) for path in paths)


def _rows_of_digest(files: Stamped, version: int) -> Iterator[dict[str, str]]:
    whole = hashlib.sha256()
    for path, _, _ in files:
        with Path(path).open("rb") as file:
            whole.update(hashlib.file_digest(file, "sha256").digest())
    yield {"text": whole.hexdigest()}


def _rows_of_texts(
    source: str, data_dir: str | Path | None, cleaned: bool, files: tuple[Any, ...], version: int
) -> Iterator[dict[str, str]]:
    digests: set[int] = set()
    n_in = n_out = 0
    for text in read_texts(source, data_dir):
        story = clean(text) if cleaned else text
        n_in, n_out = n_in + len("".join(text.split())), n_out + len("".join(story.split()))
        digest = _digest(story.lower() if cleaned else story)
        if story and digest not in digests:
            digests.add(digest)
            yield {"text": story}
    if 2 * n_out < n_in:
        raise DataError(
            f"data={source!r}: cleaning leaves {n_out:,} of {n_in:,} characters, those of "
            "ASCII; expected texts in Latin letters"
        )


def _rows_of_tokenizer(
    stories: "datasets.Dataset", vocab_size: int, clean: Cleaning, version: int
) -> Iterator[dict[str, str]]:
    tokenizer = train_tokenizer(stories["text"], vocab_size, clean)
    yield {"text": tokenizer.backend_tokenizer.to_str()}


def _cached(
    generate: Callable[..., Iterator[dict[str, str]]], arguments: dict[str, Any]
) -> "datasets.Dataset":
    """Return generated rows of a column `text`, from the cache of `datasets` if they are there."""
    place = str(datasets.config.HF_DATASETS_CACHE)
    try:
        return datasets.Dataset.from_generator(
            generate,
            features=datasets.Features(text=datasets.Value("string")),
            # A changed cleaning needs another version.
            gen_kwargs=arguments | {"version": 4},
            cache_dir=place,
        )
    except datasets.exceptions.DatasetGenerationError as error:
        # It wraps what the generator raised.
        if isinstance(error.__cause__, BilensError):
            raise error.__cause__ from None
        raise
    except (OSError, ValueError) as error:
        raise DataError(
            f"{place}, the cache of texts and tokens, cannot be used ({error}). Delete it, or name "
            "another by HF_DATASETS_CACHE."
        ) from error


def _digest(text: str) -> int:
    # 128 bits: among a billion texts no two meet by chance.
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=16).digest())


def _tokenized(
    texts: "datasets.Dataset",
    tokenizer: "transformers.PreTrainedTokenizerFast",
    start: list[int],
    end: list[int],
    most: int,
    least: int | None = None,
    **options: Any,
) -> "datasets.Dataset":
    """Return rows of token ids, in the format of torch: texts of `least` to `most`, or joined."""

    def rows(batch: list[str]) -> dict[str, list[list[int]]]:
        # A text may spell a special token, which is then text.
        rows = tokenize(tokenizer, batch, split_special_tokens=True, verbose=False, **options)
        texts = [[*start, *ids, *end] for ids in rows]
        if least is not None:
            return {"input_ids": [ids for ids in texts if least <= len(ids) <= most]}
        # Texts are joined before they are cut, so that no row is padded.
        tokens = [token for ids in texts for token in ids]
        ends = range(most, len(tokens) + 1, most)
        return {"input_ids": [tokens[stop - most : stop] for stop in ends]}

    # Any vocabulary fits into int32, at half the space of the tensors' int64.
    features = datasets.Features(input_ids=datasets.List(datasets.Value("int32")))
    tokens = texts.map(
        rows, batched=True, input_columns="text", remove_columns="text", features=features
    )
    if not len(tokens):
        lengths = f"{most}" if least in (None, most) else f"{least} to {most}"
        raise DataError(
            f"the corpus has too little text, expected a row of {lengths} tokens or more in each "
            "split; use more text, or shorter rows (--n-ctx)"
        )
    return tokens.with_format("torch")


def first_texts(corpus: Corpus, n_tokens: int = 4096) -> Iterator[Any]:
    """Yield the token ids (time,) of validation texts, up to a number of tokens."""
    for row in corpus.validation:
        if n_tokens <= 0:
            return
        yield row["input_ids"]
        n_tokens -= len(row["input_ids"])
