"""Files of questions: a text, the token after it, and a second text in each line.

Nothing here imports torch: a file is read and checked before a model is loaded. The module csv
reads it, and not pandas, which fills the fields of a short line in silence, takes a # within a text
for a comment, and does not say from which line a row is.
"""

import csv
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from io import StringIO
from itertools import chain
from pathlib import Path
from typing import TypeVar

from bilens.errors import BilensError
from bilens.files import check_downloaded
from bilens.options import token_list
from bilens.shipped import TASKS, task_names

Q = TypeVar("Q")
COLUMNS = ("text", "token", "minus", "against", "task", "template")
"""Names of the columns in a header, in their order without one."""
EXPECTED = (
    "the text, the token, tokens to subtract (both separated by commas), and if there are more the "
    "second text, a task and a template"
)


@dataclass(frozen=True)
class QuestionLine:
    """A question as a line of a file has it; fields without a comment are those of `Question`."""

    place: str  # the file and the number of the line, for errors
    text: str
    token: tuple[str, ...]
    minus: tuple[str, ...] = ()
    against: str = ""
    task: str = ""
    template: str = ""


def stream_lines(path: str | Path) -> Iterator[QuestionLine | BilensError]:
    """Yield the questions of a file one after the other, or the error of a line that holds none.

    A name such as "agreement" is that of a task that comes with bilens, if no file has it; see
    `task_names`. The file is in UTF-8, with or without a byte order mark.

    The columns are those of `COLUMNS`, of which the last three may be missing, separated by tabs. A
    first line with their names, `text` and `token` at least, may have them in any order, and may be
    separated by commas or semicolons, as all lines below it then are. A field in double quotes may
    hold separators, new lines and doubled quotes, as spreadsheets write them; spaces in front of
    its quotes do not count below such a header. Lines that begin with # and empty lines are
    skipped, as are columns whose name begins with #.

    Raises:
        BilensError: the file does not exist, is in another encoding, has quotes that do not end, or
            holds no question.
    """
    file = find_file(path)
    lines = _numbered(path, file)
    separator, header, is_empty = "\t", list[str](), True
    for i, line in lines:
        if match := _header(f"{path}, line {i}", line):
            separator, header = match
            break
        if line.strip() and line[:1] != "#":
            lines = chain([(i, line)], lines)
            break
    for place, fields in _records(path, lines, separator):
        question: QuestionLine | BilensError
        try:
            question = _question(place, fields, header)
        except BilensError as error:
            question = error
        if any(map(str.strip, fields)):
            is_empty = False
            yield question
    if is_empty:
        raise BilensError(f"{file} holds no line with a question; expected lines with {EXPECTED}")


def read_lines(path: str | Path) -> list[QuestionLine]:
    """Read all questions of a file; see `stream_lines`.

    Raises:
        BilensError: as there, or a line has other columns, no text or no token.
    """
    return without_errors(stream_lines(path))


def without_errors(stream: Iterable[Q | BilensError]) -> list[Q]:
    """Return all questions of a stream, or raise the first error in it."""
    questions = list[Q]()
    for question in stream:
        if isinstance(question, BilensError):
            raise question
        questions.append(question)
    return questions


def written_names(names: Sequence[str]) -> str:
    """Return names of tokens as the text that `token_list` reads, as the column minus has it."""
    line = StringIO()
    csv.writer(line, lineterminator="").writerow(names)
    return line.getvalue()


def read_pair_lines(path: str | Path) -> list[QuestionLine]:
    """Read a file whose questions all have a second text.

    Raises:
        BilensError: as `read_lines`, or a second text is missing or the same as the first.
    """
    questions = read_lines(path)
    for question in questions:
        if not question.against:
            raise BilensError(f"{question.place} has no second text, the fourth column or against")
        if question.against == question.text:
            raise BilensError(
                f"{question.place} has the same text twice, {question.text!r}; expected a second "
                "text after which the model answers otherwise"
            )
    return questions


def check_questions(path: str | Path, *, each: bool) -> None:
    """Check that there is a file of questions, and by `each` that every line has two texts.

    Raises:
        BilensError: as `read_pair_lines`.
    """
    if each and has_lines(path):
        read_pair_lines(path)
    elif not is_hub_name(path):
        find_file(path)


def has_lines(path: str | Path) -> bool:
    """Return whether a file has a question in each line, and not in rows with names."""
    return Path(path).suffix not in (".jsonl", ".parquet") and not is_hub_name(path)


def is_hub_name(path: str | Path) -> bool:
    """Return whether a path may name a data set of the Hugging Face hub, and names no file."""
    parts = str(path).split("/")
    return len(parts) == 2 and all(parts) and not Path(path).suffix and not Path(path).exists()


def find_file(path: str | Path) -> Path:
    """Return the file of questions of a path, or of the name of a task.

    Raises:
        BilensError: there is none.
    """
    if Path(path).is_file():
        return Path(path)
    if str(path) in task_names():
        return TASKS / f"{path}.tsv"
    near, names = get_close_matches(str(path).lower(), task_names(), n=1), ", ".join(task_names())
    raise BilensError(
        f"{str(path) or repr('')} is no file and no task that comes with bilens ({names}); "
        + (f"did you mean {near[0]}?" if near else f"expected lines with {EXPECTED}")
    )


def _numbered(path: str | Path, file: Path) -> Iterator[tuple[int, str]]:
    """Yield the lines of a file, without byte order marks, also where files were joined."""
    try:
        check_downloaded(file, "questions", BilensError)
        # Bytes of other encodings become halves of pairs of letters.
        with file.open(encoding="utf-8", errors="surrogateescape", newline="") as lines:
            for i, line in enumerate(lines, 1):
                # Text in UTF-16 has zero bytes, as packed files have.
                if wrong := re.search("[\0\udc80-\udcff]", line):
                    byte = ord(wrong[0]) - 0xDC00 if wrong[0] != "\0" else 0
                    raise BilensError(
                        f"{path}, line {i} holds the byte {byte:#04x}, expected text in UTF-8: "
                        "save it so, not packed and not as a spreadsheet"
                    )
                yield i, line.removeprefix("\ufeff")
    except OSError as error:
        raise BilensError(f"{path} cannot be read: {error.strerror}") from error


def _header(place: str, line: str) -> tuple[str, list[str]] | None:
    """Return the separator and the columns of a header; None of another line."""
    for separator in "\t,;":
        names = [name.strip(' "\r\n').lower() for name in line.split(separator)]
        columns = [name for name in names if name[:1] != "#"]
        is_whole = {"text", "token"} <= {*columns} <= {*COLUMNS}
        if is_whole and len({*names}) == len(names):
            return separator, names
        # No question has two fields that are names of columns.
        if len({*columns} & {*COLUMNS}) > 1 and line[:1] != "#":
            raise BilensError(
                f"{place} is a header with the columns {', '.join(map(repr, names))}; expected "
                "text and token, and at most once minus, against, task and template"
            )
    return None


def _records(
    path: str | Path, lines: Iterator[tuple[int, str]], separator: str
) -> Iterator[tuple[str, list[str]]]:
    """Yield the place and the fields of each line; one with a field in quotes may go on."""
    for i, line in lines:
        if not line.strip() or line.startswith("#"):
            continue
        if separator != "\t":
            # Spaces in front of quotes; what stands in quotes is passed over as a whole.
            line = re.sub(rf'("(?:[^"]|"")*")|({separator}) +(?=")', r"\1\2", line)  # noqa: PLW2901
        further_lines = (further for _, further in lines)
        reader = csv.reader(chain([line], further_lines), delimiter=separator, strict=True)
        try:
            fields = next(reader)
            if separator != "\t" and any(re.fullmatch(r' +".*"', x, re.DOTALL) for x in fields):
                raise csv.Error("a space stands in front of quotes")
            yield f"{path}, line {i}", fields
        except csv.Error as error:
            raise BilensError(
                f"{path}, line {i} cannot be read: {error}. A field that begins with a double "
                'quote ends with one, and holds each of its own twice, as in """Yes"" she said"'
            ) from None


def _without_tabs(line: str) -> str:
    """Return what is expected in place of a line that has no tab."""
    if line.lstrip()[:1] in ("[", "{"):
        return "expected JSON in a .jsonl file, with a question, such as {...}, in each line"
    if "," in line or ";" in line:
        return "expected a header such as text,token,minus,against above columns without tabs"
    return f"expected columns with tabs between them, and not spaces: {EXPECTED}"


def _question(place: str, fields: list[str], header: Sequence[str]) -> QuestionLine:
    n, names = len(fields), header or COLUMNS
    if header and [field.strip().lower() for field in fields] == header:
        raise BilensError(f"{place} is the header again, expected a question")
    has = f"{place} has {n} column{'s' * (n != 1)}"
    if header and n != len(header):
        raise BilensError(f"{has}, expected {len(header)}, as the header has")
    if not header and not 3 <= n <= len(COLUMNS):
        if n == 1:
            raise BilensError(f"{place}: {_without_tabs(fields[0])}")
        raise BilensError(f"{has}; expected, separated by tabs, {EXPECTED}")
    values = dict.fromkeys(COLUMNS, "") | dict(zip(names, fields, strict=False))
    for name in ("text", "token"):
        if not values[name].strip():
            raise BilensError(f"{place} has an empty {name}")
    try:
        token, minus = token_list(values["token"]), token_list(values["minus"])
    except BilensError as error:
        raise BilensError(f"{place}: {error}") from None
    for name in token:
        if name in minus:
            raise BilensError(f"{place} subtracts its token {name!r} from itself")
    others = (values[name] for name in ("against", "task", "template"))
    return QuestionLine(place, values["text"], token, minus, *others)
