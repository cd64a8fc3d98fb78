"""Files of questions: a text, the token after it, and a second text in each line.

Nothing here imports torch: a file is read and checked before a model is loaded.
"""

import codecs
import csv
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
    hold separators, new lines and doubled quotes, as spreadsheets write them. Lines that begin with
    # and empty lines are skipped, as are columns whose name begins with #.

    Raises:
        BilensError: the file does not exist, is in another encoding, or holds no question, or a
            line has other columns, no text or no token.
    """
    name, path = path, _found(path)
    # A mark within is that of a file that another one was joined to.
    unmarked = (line.removeprefix("\ufeff") for line in StringIO(_decoded(path), newline=""))
    lines = enumerate(unmarked, 1)
    questions: list[QuestionLine] = []
    header: tuple[str, Sequence[str]] | None = None
    is_first = True
    for number, line in lines:
        if not line.strip() or line.startswith("#"):
            continue
        place = f"{name}, line {number}"
        if is_first:
            header, is_first = _header(place, line), False
            if header is not None:
                continue
        # A field in quotes may go on in the next lines.
        following = (text for _, text in lines)
        fields = _fields(place, chain([line], following), header[0] if header else "\t")
        if header and [field.strip().lower() for field in fields] == header[1]:
            raise BilensError(f"{place} is the header again, expected a question")
        if any(map(str.strip, fields)):
            names = header[1] if header else COLUMNS
            questions.append(_question(place, fields, names, has_header=bool(header)))
    if not questions:
        raise BilensError(f"{path} holds no line with a question; expected lines with {EXPECTED}")
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


KINDS = {
    codecs.BOM_UTF32_LE: "is in UTF-32",
    codecs.BOM_UTF32_BE: "is in UTF-32",
    codecs.BOM_UTF16_LE: "is in UTF-16",
    codecs.BOM_UTF16_BE: "is in UTF-16",
    b"\x1f\x8b": "is packed by gzip",
    b"PK\x03\x04": "is a zip archive, such as a spreadsheet",
    b"version https://git-lfs": "is a pointer of Git LFS (`git lfs pull` fetches the file itself)",
}
"""Beginnings of files that are no text in UTF-8."""


def _decoded(path: Path) -> str:
    try:
        content = path.read_bytes()
    except OSError as error:
        raise BilensError(f"{path} cannot be read: {error.strerror}") from error
    kind = next((kind for start, kind in KINDS.items() if content.startswith(start)), "")
    # Without a mark every second byte of most letters is zero.
    if not kind and 4 * content.count(b"\0") >= len(content) > 0:
        kind = "is in UTF-16"
    if kind:
        raise BilensError(f"{path} {kind}, expected UTF-8: save it as text in UTF-8")
    if b"\0" in content:
        number = content.count(b"\n", 0, content.index(b"\0")) + 1
        raise BilensError(f"{path}, line {number} holds a zero byte, which is no text")
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        number = error.object.count(b"\n", 0, error.start) + 1
        raise BilensError(
            f"{path}, line {number} holds the byte {error.object[error.start]:#x}, which is not "
            "UTF-8; it may be Latin-1: save it as text in UTF-8"
        ) from None


def _header(place: str, line: str) -> tuple[str, Sequence[str]] | None:
    """Return the separator and the columns that a header names; None for a question."""
    for separator in "\t,;":
        names = [name.strip(' "\r\n').lower() for name in line.split(separator)]
        # No question has two fields that are names of columns.
        if len({*names} & {*COLUMNS}) < 2:
            continue
        unknown = [name for name in names if name not in COLUMNS and not name.startswith("#")]
        if unknown or len({*names}) < len(names) or not {"text", "token"} <= {*names}:
            raise BilensError(
                f"{place} is a header with the columns {', '.join(map(repr, names))}; expected "
                "text and token, and at most once minus, against, task and template"
            )
        return separator, names
    return None


def _fields(place: str, lines: Iterator[str], separator: str) -> list[str]:
    try:
        return next(csv.reader(lines, delimiter=separator, strict=True))
    except csv.Error as error:
        raise BilensError(
            f"{place} cannot be read: {error}. A field that begins with a double quote ends with "
            'one, and holds each of its own twice, as in """Yes"" she said"'
        ) from None


def _question(
    place: str, fields: list[str], names: Sequence[str], *, has_header: bool
) -> QuestionLine:
    n = len(fields)
    has = f"{place} has {n} column{'s' * (n != 1)}"
    if has_header and n != len(names):
        raise BilensError(f"{has}, expected {len(names)}, as the header has")
    if not has_header and not 3 <= n <= len(names):
        hint = (
            "It has no tab: columns are separated by tabs, not by spaces, and by commas only below "
            "a header such as text,token,minus,against"
        )
        raise BilensError(f"{has}; expected, separated by tabs, {EXPECTED}{f'. {hint}' * (n == 1)}")
    given = dict.fromkeys(COLUMNS, "") | dict(zip(names, fields, strict=False))
    for name in ("text", "token"):
        if not given[name].strip():
            raise BilensError(f"{place} has an empty {name}")
    try:
        token, minus = token_list(given["token"]), token_list(given["minus"])
    except BilensError as error:
        raise BilensError(f"{place}: {error}") from None
    for name in token:
        if name in minus:
            raise BilensError(f"{place} subtracts its token {name!r} from itself")
    others = (given[name] for name in ("against", "task", "template"))
    return QuestionLine(place, given["text"], token, minus, *others)
