"""Options of commands and controls of the explorer, which set the parameters of analyses.

A parameter is set by an option of its own name and type, with three exceptions, by its type. Types
such as `Layer`, `Among` and `Minus` carry another option. A dataclass is set by its fields. Texts
and images are found by the name of the data. Nothing here imports torch, so that help is quick.
"""

import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields, is_dataclass
from functools import cached_property
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from bilens.errors import BilensError

Loader = Callable[[type, Mapping[str, Any], bool], Any]
"""A function that returns the data of a type for some settings; None if it may and is not named."""
DATA = ("Corpus", "ImageData")
"""Types of texts and images, which are loaded by name."""
REQUIRED = inspect.Parameter.empty


@dataclass(frozen=True)
class Option:
    """A plain setting of an analysis.

    Attributes:
        name: Of the option.
        type: A type that a command line can parse.
        default: REQUIRED if there is none.
        help: A sentence.
    """

    name: str
    type: Any
    default: Any
    help: str


@dataclass(frozen=True)
class Setting:
    """Another option than a parameter itself, carried by its type: `Annotated[int, Setting(...)]`.

    Attributes:
        type: Of the option.
        default: Of the option.
        help: Its line, in which {} is that of the parameter.
        value: Return the parameter for the value of the option and the model.
    """

    type: Any
    default: Any
    help: str
    value: Callable[[Any, Any], Any]


@dataclass(frozen=True)
class Parameter:
    """A parameter of an analysis, or a field of a dataclass that it takes.

    Attributes:
        name: Of the parameter.
        hint: Its type.
        default: REQUIRED if there is none.
        help: Its line in the docstring.
    """

    name: str
    hint: Any
    default: Any
    help: str

    @cached_property
    def carried(self) -> Any:
        """What its type carries: a `Setting`, a type of data, a dataclass, or None."""
        for kind in (self.hint, *get_args(self.hint)):
            for extra in getattr(kind, "__metadata__", ()):
                if isinstance(extra, Setting):
                    return extra
            is_data = getattr(kind, "__name__", "") in DATA
            if is_data or (isinstance(kind, type) and is_dataclass(kind)):
                return kind
        return None

    def options(self) -> list[Option]:
        """Return the options that set it."""
        carried, is_required = self.carried, self.default is REQUIRED
        if carried is None:
            return [Option(self.name, _parsed(self.hint), self.default, self.help)]
        if isinstance(carried, Setting):
            help = carried.help.format(self.help.rstrip("."))
            return [Option(self.name, carried.type, carried.default, help)]
        if carried.__name__ in DATA:
            data_help = "Name of the data; by default that of the training."
            data_dir_help = "Folder of the data; by default the environment variable BILENS_DATA."
            return [
                Option("data", str | None, None, data_help if is_required else self.help),
                Option("data_dir", Path | None, None, data_dir_help),
            ]
        options = [option for field in fields_of(carried) for option in field.options()]
        if not is_required:
            # Without a value that it needs, the whole dataclass has its default.
            for i, option in enumerate(options):
                if option.default is REQUIRED:
                    options[i] = Option(option.name, option.type | None, None, option.help)
        return options

    def value(self, settings: Mapping[str, Any], model: Any, load: Loader) -> Any:
        """Return its value for the values of options; REQUIRED if one is missing."""
        carried = self.carried
        if carried is None:
            return settings.get(self.name, self.default)
        if isinstance(carried, Setting):
            return carried.value(settings.get(self.name, carried.default), model)
        if carried.__name__ in DATA:
            return load(carried, settings, self.default is not REQUIRED)
        given = {name: value for name, value in settings.items() if value is not None}
        values = {field.name: field.value(given, model, load) for field in fields_of(carried)}
        missing = [name for name, value in values.items() if value is REQUIRED]
        if not missing:
            return carried(**values)
        for name, value in values.items():
            if value is not REQUIRED and value:
                raise BilensError(f"{name}={given[name]!r} needs {missing[0]} too")
        return self.default


def fields_of(kind: Any) -> list[Parameter]:
    """Return the fields of a dataclass as parameters."""
    hints, lines = get_type_hints(kind, include_extras=True), help_lines(kind, "Attributes")
    return [
        Parameter(
            field.name,
            hints[field.name],
            REQUIRED if field.default is MISSING else field.default,
            lines.get(field.name, ""),
        )
        for field in fields(kind)
    ]


def layer_of(model: Any, layer: int | None = None) -> int:
    """Return the number of a layer; a model of several needs it, for it is never guessed.

    Raises:
        BilensError: the model has several, and none is named.
    """
    if layer is None and model.n_layers > 1:
        raise BilensError(f"layer=None, expected 0 to {model.n_layers - 1}: name it with --layer")
    return layer or 0


def first_tokens(among: int | Sequence[int] | None, model: Any) -> Sequence[int] | None:
    """Return the numbers of so many tokens, the first of a vocabulary; others stay as they are."""
    return range(min(among, model.vocab_size)) if isinstance(among, int) else among


def token_list(names: str | Sequence[str], model: Any = None) -> tuple[str, ...]:
    """Return names of tokens, which are separated by commas in a text."""
    parts = names.split(",") if isinstance(names, str) else names
    return tuple(name for name in parts if name)


Layer = Annotated[
    int,
    Setting(
        int | None,
        None,
        "{}, from 0; models of one layer do not need it.",
        lambda layer, model: layer_of(model, layer),
    ),
]
"""The number of a layer."""
Among = Annotated[
    Sequence[int] | None,
    Setting(
        int | None,
        None,
        "Only this many tokens, the first of the vocabulary, which are often the frequent ones; "
        "all pairs of 50,000 tokens take a minute a head.",
        first_tokens,
    ),
]
"""Numbers of tokens; all by default."""
NAMES = Setting(str, "", "{}, separated by commas.", token_list)
Minus = Annotated[str | int | Sequence[str | int], NAMES]
"""Tokens whose mean is subtracted, by name or number."""
MinusNames = Annotated[tuple[str, ...], NAMES]
"""The same by name only."""
StepName = Literal["fold_norms", "fold_value_biases", "center_writing_weights", "center_unembed"]
"""Steps of the processing of a language model."""
Basis = Literal["model", "pixels"]
"""Space in which eigenvectors are orthonormal: see `spectra`."""
Order = Literal["eigenvalue", "activation"]
"""Order of eigenvectors on a page: by eigenvalue, or by mean activation over the test images."""
Metric = Literal["images", "gaussian", "weights"]
"""Inputs: training images, a Gaussian of their mean and covariance, or standard normal inputs.

The last is a reading of the weights only. The tree has the same bonds for the first two, since it
uses the second moment of the inputs.
"""


def help_lines(documented: Any, section: str) -> dict[str, str]:
    """Return the lines of a section of a docstring, Args or Attributes, by name."""
    # Docstrings are the only source of help, so options cannot drift from them.
    found = re.search(
        rf"^{section}:\n((?:[ \t]+.*\n?|\n)+)", inspect.getdoc(documented) or "", re.MULTILINE
    )
    lines = re.findall(r"^    (\w+): (.*(?:\n {6,}.*)*)", found[1] if found else "", re.MULTILINE)
    return {name: " ".join(text.split()) for name, text in lines}


def _parsed(kind: Any) -> Any:
    """Return a type with tuples for sequences, which a command line can parse."""
    origin, parts = get_origin(kind), get_args(kind)
    if origin is Annotated:
        return Annotated[(_parsed(parts[0]), *parts[1:])]
    if origin in (Union, UnionType):
        # A text is given as text; token ids are for Python.
        # Modules of the types that a command line can parse.
        plain_modules = ("builtins", "typing", "pathlib", "collections.abc")
        simple = [
            _parsed(part)
            for part in parts
            if part is NoneType or getattr(part, "__module__", "") in plain_modules
        ]
        return Union[tuple(simple)]  # noqa: UP007
    if origin is Sequence:
        return tuple[_parsed(parts[0]), ...]  # type: ignore[misc]
    return kind
