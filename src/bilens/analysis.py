"""Analyses of models, and readings, their results.

    @analysis("copying")
    def read_copying(model: ResidualModel, k: int = 10) -> CopyingReading: ...

An analysis is a function. The type of its first parameter is the kind of model that it reads. The
other parameters, with their types, defaults and lines in the docstring's Args, become options of
`bilens copying` and controls of the explorer. Texts and images, of the types `Corpus` and
`ImageData`, are loaded by the option `data`. Those of bilens are in `bilens.analyses`.

A reading implements `facts` and `columns`, and everything else is derived. A console shows the
line, a notebook the table, `bilens NAME --json` the record, and reports and the explorer the
sections, which `bilens.pages` lays out by the type of the reading.
"""

import inspect
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar, get_type_hints

from bilens.errors import BilensError
from bilens.lazy_imports import pd
from bilens.sections import (
    Columns,
    ContextList,
    Fact,
    FlowDrawing,
    Percent,
    Picture,
    Section,
    Table,
    captioned,
    distinct,
    fact_text,
    figures_by_name,
)

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["Columns", "ContextList", "Fact", "Percent", "Picture", "Reading", "Section"]
__all__ += ["Table", "analysis"]

Function = TypeVar("Function", bound="Callable[..., Reading]")

Load = Callable[[Mapping[str, Any], bool, bool], Any]
"""From values of options, whether images are wanted and whether they may be missing, to data.

None if they may be missing and are not named."""
Check = Callable[[Mapping[str, Any]], None]
"""From values of options to an error, if no model and no data make them right."""
REQUIRED = inspect.Parameter.empty


@dataclass(frozen=True)
class Option:
    """A setting of an analysis: an option of its command, and a control of the explorer."""

    name: str
    type: Any
    default: Any
    help: str


class Reading:
    """The result of an analysis. A subclass implements `facts` and `columns`.

    Attributes:
        axes: The columns that `plot` draws: y over x, and color for several.
        formats: Formats of columns of its tables; see `Table`.
        explanation: A paragraph for pages: the meaning of the numbers.
        is_picture: A notebook shows its picture, and not its table.
        has_plain_fields: Its record is its fields by their names; without, it is the facts and
            tables, since fields are models, data and large arrays.
    """

    axes: ClassVar[dict[str, str]] = {}
    formats: ClassVar[dict[str, str]] = {}
    explanation: ClassVar[str] = ""
    is_picture: ClassVar[bool] = False
    has_plain_fields: ClassVar[bool] = False

    @property
    def title(self) -> str:
        """Its heading on a page."""
        return type(self).__name__

    @property
    def is_quick(self) -> bool:
        """Whether its main table takes a notebook no long computation, and is shown with it."""
        return True

    def answer(self) -> str:
        """Return what it says, in sentences; empty where its facts say it all."""
        return ""

    @property
    def said(self) -> str:
        """Its answer, or without one the sentences among its facts."""
        texts = (fact_text(*fact) for fact in self.facts())
        return self.answer() or "\n".join(text for text in texts if text[-1:] == ".")

    def facts(self) -> list[Fact]:
        """Return its main numbers, a name and a value each."""
        return []

    def columns(self) -> Columns:
        """Return its main table by column, the strongest row first; empty without one."""
        return {}

    def frame(self) -> "pd.DataFrame":
        """Return its main table as a data frame."""
        return pd.DataFrame(self.columns())

    def plot(self, *arguments: Any, **options: Any) -> Any:
        """Draw its picture, a figure of matplotlib; see `bilens.pages.plot_of`."""
        return self._pages.plot_of(self, *arguments, **options)

    def sections(self) -> list[Section]:
        """Return its content as sections of a page; see `bilens.pages.sections_of`."""
        sections: list[Section] = self._pages.sections_of(self)
        return sections

    def tables(self) -> dict[str, "pd.DataFrame"]:
        """Return the tables of its sections, by their captions or else by the section's title.

        Of several tables of one caption, the second has the number 2 after it, and so on.
        """
        parts = captioned(self.sections())
        tables = [(name, part.frame) for name, part in parts if isinstance(part, Table)]
        names = distinct(name for name, _ in tables)
        return dict(zip(names, (frame for _, frame in tables), strict=True))

    def figures(self) -> dict[str, "Figure"]:
        """Return the figures of its sections by the names of the files that they are saved as."""
        parts = [part for section in self.sections() for part in section.parts]
        # A graph that a reader explores is saved as its picture.
        has_graph = any(isinstance(part, FlowDrawing) for part in parts)
        return ({"graph": self.plot()} if has_graph else {}) | figures_by_name(parts)

    def record(self) -> dict[str, Any]:
        """Return its numbers for JSON: its plain fields, or its facts and tables."""
        record: dict[str, Any] = self._pages.record_of(self)
        return record

    @property
    def _pages(self) -> Any:
        # The one import upwards, made when something is shown and never before: the last line of a
        # notebook's cell shows a reading whether its user has imported pages or not, and what
        # computes readings draws nothing.
        pages = import_module("bilens.pages.layout")
        pages.import_page(self)
        return pages

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(fact_text(*fact) for fact in self.facts())})"

    def _repr_mimebundle_(self, **_: Any) -> dict[str, Any]:
        bundle: dict[str, Any] = self._pages.show(self)
        return bundle


@dataclass(frozen=True)
class Analysis:
    """A registered function from a model to a reading."""

    name: str
    read: Callable[..., Reading]
    refuse: Check | None = None

    @cached_property
    def parameters(self) -> list[inspect.Parameter]:
        """Parameters of the function, without the model."""
        return list(inspect.signature(self.read).parameters.values())[1:]

    @cached_property
    def options(self) -> list[Option]:
        """The options that set the parameters, required ones first."""
        lines = help_lines(self.read)
        options: list[Option] = []
        for parameter in self.parameters:
            line = lines.get(parameter.name, "")
            if _data_kind(parameter):
                name_help = "Name of the data; by default that of the training."
                help_text = name_help if parameter.default is REQUIRED else line
                folder = "Folder of the data; by default the environment variable BILENS_DATA."
                options.append(Option("data", str | None, None, help_text))
                options.append(Option("data_dir", Path | None, None, folder))
            else:
                kind = parameter.annotation
                if isinstance(kind, str):  # of a file in which all annotations are text
                    kind = get_type_hints(self.read, include_extras=True)[parameter.name]
                options.append(Option(parameter.name, kind, parameter.default, line))
        return sorted(options, key=lambda option: option.default is not REQUIRED)

    @cached_property
    def on(self) -> Any:
        """Type of the model that it reads."""
        first = next(iter(inspect.signature(self.read).parameters))
        return get_type_hints(self.read)[first]

    @cached_property
    def about(self) -> str:
        """The docstring without its sections."""
        text = inspect.getdoc(self.read) or ""
        return re.split(r"\n\n(?:Args|Returns|Raises|Source|Example):\s", text)[0].strip()

    @property
    def is_built_in(self) -> bool:
        """True if it comes with bilens."""
        return self.read.__module__.startswith("bilens.analyses.")

    def fits(self, model: object) -> bool:
        """Return True if it reads models of this kind."""
        return self.on is Any or isinstance(model, self.on)

    def check(self, settings: Mapping[str, Any]) -> None:
        """Raise for values of options that are wrong for every model, before one is loaded."""
        values = {option.name: settings.get(option.name, option.default) for option in self.options}
        for option in self.options:
            if values[option.name] is REQUIRED:
                raise BilensError(
                    f"{self.name} needs {option.name}: {option.help or 'see its help'}"
                )
        if self.refuse is not None:
            self.refuse(values)

    def run(
        self, model: Any, settings: Mapping[str, Any], load: Load, *, source: str | Path = ""
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
        self.check(settings)
        values = {}
        for parameter in self.parameters:
            name, default = parameter.name, parameter.default
            if kind := _data_kind(parameter):
                values[name] = load(settings, kind == "ImageData", default is not REQUIRED)
            else:
                values[name] = settings.get(name, default)
        reading = self.read(model, **values)
        if not isinstance(reading, Reading):
            raise BilensError(
                f"{self.name} returned {type(reading).__name__}, expected a subclass of Reading"
            )
        return reading


TAKEN: tuple[str, ...] = ("chat", "data", "data_dir", "device", "device_map", "low_memory")
TAKEN += ("help", "json", "output", "version")
"""Options that every command of an analysis has, or that data brings."""


def check_parameters(name: str, function: Callable[..., Any]) -> None:
    """Raise unless the parameters of a function, the model and then options, can be read."""
    parameters = list(inspect.signature(function).parameters.values())
    if not parameters:
        raise BilensError(f"{name}: its function has no parameter, expected the model as its first")
    for parameter in parameters:
        is_one = parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
        if not is_one or parameter.annotation is REQUIRED:
            raise BilensError(
                f"{name}: parameter {parameter} is no single one with a type, expected one such as "
                "model: ResidualModel, the first, or k: int = 10"
            )
        if parameter.name in TAKEN and not _data_kind(parameter):
            raise BilensError(
                f"{name}: parameter {parameter} has the name of an option that every command has; "
                "rename it"
            )


def _data_kind(parameter: inspect.Parameter) -> str:
    """Return the name of the type of a parameter that is loaded by name, or nothing."""
    match = re.search(r"\b(Corpus|ImageData)\b", inspect.formatannotation(parameter.annotation))
    return match[0] if match else ""


def help_lines(function: Callable[..., Any]) -> dict[str, str]:
    """Return the lines of a docstring's section Args by name."""
    # Docstrings are the only source of help, so options cannot drift from them.
    text = inspect.getdoc(function) or ""
    match = re.search(r"^Args:\n((?:[ \t]+.*\n?|\n)+)", text, re.MULTILINE)
    lines = re.findall(r"^    (\w+): (.*(?:\n {6,}.*)*)", match[1] if match else "", re.MULTILINE)
    return {name: " ".join(text.split()) for name, text in lines}


REGISTERED: dict[str, Analysis] = {}
"""Analyses by name; `bilens.analyses` registers those of bilens."""


def analysis(name: str, *, check: Check | None = None) -> Callable[[Function], Function]:
    """Register a function from a model to a reading under a name.

    Args:
        name: Of its command: lowercase letters, digits and hyphens.
        check: Raises for values of its options, by name, that are wrong for every model. A command
            calls it before it imports torch and loads a model.
    """
    if not re.fullmatch(r"[a-z][a-z0-9-]*", name):
        raise BilensError(
            f"name={name!r}: expected lowercase letters, digits and hyphens, such as 'copying'"
        )

    def register(function: Function) -> Function:
        check_parameters(name, function)
        entry, earlier = Analysis(name, function, check), REGISTERED.get(name)
        # A cell of a notebook that runs again replaces its own analysis.
        if earlier and earlier.is_built_in is not entry.is_built_in:
            raise BilensError(f"name={name!r} is an analysis of bilens; choose another name")
        REGISTERED[name] = entry
        return function

    return register
