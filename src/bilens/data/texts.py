"""Texts from files or the hub, one story at a time, their cleaning, and tokenizers.

A tokenizer for reading weights has one token for a word, in any case and at any position.
"""

import glob
import gzip
import json
import os.path
import re
import unicodedata
import zlib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from string import ascii_lowercase
from typing import Any

from bilens.checks import checked
from bilens.errors import BilensError, CheckpointError, DataError, is_panic
from bilens.files import check_downloaded, visible_paths
from bilens.hub import IN_FOLDER, hub_split, is_folder, named_folder
from bilens.lazy_imports import datasets, tokenizers, transformers
from bilens.options import Cleaning
from bilens.settings import Size

HUB = {"tinystories": "roneneldan/TinyStories"}
LONGEST = 2**28
"""Characters of a text, at most."""
SUFFIXES = (".txt", ".txt.gz", ".parquet", ".jsonl")
END_OF_STORY = "<|endoftext|>"
DAMAGED = (OSError, EOFError, ValueError, RecursionError, zlib.error)
"""Errors for damaged files of texts, besides those of `datasets`."""


@checked
def read_texts(source: str | Path, data_dir: str | Path | None = None) -> Iterator[str]:
    """Yield the stories of a corpus in order, unchanged, one at a time.

    `<|endoftext|>` ends a story, wherever it stands. A text file without it in its first 8 million
    characters is also cut at its blank lines, and without blank lines at every line. Parquet and
    jsonl hold a story in the column "text" (or "story"). White space at the ends of a story is
    dropped, as are hidden files of a folder.

    Args:
        source: "tinystories", or the path of a file or of a folder of files: text (.txt, .txt.gz),
            .parquet or .jsonl.
        data_dir: For tinystories: the folder with train.txt.gz and valid.txt.gz, or its parent if
            the folder is called tinystories. By default the environment variable BILENS_DATA; if
            that is unset or empty too, the Hugging Face hub, streamed.

    Raises:
        DataError: The name is unknown, or the hub is out of reach. Or a file is missing, without
            stories, damaged or not UTF-8.

    Source: R. Eldan and Y. Li, "TinyStories: How Small Can Language Models Be and Still Speak
    Coherent English?", 2023, arXiv:2305.07759.
    """
    files = text_files(source, data_dir)
    for path in files:
        yield from _read_file(path)
    if not files:
        instead = f"put {source}/train.txt.gz and {source}/valid.txt.gz {IN_FOLDER}"
        for split in ("train", "validation"):
            with hub_split(HUB[str(source)], split, instead, streaming=True) as rows:
                for row in rows:
                    yield row["text"]


def text_files(source: str | Path, data_dir: str | Path | None = None) -> list[Path]:
    """Return the files that `read_texts` reads, in its order; none when it asks the hub.

    Raises:
        DataError: Unknown name or missing files.
    """
    path, kinds = Path(source), ", ".join(SUFFIXES)
    if str(source) in HUB:
        folder = named_folder(data_dir)
        return [] if folder is None else _known_files(str(source), folder)
    if str(source) and is_folder(path):
        files = [file for file in visible_paths(path) if _suffix(file) and file.is_file()]
        if not files:
            raise DataError(f"{path} is a folder without files {kinds}; choose another")
        return files
    if _suffix(path) and os.path.isfile(path):  # noqa: PTH113  as in is_folder
        return [path]
    raise DataError(
        f"data={str(source)!r}, expected grammar, deep-grammar, {', '.join(HUB)}, or the path of a "
        f"file or a folder of files {kinds}"
    )


def _known_files(name: str, folder: Path) -> list[Path]:
    for place in (folder / name, folder):
        # Both splits are read, one after the other: the validation texts are drawn afresh.
        files = [next(iter(sorted(place.glob(f"{s}.*"))), None) for s in ("train", "valid")]
        if all(files):
            return [path for path in files if path]
    raise DataError(
        f"{folder / name} and {folder} lack train.txt.gz or valid.txt.gz of {name} (also without "
        ".gz, or as .parquet or .jsonl); expected their folder, or its parent"
    )


def _suffix(path: Path) -> str | None:
    return next((suffix for suffix in SUFFIXES if path.name.lower().endswith(suffix)), None)


def _read_file(path: Path) -> Iterator[str]:
    """Yield the stories of a file that are not blank, in order."""
    with suppress(CheckpointError):  # what cannot be read is said below
        check_downloaded(path, "texts", DataError)
    reader = READERS[_suffix(path) or ""]
    empty = True
    try:
        for text in filter(None, reader(path)):
            for story in filter(None, map(str.strip, text.split(END_OF_STORY))):
                empty = False
                yield story
    except BilensError:
        raise
    except (*DAMAGED, datasets.exceptions.DatasetsError) as error:
        raise DataError(
            f"{path} cannot be read ({type(error).__name__}: {error}). Fetch it again, or save it "
            "as text in UTF-8."
        ) from error
    if empty:
        raise DataError(f"{path} holds no stories; leave it out")


def _read_lines(path: Path) -> Iterator[str]:
    opener = gzip.open if path.suffix.lower() == ".gz" else open
    with opener(path, "rt", encoding="utf-8-sig") as file:
        # How a file separates stories is seen from its head; the file is then read by lines.
        head = file.read(2**23).strip()
        file.seek(0)
        is_marked = END_OF_STORY in head
        every_line = not is_marked and not re.search(r"\n[^\S\n]*\n", head)
        lines: list[str] = []
        length = 0
        # In parts: a small packed file may hold a line that is larger than memory.
        while line := file.readline(LONGEST + 1):
            length += len(line)
            if length > LONGEST:
                raise DataError(
                    f"{path} holds a text of more than {LONGEST:,} characters; end texts by "
                    f"{END_OF_STORY}, or by blank lines"
                )
            is_end = END_OF_STORY in line if is_marked else every_line or not line.strip()
            if not is_end:
                lines.append(line)
                continue
            # The next story may begin in the line in which this one ends.
            last, _, rest = line.rpartition(END_OF_STORY) if is_marked else (line, "", "")
            yield "".join([*lines, last])
            lines, length = [rest], len(rest)
        yield "".join(lines)


def _read_table(path: Path) -> Iterator[str | None]:
    # A name of a file is a pattern for `datasets`. By default it reads as many rows as the first
    # group has, which may be none.
    files, options = glob.escape(str(path)), {"split": "train", "streaming": True}
    try:
        rows = datasets.load_dataset("parquet", data_files=files, batch_size=1000, **options)
    except StopIteration:  # an empty file has no first row, whose columns would be read
        return
    for row in rows:
        yield _story(path, row)


def _read_objects(path: Path) -> Iterator[str | None]:
    # Python's own reader: that of `datasets` turns texts that look like dates into dates.
    with path.open(encoding="utf-8-sig") as file:
        for line in filter(str.strip, file):
            row = json.loads(line)
            if not isinstance(row, dict):
                raise DataError(f"{path} holds {line.strip()[:40]!r}, expected an object a line")
            story = _story(path, row)
            # Half of a pair, as \\ud83d, is no text.
            yield story if story is None else story.encode().decode()


def _story(path: Path, row: Mapping[str, Any]) -> str | None:
    names = [name for name in ("text", "story") if name in row]
    if not names:
        raise DataError(
            f"{path} has the columns {', '.join(row)}, expected text or story; rename one"
        )
    # Rows of one file may have different columns.
    story = next((row[name] for name in names if row[name] is not None), None)
    if not isinstance(story, str | None):
        raise DataError(f"{path} holds {str(story)[:40]!r}, expected text as {names[0]}")
    return story


READERS = {
    ".txt": _read_lines,
    ".txt.gz": _read_lines,
    ".parquet": _read_table,
    ".jsonl": _read_objects,
}
"""Functions that read a file, by the end of its name."""


MAPPED = {
    # UTF-8 that was once read as Windows-1252: it is in 83 of 18,399 stories of TinyStories, and is
    # nearly always a quotation mark. Longer spellings first, since the pattern takes the first.
    **{"â€œ": '"', "â€\x9d": '"', "â€™": "'", "â€˜": "'", "â€“": "-", "â€”": "-", "â€¦": "..."},
    **{"â€": '"'},
    **dict.fromkeys("“”„‟″«»", '"'),
    **dict.fromkeys("‘’‚‛′‹›´", "'"),
    **dict.fromkeys("‐‑‒–—―−", "-"),
    **{"⁄": "/", "…": "...", "æ": "ae", "Æ": "AE", "œ": "oe", "Œ": "OE"},
    **{"ø": "o", "Ø": "O", "ł": "l", "Ł": "L", "ß": "ss"},
}
PATTERN = re.compile("|".join(map(re.escape, MAPPED)))


@checked
def clean(text: str) -> str:
    """Return `text` in printable ASCII, on one line, with its case.

    Typographic quotes, dashes and dots become their ASCII counterparts, also if they were garbled
    as "â€œ". Letters lose their accents, and compatibility forms (ligatures, full width) become
    plain. Every other character beyond ASCII is removed. Each run of white space or control
    characters becomes one space. A cleaned text does not change when it is cleaned again.

    Source: Pearce et al. 2024, appendix C.3.
    """
    if not text.isascii():
        # Before what is not ASCII is removed, which would join the words on both sides. Garbled
        # quotes first, which hold control characters.
        text = re.sub(r"[\s\x80-\x9f]", " ", _mapped(text))
        # Twice: an acute accent that stands for an apostrophe would come apart in the
        # decomposition, and the slash of a fraction only comes out of it. In pieces: Python sorts
        # a run of accents in time that grows with its square, and all of them are dropped anyway.
        pieces = (text[start : start + 1000] for start in range(0, len(text), 1000))
        text = "".join(unicodedata.normalize("NFKD", piece) for piece in pieces)
        text = _mapped(text).encode("ascii", "ignore").decode("ascii")
    return " ".join(re.sub(r"[\x00-\x1f\x7f]", " ", text).split())


def _mapped(text: str) -> str:
    return PATTERN.sub(lambda match: MAPPED[match.group()], text)


SPECIAL_TOKENS = {
    "pad_token": "[PAD]",
    "unk_token": "[UNK]",
    "bos_token": "[BOS]",
    "eos_token": "[EOS]",
}


def tokenize(tokenizer: Any, text: str | list[str], **options: Any) -> list[Any]:
    """Return the token ids of a text, or of each of several; all tokenizing is done here.

    Raises:
        BilensError: the tokenizer stops on a text.
    """
    try:
        with _errors_of(tokenizer, f"text={text[:80]!r}"):
            return list(tokenizer(text, **options)["input_ids"])
    except BilensError:
        if not isinstance(text, str):  # which of them it is
            for one in text:
                tokenize(tokenizer, one, **options)
        raise


def write_out(tokenizer: Any, ids: Iterable[int], **options: Any) -> str:
    """Return the text of tokens; what `tokenize` is for texts."""
    numbers = list(map(int, ids))
    with _errors_of(tokenizer, f"ids={numbers[:20]}"):
        return str(tokenizer.decode(numbers, **options))


@contextmanager
def _errors_of(tokenizer: Any, text: str) -> Iterator[None]:
    """Say that a tokenizer stops, such as at a pattern that takes too many steps."""
    try:
        yield
    except BaseException as error:
        # The library tokenizers raises panics, and Exception itself.
        if not is_panic(error) and type(error) is not Exception:
            raise
        raise BilensError(
            f"{text} stops the tokenizer: {error}. Change the text, or the rules in tokenizer.json"
        ) from error


@checked
def train_tokenizer(
    texts: Iterable[str], vocab_size: Size = 4096, clean: Cleaning = "none"
) -> "transformers.PreTrainedTokenizerFast":
    """Train a tokenizer in which every common word is a single token.

    `[PAD]`, `[UNK]`, `[BOS]` and `[EOS]` are tokens 0 to 3.

    - "none": pairs of bytes are merged (BPE), so that a text comes back as it was, with its
      capitals and line ends. Each byte is a token if there are 1,024 or more; of a smaller
      vocabulary only those in the texts. The tokenizer puts `[BOS]` before a text.
    - "tinystories": WordPiece. Every character that is not a letter is a token, and white space
      only separates. Letters are lower case, without accents. A word that is not a token is cut
      into pieces; those after the first are written ##like ##this. The tokenizer adds no token.

    Args:
        texts: texts to learn from. The same texts yield the same tokenizer.
        vocab_size: the largest number of tokens, with the special ones and all single characters;
            short texts yield fewer.
        clean: how the texts were cleaned, as in `load_corpus`.

    Source: BPE: Sennrich et al. 2016, arXiv:1508.07909. WordPiece: Pearce et al. 2024, appendix
    C.4, and Wu et al. 2016, arXiv:1609.08144.
    """
    if clean == "none":
        return _byte_pairs(texts, vocab_size)
    # tokenizers numbers the inner letters in the order of a hash map, which differs from run to
    # run, and breaks ties between pieces by these numbers. Naming them first makes it repeatable.
    special = [*SPECIAL_TOKENS.values(), *(f"##{letter}" for letter in ascii_lowercase)]
    trainer = tokenizers.trainers.WordPieceTrainer(
        vocab_size=vocab_size, special_tokens=special, show_progress=False
    )
    # WordPiece maps a word of more letters to the unknown token.
    draft = _with_rules(tokenizers.models.WordPiece(unk_token="[UNK]"), 100)
    vocabulary = _learned(draft, trainer, texts, vocab_size)
    # A second tokenizer around the same vocabulary, in which the inner letters are not special.
    backend = _with_rules(tokenizers.models.WordPiece(vocab=vocabulary, unk_token="[UNK]"))
    return with_special_tokens(backend)


def _learned(draft: Any, trainer: Any, texts: Iterable[str], vocab_size: int) -> dict[str, int]:
    draft.train_from_iterator(texts, trainer)
    vocabulary: dict[str, int] = draft.get_vocab()
    if len(vocabulary) > vocab_size:
        raise BilensError(
            f"vocab_size={vocab_size}, expected at least {len(vocabulary)}, room for the special "
            "tokens and every single character"
        )
    return vocabulary


def _byte_pairs(texts: Iterable[str], vocab_size: int) -> "transformers.PreTrainedTokenizerFast":
    cuts, special = tokenizers.pre_tokenizers, list(SPECIAL_TOKENS.values())
    by_bytes = cuts.ByteLevel(add_prefix_space=False)
    backend = tokenizers.Tokenizer(tokenizers.models.BPE(unk_token="[UNK]"))
    # Training time grows with the square of a word.
    longest = cuts.Split(tokenizers.Regex(r"[^\s]{101,}"), "removed")
    backend.pre_tokenizer = cuts.Sequence([longest, by_bytes])
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=special,
        initial_alphabet=cuts.ByteLevel.alphabet() if vocab_size >= 1024 else [],
        show_progress=False,
    )
    _learned(backend, trainer, texts, vocab_size)
    backend.pre_tokenizer, backend.decoder = by_bytes, tokenizers.decoders.ByteLevel()
    begin = ("[BOS]", special.index("[BOS]"))
    backend.post_processor = tokenizers.processors.TemplateProcessing(
        single="[BOS] $A", special_tokens=[begin]
    )
    return transformers.PreTrainedTokenizerFast(tokenizer_object=backend, **SPECIAL_TOKENS)


def with_special_tokens(
    tokenizer: "tokenizers.Tokenizer",
) -> "transformers.PreTrainedTokenizerFast":
    """Wrap `tokenizer`, whose vocabulary has the special tokens, for transformers."""
    tokenizer.add_special_tokens(list(SPECIAL_TOKENS.values()))
    decoders, regex = tokenizers.decoders, tokenizers.Regex
    # The first word has its space too, since pipelines decode a continuation without its prompt.
    spaces = decoders.Replace(regex(r"^(?!##|[.,?!]$)"), " ")
    tokenizer.decoder = decoders.Sequence(
        [spaces, decoders.Replace(regex("^##"), ""), decoders.Fuse()]
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
