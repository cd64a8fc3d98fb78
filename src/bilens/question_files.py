"""Files of questions: a text, the token after it, and a second text in each line.

Nothing here imports torch: a file is read and checked before a model is loaded. The module csv
reads it, and not pandas, since errors name the line.
"""

import csv
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from io import StringIO
from itertools import chain
from pathlib import Path

from bilens.errors import BilensError
from bilens.options import token_list
from bilens.shipped import TASKS, task_names

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


def read_lines(path: str | Path) -> list[QuestionLine]:
    """Read the questions of a file, in UTF-8 with or without a byte order mark.

    A name such as "agreement" is that of a task that comes with bilens, if no file has it; see
    `task_names`.

    The columns are those of `COLUMNS`, of which the last three may be missing, separated by tabs. A
    first line with their names, `text` and `token` at least, may have them in any order, and may be
    separated by commas or semicolons, as all lines below it then are. A field in double quotes may
    hold separators, new lines and doubled quotes, as spreadsheets write them; spaces in front of
    its quotes do not count below such a header. Lines that begin with # and empty lines are
    skipped, as are columns whose name begins with #.

    Raises:
        BilensError: the file does not exist, is in another encoding, or holds no question, or a
            line has other columns, no text or no token.
    """
    file = _found(path)
    lines = _decoded(file)
    start, separator, header = _header(path, lines)
    questions = []
    for place, fields in _records(path, lines[start:], start + 1, separator):
        if header and [field.strip().lower() for field in fields] == header:
            raise BilensError(f"{place} is the header again, expected a question")
        if any(map(str.strip, fields)):
            questions.append(_question(place, fields, header))
    if not questions:
        raise BilensError(f"{file} holds no line with a question; expected lines with {EXPECTED}")
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


def _found(path: str | Path) -> Path:
    if Path(path).is_file():
        return Path(path)
    if str(path) in task_names():
        return TASKS / f"{path}.tsv"
    near = get_close_matches(str(path), task_names(), n=1)
    raise BilensError(
        f"{path} is no file and no task that comes with bilens ({', '.join(task_names())}); "
        + (f"did you mean {near[0]}?" if near else f"expected lines with {EXPECTED}")
    )


def _decoded(path: Path) -> list[str]:
    """Return the lines of a file, without byte order marks, also where files were joined."""
    # Imports torch, which a command that reads no file does not wait for.
    from bilens.files import check_downloaded  # noqa: PLC0415

    try:
        content = check_downloaded(path, "questions", BilensError).read_bytes()
    except OSError as error:
        raise BilensError(f"{path} cannot be read: {error.strerror}") from error
    # Text in UTF-16 has zero bytes, as packed files have.
    wrong, end, text = "a zero byte", content.find(b"\0"), ""
    try:
        text = content.decode("utf-8")
    except UnicodeDecodeError as error:
        wrong, end = f"the byte {content[error.start]:#x}", error.start
    if end >= 0:
        line = content.count(b"\n", 0, end) + 1
        raise BilensError(
            f"{path}, line {line} holds {wrong}, expected text in UTF-8: save it so, not packed "
            "and not as a spreadsheet"
        )
    return [line.removeprefix("\ufeff") for line in StringIO(text, newline="")]


def _header(path: str | Path, lines: Sequence[str]) -> tuple[int, str, list[str]]:
    """Return the number of lines up to a header, its separator and its columns; 0, tabs and []."""
    for i, line in enumerate(lines, 1):
        for separator in "\t,;":
            names = [name.strip(' "\r\n').lower() for name in line.split(separator)]
            known = [name for name in names if name[:1] != "#"]
            is_whole = {"text", "token"} <= {*known} <= {*COLUMNS}
            if is_whole and len({*names}) == len(names):
                return i, separator, names
            # No question has two fields that are names of columns.
            if len({*known} & {*COLUMNS}) > 1 and line[:1] != "#":
                raise BilensError(
                    f"{path}, line {i} is a header with the columns "
                    f"{', '.join(map(repr, names))}; expected text and token, and at most once "
                    "minus, against, task and template"
                )
        if line.strip() and line[:1] != "#":
            break
    return 0, "\t", []


def _records(
    path: str | Path, lines: Sequence[str], first: int, separator: str
) -> Iterator[tuple[str, list[str]]]:
    """Yield the place and the fields of each line; one with a field in quotes may go on."""
    numbered = enumerate(lines, first)
    for i, line in numbered:
        if not line.strip() or line.startswith("#"):
            continue
        if separator != "\t":
            # Spaces in front of quotes; what stands in quotes is passed over as a whole.
            line = re.sub(rf'("(?:[^"]|"")*")|({separator}) +(?=")', r"\1\2", line)  # noqa: PLW2901
        following = (further for _, further in numbered)
        reader = csv.reader(chain([line], following), delimiter=separator, strict=True)
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


def _question(place: str, fields: list[str], header: Sequence[str]) -> QuestionLine:
    n, names = len(fields), header or COLUMNS
    has = f"{place} has {n} column{'s' * (n != 1)}"
    if header and n != len(header):
        raise BilensError(f"{has}, expected {len(header)}, as the header has")
    if not header and not 3 <= n <= len(COLUMNS):
        hint = (
            "It has no tab: columns are separated by tabs, not by spaces, and by commas only below "
            "a header such as text,token,minus,against"
        )
        raise BilensError(f"{has}; expected, separated by tabs, {EXPECTED}{f'. {hint}' * (n == 1)}")
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
