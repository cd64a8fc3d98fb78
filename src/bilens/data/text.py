"""The stories of a corpus, one after another, and the cleaning that turns one into plain ASCII."""

import os
import re
import unicodedata
from collections.abc import Iterator
from pathlib import Path

from bilens.data.textfiles import SUFFIXES, read_file, text_suffix
from bilens.errors import DataError

__all__ = ["HUB_CORPORA", "clean", "read_texts", "text_files"]

HUB_CORPORA = {"tinystories": "roneneldan/TinyStories"}

# The splits of a known corpus are read one after the other: what is held out is drawn afresh.
_KNOWN_FILES = ("train", "valid")

# UTF-8 that was once read as Windows-1252: 83 of the 18,399 stories of TinyStories that were
# looked at have it, and nearly always it is a quotation mark.
_MOJIBAKE = {
    "â€œ": '"',
    "â€\x9d": '"',
    "â€™": "'",
    "â€˜": "'",
    "â€“": "-",
    "â€”": "-",
    "â€¦": "...",
    "â€": '"',
}
_TYPOGRAPHY = {
    **dict.fromkeys("“”„‟″«»", '"'),
    **dict.fromkeys("‘’‚‛′‹›´", "'"),
    **dict.fromkeys("‐‑‒–—―−", "-"),
    "⁄": "/",
    "…": "...",
    "æ": "ae",
    "Æ": "AE",
    "œ": "oe",
    "Œ": "OE",
    "ø": "o",
    "Ø": "O",
    "ł": "l",
    "Ł": "L",
    "ß": "ss",
}
_MAPPED = {**_MOJIBAKE, **_TYPOGRAPHY}
_MAPPED_PATTERN = re.compile("|".join(map(re.escape, _MAPPED)))  # longer spellings stand first
_CONTROL = re.compile(r"[\x00-\x1f\x7f]")


def clean(text: str) -> str:
    """Return `text` in printable ASCII, on one line, with its case.

    Typographic quotes, dashes and dots become their ASCII kin (also where they were garbled as
    "â€œ"), letters lose their accents, compatibility forms (ligatures, full width) become plain,
    every other character beyond ASCII is removed, and each run of white space or control
    characters is one space. Cleaning twice is cleaning once.

    Source: Pearce et al. 2024, appendix C.3.
    """
    if not text.isascii():
        # Twice: an acute accent that stands for an apostrophe would come apart in the
        # decomposition, and the slash of a fraction only comes out of it.
        text = unicodedata.normalize("NFKD", _MAPPED_PATTERN.sub(_mapped, text))
        text = _MAPPED_PATTERN.sub(_mapped, text).encode("ascii", "ignore").decode("ascii")
    return " ".join(_CONTROL.sub(" ", text).split())


def _mapped(match: re.Match[str]) -> str:
    return _MAPPED[match.group()]


def read_texts(source: str | Path, data_dir: str | Path | None = None) -> Iterator[str]:
    """Give the stories of a corpus in their order, as they are written, one at a time.

    Args:
        source: "tinystories", or the path of a file or of a folder of files: text (.txt, .txt.gz),
            .parquet or .jsonl. In text a line `<|endoftext|>` ends a story; a file without any such
            line is cut at its blank lines, and one without these at every line. Parquet and jsonl
            hold a story in the column "text" (or "story").
        data_dir: For tinystories: the folder with train.txt.gz and valid.txt.gz, or one above it
            that has them in a sub-folder tinystories. By default the environment variable
            BILENS_DATA; if that is unset or empty too, the Hugging Face hub, streamed.

    Raises:
        DataError: Unknown name, missing files, files that are empty, binary, damaged or not UTF-8,
            hub out of reach.

    Source: R. Eldan and Y. Li, "TinyStories: How Small Can Language Models Be and Still Speak
    Coherent English?", 2023, arXiv:2305.07759.
    """
    files = text_files(source, data_dir)
    if files:
        for path in files:
            yield from read_file(path)
    else:
        yield from _read_hub(str(source))


def text_files(source: str | Path, data_dir: str | Path | None = None) -> list[Path]:
    """Return the files that `read_texts` reads, in its order; none when it asks the hub.

    Raises:
        DataError: Unknown name or missing files.
    """
    if str(source) in HUB_CORPORA:
        if data_dir is not None:
            return _known_files(str(source), Path(data_dir), "data_dir")
        if folder := os.environ.get("BILENS_DATA"):
            return _known_files(str(source), Path(folder), "BILENS_DATA")
        return []
    path = Path(source)
    try:
        is_file, is_folder = path.is_file(), path.is_dir()
    except OSError:  # such as a name longer than the file system takes
        is_file = is_folder = False
    if is_file:
        return [path]
    if is_folder and str(source):
        return _files_of(path)
    raise DataError(
        f"corpus: expected grammar, {', '.join(HUB_CORPORA)}, or the path of a file or a folder of "
        f"files {', '.join(SUFFIXES)}, found {str(source)!r}"
    )


def _files_of(folder: Path) -> list[Path]:
    files = sorted(path for path in folder.iterdir() if path.is_file() and text_suffix(path))
    if not files:
        raise DataError(
            f"corpus: expected files {', '.join(SUFFIXES)} in the folder {folder}, found none"
        )
    return files


def _known_files(name: str, folder: Path, origin: str) -> list[Path]:
    candidates = [folder / name, folder]
    for candidate in candidates:
        found = [_existing(candidate, split) for split in _KNOWN_FILES]
        whole = [path for path in found if path]
        if len(whole) == len(_KNOWN_FILES):
            return whole
    raise DataError(
        f"{origin}: expected the files {', '.join(f'{split}.txt.gz' for split in _KNOWN_FILES)} "
        f"(also without .gz, or as .parquet or .jsonl) of {name} in "
        f"{' or '.join(map(str, candidates))}, found not all of them there"
    )


def _existing(folder: Path, split: str) -> Path | None:
    for suffix in SUFFIXES:
        path = folder / f"{split}{suffix}"
        if path.is_file():
            return path
    return None


def _read_hub(name: str) -> Iterator[str]:
    # datasets takes seconds to import, and local files do without it.
    import datasets  # noqa: PLC0415

    repository = HUB_CORPORA[name]
    try:
        for split in ("train", "validation"):
            for row in datasets.load_dataset(repository, split=split, streaming=True):
                yield row["text"]
    except Exception as cause:
        # The hub fails in the families of at least four libraries, as data.hub says.
        raise DataError(
            f"{name}: expected the data set {repository} from the Hugging Face hub, found "
            f"{type(cause).__name__}: {cause}. Either pass data_dir (--data-dir) or set "
            f"BILENS_DATA to a folder with {name}/train.txt.gz and {name}/valid.txt.gz, or connect "
            "to the hub and try again"
        ) from cause
