"""Stories out of one file: text with separators, Parquet or JSON lines, always streamed."""

import gzip
import io
import json
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

from bilens.errors import DataError

__all__ = ["SUFFIXES", "read_file", "text_suffix"]

SUFFIXES = (".txt", ".txt.gz", ".parquet", ".jsonl")

_END_OF_STORY = "<|endoftext|>"
_COLUMNS = ("text", "story")


def text_suffix(path: Path) -> str | None:
    """Return which of `SUFFIXES` the name of `path` ends in."""
    return next((suffix for suffix in SUFFIXES if path.name.lower().endswith(suffix)), None)


def read_file(path: Path) -> Iterator[str]:
    """Give the stories of a file that are not blank, in their order, one at a time.

    Raises:
        DataError: The file is of another kind, empty, binary, damaged or not UTF-8.
    """
    match text_suffix(path):
        case ".txt" | ".txt.gz":
            stories = _read_text(path)
        case ".parquet":
            stories = _read_parquet(path)
        case ".jsonl":
            stories = _read_jsonl(path)
        case _:
            raise DataError(
                f"{path}: expected a file {', '.join(SUFFIXES)}, found {path.name}; "
                "rename it, or convert it to one of these"
            )
    empty = True
    for story in stories:
        if story.strip():
            empty = False
            yield story.strip()
    if empty:
        raise DataError(f"{path}: expected stories, found none in the file; leave it out")


def _read_text(path: Path) -> Iterator[str]:
    separator = _separator(path)
    lines: list[str] = []
    for line in _lines(path):
        if separator is None:
            yield line
        elif line.strip() == separator:
            yield "".join(lines)
            lines = []
        else:
            lines.append(line)
    yield "".join(lines)


def _separator(path: Path) -> str | None:
    """Return the line that stands between stories, stripped; None: every line is a story."""
    written = blank_after_text = between = False
    for line in _lines(path):
        content = line.strip()
        if content == _END_OF_STORY:
            return _END_OF_STORY
        between = between or (blank_after_text and bool(content))
        written = written or bool(content)
        blank_after_text = blank_after_text or (written and not content)
    return "" if between else None


def _lines(path: Path) -> Iterator[str]:
    with _opened(path) as file:
        for line in file:
            if "\0" in line:
                raise DataError(
                    f"{path}: expected text, found a binary file (it has zero bytes); "
                    "leave it out of the corpus"
                )
            yield line


@contextmanager
def _opened(path: Path) -> Iterator[TextIO]:
    """Open `path` as UTF-8, unpacked where its name ends in .gz, and explain what fails in it."""
    opener = gzip.open if path.name.lower().endswith(".gz") else open
    try:
        with opener(path, "rb") as binary, io.TextIOWrapper(binary, encoding="utf-8-sig") as file:
            yield file
    except UnicodeDecodeError as cause:
        raise DataError(
            f"{path}: expected text in UTF-8, found bytes that are not ({cause.reason}); convert "
            f"it, as in: iconv -f WINDOWS-1252 -t UTF-8, or leave it out if it is no text"
        ) from cause
    except (OSError, EOFError, zlib.error) as cause:
        raise DataError(
            f"{path}: expected a readable file, found {type(cause).__name__}: {cause}; fetch it "
            "again, or see to its permissions"
        ) from cause


def _read_parquet(path: Path) -> Iterator[str]:
    # pyarrow takes most of a second to import, and text does without it.
    import pyarrow as pa  # noqa: PLC0415
    import pyarrow.parquet as pq  # noqa: PLC0415

    try:
        with pq.ParquetFile(path) as file:
            column = _column(path, file.schema_arrow.names)
            for batch in file.iter_batches(batch_size=1000, columns=[column]):
                for story in batch.column(0).to_pylist():
                    yield _checked(path, column, story)
    except (pa.ArrowException, OSError) as cause:
        raise DataError(
            f"{path}: expected a Parquet file, found {type(cause).__name__}: {cause}; fetch it "
            "again"
        ) from cause


def _read_jsonl(path: Path) -> Iterator[str]:
    for number, line in enumerate(_lines(path), start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except json.JSONDecodeError as cause:
            raise DataError(
                f"{path}: expected one JSON object per line, found in line {number}: {cause}"
            ) from cause
        if not isinstance(row, dict):
            raise DataError(
                f"{path}: expected one JSON object per line, found in line {number} a "
                f"{type(row).__name__}"
            )
        column = _column(path, list(row))
        yield _checked(path, column, row[column])


def _column(path: Path, names: list[str]) -> str:
    for column in _COLUMNS:
        if column in names:
            return column
    raise DataError(
        f"{path}: expected a column {' or '.join(_COLUMNS)}, found {', '.join(names)}; "
        "rename the one that holds the stories"
    )


def _checked(path: Path, column: str, story: object) -> str:
    if story is None:
        return ""
    if not isinstance(story, str):
        raise DataError(
            f"{path}: expected text in the column {column}, found a {type(story).__name__}: "
            f"{story!r}"
        )
    return story
