"""Content of readings: facts, tables, figures and texts, in the sections of a page."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from functools import cached_property
from numbers import Integral, Real
from typing import TYPE_CHECKING, Any, Union

from bilens.lazy_imports import pd

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Fact = tuple[str, str | float]
"""A name and its value."""
Columns = Mapping[str, Sequence[Any]]
"""A table: the cells of each column by its name, in plain numbers and texts."""


class Percent(float):
    """A share of one, which is shown as a percentage and is a number in JSON."""

    def __str__(self) -> str:
        return format(self, ".2%")


def by_column(names: Sequence[str], rows: Iterable[Sequence[Any]]) -> Columns:
    """Return rows as a table with these names of columns."""
    # Without rows each column is there, and empty.
    cells = list(zip(*rows, strict=True)) or [()] * len(names)
    return dict(zip(names, cells, strict=True))


def stacked(tables: Iterable[Columns]) -> Columns:
    """Return the rows of all tables, one below the other; all have the same columns."""
    stack: dict[str, list[Any]] = {}
    for table in tables:
        for name, cells in table.items():
            stack.setdefault(name, []).extend(cells)
    return stack


def shape_fact(shape: Sequence[int]) -> str | int:
    """Return the length of a single axis, and several as 2x3."""
    return shape[0] if len(shape) == 1 else "x".join(map(str, shape))


def signed(value: float, digits: str = ".3g") -> str:
    """Format a number with its sign, but without one if only zeros are shown."""
    text = format(value, "+" + digits)
    return text if text.strip("+-0.%") else text[1:]


def eigenvector_names(values: Sequence[float]) -> list[str]:
    """Return a name for each eigenvalue: P1, P2, ... and N1, N2, ... in the order given."""
    signs = ["P" if value > 0 else "N" for value in values]
    numbers = [signs[: i + 1].count(sign) for i, sign in enumerate(signs)]
    rows = zip(signs, numbers, values, strict=True)
    return [f"{sign}{count}  λ = {signed(value)}" for sign, count, value in rows]


def shown(value: object) -> str:
    """Format the value of a fact: whole numbers with commas, others with four digits."""
    if isinstance(value, str | Percent | bool):
        return str(value)
    if isinstance(value, Integral):
        return f"{int(value):,}"
    return f"{float(value):z.4g}" if isinstance(value, Real) else str(value)


@dataclass(frozen=True, eq=False)
class Table:
    """A table with a caption, formatted by column; pandas would show six decimals of all.

    Attributes:
        columns: The cells, by column or as a data frame.
        caption: Text above it.
        formats: Format of a column by its name, such as ".2%"; by default numbers of a column have
            the same number of decimals.
        words: Number of columns of words, which come first; by default those without numbers.
        by: Column of which a console, that shows a few rows, shows some of each kind.
    """

    columns: "Columns | pd.DataFrame"
    caption: str = ""
    formats: Mapping[str, str] = field(default_factory=dict)
    words: int | None = None
    by: str = ""

    @cached_property
    def frame(self) -> "pd.DataFrame":
        """The cells as a data frame."""
        return pd.DataFrame(self.columns)

    @property
    def header(self) -> list[str]:
        """Names of the columns."""
        return [str(name) for name in self.frame.columns]

    @property
    def is_word(self) -> list[bool]:
        """Whether each column has words, which are at its left; numbers are at its right."""
        if self.words is not None:
            return [i < self.words for i in range(len(self.header))]
        return [dtype.kind not in "fiu" for dtype in self.frame.dtypes]

    @property
    def rows(self) -> list[tuple[str, ...]]:
        """The cells as text."""
        columns = [self._cells(i) for i in range(len(self.header))]
        return list(zip(*columns, strict=True))

    def _cells(self, i: int) -> list[str]:
        column = self.frame.iloc[:, i]
        cell_format = self.formats.get(self.header[i])
        if cell_format is None and column.dtype.kind == "f":
            cell_format = _common_format(column.tolist())
        if cell_format is None:
            return [shown(value) for value in column.tolist()]
        plus = cell_format.startswith("+")
        return [
            ""
            if value is None or math.isnan(value)
            else signed(value, cell_format[1:])
            if plus
            else format(value, cell_format)
            for value in column.tolist()
        ]


def _common_format(values: Iterable[float]) -> str:
    """Return the format that shows the largest of some numbers with three digits."""
    largest = max((abs(value) for value in values if math.isfinite(value)), default=0.0)
    if largest == 0:
        return "z.0f"
    # The largest number of a column has three significant digits.
    decimals = 2 - math.floor(math.log10(largest))
    # Numbers that need more places than that are easier to read with an exponent.
    return f"z.{max(0, decimals)}f" if -4 <= decimals <= 5 else "z.2e"


@dataclass(frozen=True, eq=False)
class Picture:
    """A figure that is drawn when it is asked for."""

    name: str
    draw: "Callable[[], Figure]"

    @cached_property
    def figure(self) -> "Figure":
        """The figure."""
        return self.draw()


@dataclass(frozen=True)
class ContextLine:
    """A piece of text whose tokens are coloured by their contributions.

    Attributes:
        value: The sum of the contributions.
        tokens: Text and contribution of each token; a text that starts with ## belongs to the word
            before it.
        focal: Number of the token in brackets.
    """

    value: float
    tokens: Sequence[tuple[str, float]]
    focal: int

    @property
    def strongest(self) -> float:
        """The largest absolute contribution, which is full colour."""
        return max(abs(share) for _, share in self.tokens) or 1.0

    @property
    def ranked(self) -> list[tuple[str, float]]:
        """Tokens that contribute, the largest absolute contribution first; templates read it."""
        nonzero = [token for token in self.tokens if token[1]]
        return sorted(nonzero, key=lambda token: -abs(token[1]))


@dataclass(frozen=True)
class ContextList:
    """Contexts in a column, with a heading."""

    title: str
    lines: Sequence[ContextLine]


@dataclass(frozen=True)
class FlowDrawing:
    """The graph of a flow that a reader explores on the page: a `FlowPage` as a dictionary."""

    graph: dict[str, Any]


Panel = Union[Table, Picture, ContextList, FlowDrawing, "Figure"]
"""Content of a section."""


@dataclass(frozen=True, eq=False)
class Section:
    """A part of a page: a heading, a paragraph, and rows of content.

    Attributes:
        title: The heading.
        text: The paragraph below it.
        rows: Tables, pictures and texts; those of a row are side by side.
        facts: Names and values below the paragraph.
        folded: The section is closed until a reader opens it.
    """

    title: str
    text: str = ""
    rows: Sequence[Sequence[Panel]] = ()
    facts: Sequence[Fact] = ()
    folded: bool = False

    @property
    def parts(self) -> list[Panel]:
        """The content, row after row."""
        return [part for row in self.rows for part in row]


def distinct(names: Iterable[str], joint: str = " ") -> list[str]:
    """Return names of which no two are equal, not even in another case: later ones get a number."""
    keys, result = set[str](), list[str]()
    for name in names:
        count, unique = 1, name
        while unique.casefold() in keys:
            count += 1
            unique = f"{name}{joint}{count}"
        keys.add(unique.casefold())
        result.append(unique)
    return result


def captioned(sections: Iterable[Section]) -> list[tuple[str, Table | ContextList]]:
    """Return the tables and texts of sections with their captions or else the section's title."""
    parts: list[tuple[str, Table | ContextList]] = []
    for section in sections:
        for part in section.parts:
            if isinstance(part, Table):
                parts.append((part.caption or section.title, part))
            elif isinstance(part, ContextList):
                parts.append((part.title, part))
    return parts


def figures_by_name(parts: Iterable[Panel]) -> "dict[str, Figure]":
    """Return the figures of the pictures among parts of a page, by distinct names."""
    pictures = [part for part in parts if isinstance(part, Picture)]
    names = distinct((picture.name for picture in pictures), "-")
    return {name: picture.figure for name, picture in zip(names, pictures, strict=True)}


def plain(value: Any) -> Any:
    """Return a value as JSON has it.

    A dataclass becomes its fields by their names, without those of `field(repr=False)`, which are
    models, data and large arrays. Frames and tensors become lists, and what writes itself, such as
    an address of a part, its text. A number that is not finite becomes null, for JSON has no other
    name of it.
    """
    if is_dataclass(value):
        value = {field.name: getattr(value, field.name) for field in fields(value) if field.repr}
    elif hasattr(value, "to_dict"):
        value = value.to_dict("records")
    elif hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, str | bool | None):
        return value
    if isinstance(value, Mapping):
        return {str(name): plain(content) for name, content in value.items()}
    if isinstance(value, list | tuple) and type(value).__str__ is object.__str__:
        return [plain(item) for item in value]
    if isinstance(value, Integral):
        return int(value)
    if isinstance(value, Real):
        return float(value) if math.isfinite(value) else None
    return str(value)


def fact_text(name: str, value: str | float) -> str:
    """Return a fact as a phrase, such as "heads 10" or "top eigenvalue 2.5"."""
    return f"{name} {shown(value)}".strip()
