"""The result of an analysis as a line, tables, figures, JSON, and sections of a page.

A small reading implements `facts` and `frame`; everything else is derived. A console shows the
line, a notebook the table, `bilens NAME --json` the record, and reports and the explorer lay out
the sections.
"""

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from numbers import Integral, Real
from typing import Any, ClassVar, Union

from bilens.lazy_imports import go, pd, px

Fact = tuple[str, str | float]
"""A name and its value."""

ROWS = 10
BARS = {"align": "zero", "color": ["#b2182b55", "#2166ac55"], "width": 90}
DIGITS = 3
"""Significant digits of the largest number of a column."""


class Percent(float):
    """A share of one, which is shown as a percentage and is a number in JSON."""

    def __str__(self) -> str:
        return format(self, ".2%")


def signed(value: float, digits: str = ".3g") -> str:
    """Format a number with its sign, but without one if only zeros are shown."""
    text = format(value, "+" + digits)
    return text if text.strip("+-0.%") else text[1:]


def plotly_text(text: str) -> str:
    """Return a text as Plotly shows it in titles, labels and hover: escaped, but for quotes."""
    # Plotly reads <, > and & as HTML does, and shows &quot; as it stands.
    return escape(text, quote=False)


def shown(value: object) -> str:
    """Format the value of a fact: whole numbers with commas, others with four digits."""
    if isinstance(value, str | Percent | bool):
        return str(value)
    if isinstance(value, Integral):
        return f"{int(value):,}"
    return f"{float(value):z.4g}" if isinstance(value, Real) else str(value)


@dataclass(frozen=True, eq=False)
class Table:
    """A data frame with a caption, whose cells are formatted by column.

    Attributes:
        frame: The rows.
        caption: Text above it.
        formats: Format of a column by its name, such as ".2%"; by default numbers of a column have
            the same number of decimals.
        words: Number of columns of words, which come first; by default those without numbers.
        columns: Names of the columns that are shown; all by default. Files have all of them.
    """

    frame: "pd.DataFrame"
    caption: str = ""
    formats: Mapping[str, str] = field(default_factory=dict)
    words: int | None = None
    columns: Sequence[str] | None = None

    @property
    def shown(self) -> "pd.DataFrame":
        """The columns that are shown."""
        return self.frame if self.columns is None else self.frame[list(self.columns)]

    @property
    def header(self) -> list[str]:
        """Names of the columns that are shown."""
        return [str(name) for name in self.shown.columns]

    @property
    def n_words(self) -> int:
        """Number of columns of words."""
        if self.words is not None:
            return self.words
        return sum(dtype.kind not in "fiu" for dtype in self.shown.dtypes)

    @property
    def rows(self) -> list[tuple[str, ...]]:
        """The cells as text."""
        columns = [self._cells(number) for number in range(len(self.header))]
        return list(zip(*columns, strict=True))

    def _cells(self, number: int) -> list[str]:
        column = self.shown.iloc[:, number]
        how = self.formats.get(self.header[number])
        if how is None and column.dtype.kind == "f":
            how = _common_format(column.tolist())
        if how is None:
            return [shown(value) for value in column.tolist()]
        plus = how.startswith("+")
        return [
            "" if math.isnan(value) else signed(value, how[1:]) if plus else format(value, how)
            for value in column.tolist()
        ]


def _common_format(values: Iterable[float]) -> str:
    """Return the format that shows the largest of some numbers with three digits."""
    largest = max((abs(value) for value in values if math.isfinite(value)), default=0.0)
    if largest == 0:
        return "z.0f"
    decimals = DIGITS - 1 - math.floor(math.log10(largest))
    # Numbers that need more places than that are easier to read with an exponent.
    return f"z.{max(0, decimals)}f" if -4 <= decimals <= 5 else "z.2e"


@dataclass(frozen=True, eq=False)
class Picture:
    """A figure with the name of the file that it is saved as.

    Its title or `layout.meta["alt"]` is read to those who do not see it.
    """

    name: str
    figure: "go.Figure"


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
        """Tokens that contribute, the largest absolute contribution first."""
        nonzero = [token for token in self.tokens if token[1]]
        return sorted(nonzero, key=lambda token: -abs(token[1]))


@dataclass(frozen=True)
class ContextList:
    """Contexts in a column, with a heading."""

    title: str
    lines: Sequence[ContextLine]


@dataclass(frozen=True)
class FlowDrawing:
    """The graph of a flow, of `bilens.report.flow_data`, that a reader explores on the page."""

    graph: dict[str, Any]


Panel = Union[Table, Picture, ContextList, FlowDrawing, "go.Figure"]
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


class Reading:
    """The result of an analysis. A subclass implements `facts`, and `frame` or `tables`.

    Attributes:
        axes: Columns of the frame that `plot` draws: y over x, and color for several.
        formats: Formats of columns of its tables; see `Table`.
        explanation: A paragraph for pages: the meaning of the numbers.
    """

    axes: ClassVar[dict[str, str]] = {}
    formats: ClassVar[dict[str, str]] = {}
    explanation: ClassVar[str] = ""

    @property
    def title(self) -> str:
        """Its heading on a page."""
        return type(self).__name__

    def facts(self) -> list[Fact]:
        """Return its main numbers, a name and a value each."""
        return []

    def frame(self) -> "pd.DataFrame":
        """Return its main table, the strongest row first."""
        return next(iter(self.tables().values()), pd.DataFrame())

    def tables(self) -> dict[str, "pd.DataFrame"]:
        """Return its tables by caption."""
        return {self.title: self.frame()} if self._implements("frame") else {}

    def plot(self) -> "go.Figure":
        """Draw the main table, in plotly's default template."""
        frame = self.frame().map(lambda cell: plotly_text(cell) if isinstance(cell, str) else cell)
        # Numbers are points of a line, names are bars.
        if frame[self.axes["x"]].dtype.kind in "if":
            return px.line(frame, markers=True, **self.axes)
        return px.bar(frame, **self.axes)

    def figures(self) -> dict[str, "go.Figure"]:
        """Return its figures by the names of the files that they are saved as."""
        return {"plot": self.plot()} if self.axes or self._implements("plot") else {}

    def texts(self) -> list[ContextList]:
        """Return pieces of text whose tokens are coloured by their contributions."""
        return []

    def record(self) -> dict[str, Any]:
        """Return its numbers for JSON: the facts, and each table as a list of rows."""
        return {
            **{name: plain(value) for name, value in self.facts()},
            **{caption: plain(frame) for caption, frame in self.tables().items()},
        }

    def sections(self) -> list[Section]:
        """Return its content as sections of a page; by default a single one."""
        frames = self.tables()
        # A single table has the section's title for a caption.
        captions = list(frames) if len(frames) > 1 else [""]
        tables = [
            Table(frame, caption, self.formats)
            for caption, frame in zip(captions, frames.values(), strict=False)
        ]
        pictures = [Picture(name, figure) for name, figure in self.figures().items()]
        rows: list[list[Panel]] = [[*tables[:1], *pictures[:1]]]
        others: list[Panel] = [*tables[1:], *pictures[1:], *self.texts()]
        rows += [[part] for part in others]
        return [Section(self.title, self.explanation, rows)]

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(fact_text(*fact) for fact in self.facts())})"

    def _repr_html_(self) -> str:
        return f"<p><code>{escape(repr(self))}</code></p>{self._table_html()}"

    def _table_html(self) -> str:
        """Return the first rows, escaped, with bars behind the numbers that are plotted."""
        frame = self.frame()
        if not len(frame.columns):
            return ""
        # Whole frames would fill a notebook.
        style = frame.head(ROWS).style.hide(axis="index")
        if self.axes:
            style = style.bar(subset=[self.axes["y"]], **BARS)
        numbers = dict.fromkeys(frame.select_dtypes("float"), "{:z.4g}".format)
        table: str = style.format(numbers, escape="html").to_html()
        return table + (f"<p>{ROWS} of {len(frame):,} rows</p>" if len(frame) > ROWS else "")

    def _implements(self, method: str) -> bool:
        return getattr(type(self), method) is not getattr(Reading, method)


def plain(value: Any) -> Any:
    """Return a value as JSON has it: frames and tensors as lists, unknown objects as text."""
    if isinstance(value, Integral) and not isinstance(value, bool):
        value = int(value)
    elif isinstance(value, Real) and not isinstance(value, bool):
        value = float(value)
    elif isinstance(value, Mapping):
        value = {str(name): plain(content) for name, content in value.items()}
    elif hasattr(value, "to_dict"):
        value = [plain(row) for row in value.to_dict("records")]
    elif hasattr(value, "tolist"):
        value = value.tolist()
    elif isinstance(value, list | tuple):
        value = [plain(item) for item in value]
    elif not isinstance(value, str | bool | None):
        value = str(value)
    return value


def fact_text(name: str, value: str | float) -> str:
    """Return a fact as a phrase, such as "10 heads" or "top eigenvalue 2.5"."""
    if not name:
        return shown(value)
    # Counted things come after their number, as in "10 heads".
    counted = name.endswith("s") and re.fullmatch(r"[\d,x+ ]+", shown(value))
    name = name.removesuffix("s") if value == 1 else name
    return f"{shown(value)} {name}" if counted else f"{name} {shown(value)}"
