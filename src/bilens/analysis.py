"""Analyses of models, and readings, their results.

    @analysis("copying")
    def read_copying(model: ResidualModel, k: int = 10) -> CopyingReading: ...

An analysis is a function. The type of its first parameter is the kind of model that it reads. The
other parameters, with their types, defaults and lines in the docstring's Args, become options of
`bilens copying` and controls of the explorer; see `bilens.options`.

A reading implements `facts` and `frame`, or `facts` and `sections`; everything else is derived. A
console shows the line, a notebook the table, `bilens NAME --json` the record, and reports and the
explorer lay out the sections.
"""

import inspect
import os
import re
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from hashlib import sha256
from html import escape
from importlib import import_module, util
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar, TypeVar, get_type_hints

from bilens.errors import BilensError
from bilens.lazy_imports import go, pd, px
from bilens.options import REQUIRED, Loader, Option, Parameter, declared, help_lines
from bilens.sections import (
    ContextList,
    Fact,
    Panel,
    Picture,
    Section,
    Table,
    distinct,
    fact_text,
    named_figures,
    plain,
    plotly_text,
)

Function = TypeVar("Function", bound="Callable[..., Reading]")

BUILT_IN: Mapping[str, tuple[str, str]] = MappingProxyType(
    {
        "ngrams": ("language.ngrams", "The n-grams of a token, from the weights alone."),
        "heads": ("language.heads", "Tokens that heads attend to, and outputs that they raise."),
        "summary": ("summary", "Size, loss, and the strongest parts for a prompt."),
        "contexts": (
            "language.outputs",
            "Eigenvectors of a token, and texts where they are active.",
        ),
        "composition": ("language.heads", "Share of each component's output that later ones read."),
        "logits": ("language.stream", "Next token's logits by path through the last layer."),
        "generate": ("language.contexts", "Let a language model continue a text."),
        "flow": ("flow.reading", "Where a logit comes from on a text, node by node."),
        "circuit": (
            "flow.circuit_reading",
            "The few parts that answer a question, measured on other questions.",
        ),
        "questions": (
            "flow.proposal_reading",
            "Further questions like a first one, which the model proposes.",
        ),
        "task-directions": (
            "flow.recurring",
            "Directions of MLPs that carry the answers to the questions of a task.",
        ),
        "eigenvectors": ("classifier", "Eigenvectors of a classifier of one layer."),
        "explain": ("classifier", "The eigenvectors that make the highest logits of an image."),
        "paths": ("deep", "Strongest paths through a classifier of several layers."),
        "bonds": ("bonds", "The few directions between the layers of a classifier."),
    }
)
"""By name: the module in `bilens.read` of an analysis of bilens, and a line about it."""


class Reading:
    """The result of an analysis. A subclass implements `facts`, and `frame` or `sections`.

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
        """Return its main table, the strongest row first; without one, a table without columns."""
        return pd.DataFrame()

    def plot(self) -> "go.Figure":
        """Draw the main table, in plotly's default template."""
        frame = self.frame().map(lambda cell: plotly_text(cell) if isinstance(cell, str) else cell)
        # Numbers are points of a line, names are bars.
        if frame[self.axes["x"]].dtype.kind in "if":
            return px.line(frame, markers=True, **self.axes)
        return px.bar(frame, **self.axes)

    def sections(self) -> list[Section]:
        """Return its content as sections of a page; by default the table and the plot."""
        frame, row = self.frame(), list[Panel]()
        if len(frame.columns):
            row.append(Table(frame, "", self.formats))
        if self.axes:
            row.append(Picture("plot", self.plot))
        return [Section(self.title, self.explanation, [row], self.facts())]

    def tables(self) -> dict[str, "pd.DataFrame"]:
        """Return the tables of its sections, by their captions or else by the section's title.

        Of several tables of one caption, the second has the number 2 after it, and so on.
        """
        captioned = [(name, part) for name, part in self._captioned() if isinstance(part, Table)]
        names = distinct(name for name, _ in captioned)
        return {name: table.frame for name, (_, table) in zip(names, captioned, strict=True)}

    def figures(self) -> dict[str, "go.Figure"]:
        """Return the figures of its sections by the names of the files that they are saved as."""
        parts = [part for section in self.sections() for part in section.parts]
        return named_figures(parts)

    def record(self) -> dict[str, Any]:
        """Return its numbers for JSON: the facts, each table as rows, and each text as lines.

        No entry takes the place of another of its name; see `tables`.
        """
        entries: list[tuple[str, Any]] = [(name, plain(value)) for name, value in self.facts()]
        for name, part in self._captioned():
            rows = plain(part.frame) if isinstance(part, Table) else list(map(asdict, part.lines))
            entries.append((name, rows))
        names = distinct(name for name, _ in entries)
        return dict(zip(names, (value for _, value in entries), strict=True))

    def _captioned(self) -> list[tuple[str, Table | ContextList]]:
        """Return its tables and texts with their captions or else the section's title."""
        captioned: list[tuple[str, Table | ContextList]] = []
        for section in self.sections():
            for part in section.parts:
                if isinstance(part, Table):
                    captioned.append((part.caption or section.title, part))
                elif isinstance(part, ContextList):
                    captioned.append((part.title, part))
        return captioned

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
        shown = frame.head(10)
        style = shown.style.hide(axis="index")
        if self.axes:
            bars = {"align": "zero", "color": ["#b2182b55", "#2166ac55"], "width": 90}
            style = style.bar(subset=[self.axes["y"]], **bars)
        numbers = dict.fromkeys(frame.select_dtypes("float"), "{:z.4g}".format)
        table: str = style.format(numbers, escape="html").to_html()
        return table + (f"<p>10 of {len(frame):,} rows</p>" if len(frame) > 10 else "")


@dataclass(frozen=True)
class Analysis:
    """A registered function from a model to a reading."""

    name: str
    read: Callable[..., Reading]

    @cached_property
    def hints(self) -> dict[str, Any]:
        """Types of all parameters and of the result."""
        return get_type_hints(self.read, include_extras=True)

    @cached_property
    def parameters(self) -> dict[str, Parameter]:
        """Parameters by name, without the model."""
        _, *others = inspect.signature(self.read).parameters.values()
        lines = help_lines(self.read, "Args")
        return {
            p.name: Parameter(p.name, self.hints[p.name], p.default, lines.get(p.name, ""))
            for p in others
        }

    @cached_property
    def options(self) -> list[Option]:
        """The options that set the parameters, required ones first."""
        options = [o for p in self.parameters.values() for o in p.options()]
        # Dataclasses need fields without defaults first.
        return sorted(options, key=lambda option: option.default is not REQUIRED)

    @cached_property
    def on(self) -> Any:
        """Type of the model that it reads."""
        return self.hints[next(iter(inspect.signature(self.read).parameters))]

    @cached_property
    def about(self) -> str:
        """The docstring without its sections."""
        text = inspect.getdoc(self.read) or ""
        return re.split(r"\n\n(?:Args|Returns|Raises|Source|Example):\s", text)[0].strip()

    @cached_property
    def line(self) -> str:
        """A line about it: that of the registry, or the first of the docstring."""
        return BUILT_IN[self.name][1] if self.name in BUILT_IN else self.about.split("\n")[0]

    def fits(self, model: object) -> bool:
        """Return True if it reads models of this kind."""
        return isinstance(model, self.on)

    def run(
        self, model: Any, settings: Mapping[str, Any], load: Loader, *, source: str | Path = ""
    ) -> Reading:
        """Return the reading of a model with the values of options.

        Options are named; defaults may be left out. `load` loads texts and images, and `source` is
        the model's name or folder, for errors.
        """
        if not self.fits(model):
            kind = getattr(self.on, "__name__", str(self.on))
            # Kinds of models by the names of their types, for errors.
            kinds = {"ResidualModel": "language models", "TensorChain": "image classifiers"}
            raise BilensError(
                f"{source or 'The model'} holds {type(model).__name__}, and `bilens {self.name}` "
                f"reads {kinds.get(kind, kind)}"
            )
        values = {}
        for name, parameter in self.parameters.items():
            values[name] = parameter.value(settings, model, load)
            if values[name] is REQUIRED:
                raise BilensError(f"{self.name} needs {name}: {parameter.help or 'see its help'}")
        return self.read(model, **values)


_REGISTERED: dict[str, Analysis] = {}


def analysis(name: str) -> Callable[[Function], Function]:
    """Register a function from a model to a reading under a name.

    Args:
        name: Of its command: lowercase letters, digits and hyphens.
    """
    if not re.fullmatch(r"[a-z][a-z0-9-]*", name):
        raise BilensError(
            f"name={name!r}: expected lowercase letters, digits and hyphens, such as 'copying'"
        )

    def register(function: Function) -> Function:
        # A cell of a notebook that runs again replaces its own analysis.
        if name in BUILT_IN and function.__module__ != module_of(name):
            raise BilensError(f"name={name!r} is an analysis of bilens; choose another name")
        _REGISTERED[name] = Analysis(name, function)
        return function

    return register


def module_of(name: str) -> str:
    """Return the module of an analysis of bilens."""
    return f"bilens.read.{BUILT_IN[name][0]}"


def find_analysis(name: str) -> Analysis:
    """Return the analysis with a name, of bilens or of an imported module."""
    # The import registers it.
    if name not in _REGISTERED and name in BUILT_IN:
        import_module(module_of(name))
    if name not in _REGISTERED:
        names = ", ".join(sorted({*BUILT_IN, *_REGISTERED}))
        raise BilensError(f"{name!r} is not a registered analysis; expected one of {names}")
    return _REGISTERED[name]


def declared_analysis(name: str) -> Analysis:
    """Return an analysis of bilens as its source declares it: its options, and no code to run."""
    return Analysis(name, declared(module_of(name), f"analysis('{name}')"))


def named_analyses(name: str) -> list[Analysis]:
    """Return the analysis with a name, or those of a Python file if the name ends in .py."""
    return load_file(name) if name.endswith(".py") else [find_analysis(name)]


def check_once(entries: Sequence[Analysis]) -> None:
    """Raise if a page would have two analyses of one name."""
    counts = Counter(entry.name for entry in entries)
    for name, count in counts.items():
        if count > 1:
            raise BilensError(f"add={name!r}: the page has it already, expected each reading once")


def load_file(path: str | Path) -> list[Analysis]:
    """Import a Python file, and return the analyses that it registers."""
    path = Path(path).resolve()
    # Under a name of its own, so that a file cannot shadow a module, or a file of another folder.
    name = f"bilens_file_{path.stem}_{sha256(os.fsencode(path)).hexdigest()[:16]}"
    spec = util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None or not path.is_file():
        raise BilensError(f"{path} is not a Python file")
    module = util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    # The file's imports may register analyses too.
    added = [entry for entry in _REGISTERED.values() if entry.read.__module__ == spec.name]
    if not added:
        raise BilensError(
            f"{path} registers no analysis; decorate its function with @analysis(...)"
        )
    return added
