"""Options of commands and controls of the explorer, which set the parameters of analyses.

A parameter is set by an option of its own name and type, with three exceptions, by its type. Types
such as `Layer`, `Among` and `Minus` carry another option. A dataclass is set by its fields. Texts
and images are found by the name of the data.

Help is quick: nothing here imports torch. The functions whose parameters are options are in modules
that do, which takes seconds. `outline` reads signatures and docstrings from their source instead.
"""

import ast
import builtins
import copy
import inspect
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields, is_dataclass
from functools import cache, cached_property
from importlib import import_module
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
    """A plain setting of an analysis."""

    name: str
    type: Any
    default: Any
    help: str


@dataclass(frozen=True)
class Setting:
    """Another option than a parameter itself, carried by its type: `Annotated[int, Setting(...)]`.

    The line of the parameter takes the place of {} in its help. `value` returns the parameter for
    the value of the option and the model.
    """

    type: Any
    default: Any
    help: str
    value: Callable[[Any, Any], Any]


@dataclass(frozen=True)
class Parameter:
    """A parameter of an analysis, or a field of a dataclass that it takes."""

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
    defaults = {f.name: REQUIRED if f.default is MISSING else f.default for f in fields(kind)}
    return [Parameter(n, hints[n], default, lines.get(n, "")) for n, default in defaults.items()]


def layer_of(model: Any, layer: int | None = None) -> int:
    """Return the number of a layer; a model of several needs it, for it is never guessed."""
    if layer is None and model.n_layers > 1:
        raise BilensError(f"layer=None, expected 0 to {model.n_layers - 1}: name it with --layer")
    return layer or 0


def first_tokens(among: int | Sequence[int] | None, model: Any) -> Sequence[int] | None:
    """Return the numbers of so many tokens, the first of a vocabulary; others stay as they are."""
    return range(min(among, model.vocab_size)) if isinstance(among, int) else among


_NAME = r'(?:"(?:[^"]|"")+"|[^",][^,]*)'
"""A name in double quotes, which holds each of its own twice, or a name without a comma."""


def token_list(names: str | Sequence[str], model: Any = None) -> tuple[str, ...]:
    """Return names of tokens, which are separated by commas in a text.

    A name with a comma, or with a double quote in front, stands in double quotes, as fields of CSV
    do. A single letter or sign is itself, also behind a space: `,` is the comma.

    Raises:
        BilensError: a name is empty, or its quotes do not end.
    """
    if not isinstance(names, str):
        return tuple(names)
    if not names or len(names.strip(" ")) == 1:
        return (names,) if names else ()
    if not re.fullmatch(f"{_NAME}(?:,{_NAME})*", names):
        raise BilensError(
            f"{names!r} has an empty name or an open quote; expected names separated by commas, "
            'and in double quotes those with a comma, as "," or a quote in front, as """"'
        )
    fields = re.findall(_NAME, names)
    return tuple(x[1:-1].replace('""', '"') if x.startswith('"') else x for x in fields)


def listed(names: Sequence[str]) -> str:
    """Return names of tokens as the text that `token_list` reads."""
    fields = []
    for name in names:
        is_plain = name and "," not in name and not name.startswith('"')
        fields.append(name if is_plain else '"' + name.replace('"', '""') + '"')
    return ",".join(fields)


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
NAMES = Setting(str, "", "{}, separated by commas; one with a comma in double quotes.", token_list)
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


def check_docstrings() -> None:
    """Raise if Python dropped all docstrings: help, and transformers' classes, are made of them."""
    if sys.flags.optimize > 1:
        raise BilensError(
            "Python runs with PYTHONOPTIMIZE=2 or -OO, which drops docstrings: commands would have "
            "no help, and transformers could not open most models. Use PYTHONOPTIMIZE=1, or none"
        )


def help_lines(documented: Any, section: str) -> dict[str, str]:
    """Return the lines of a section of a docstring, Args or Attributes, by name."""
    # Docstrings are the only source of help, so options cannot drift from them.
    text = inspect.getdoc(documented) or ""
    found = re.search(rf"^{section}:\n((?:[ \t]+.*\n?|\n)+)", text, re.MULTILINE)
    lines = re.findall(r"^    (\w+): (.*(?:\n {6,}.*)*)", found[1] if found else "", re.MULTILINE)
    return {name: " ".join(text.split()) for name, text in lines}


def _parsed(kind: Any) -> Any:
    """Return a type with tuples for sequences, which a command line can parse."""
    origin, parts = get_origin(kind), get_args(kind)
    if origin is Annotated:
        return Annotated[(_parsed(parts[0]), *parts[1:])]
    if origin in (Union, UnionType):
        # A text is given as text; token ids are for Python.
        plain = ("builtins", "typing", "pathlib", "collections.abc")
        simple = [p for p in parts if p is NoneType or getattr(p, "__module__", "") in plain]
        return Union[tuple(map(_parsed, simple))]  # noqa: UP007
    if origin is Sequence:
        return tuple[_parsed(parts[0]), ...]  # type: ignore[misc]
    return kind


@cache
def outline(module: str, name: str) -> Any:
    """Return a function, a dataclass or an alias of a type by its name in a module.

    Functions have no body and no type of their first parameter. Dataclasses have no methods. Other
    classes, results of functions, and types of other libraries are empty classes of that name.
    """
    # Modules that need nothing but the standard library.
    light = ["bilens.options", "bilens.settings", "collections.abc", "dataclasses", "pathlib"]
    if module in [*light, "typing"]:
        return getattr(import_module(module), name)
    for node in source(module).body if module.startswith("bilens.") else []:
        if isinstance(node, ast.ImportFrom):
            for alias in node.names:
                if name == (alias.asname or alias.name):
                    return outline(str(node.module), alias.name)
        elif name in _names(node):
            return _declare(node, module, name)
    return _empty(module, name)


def declared(module: str, mark: str) -> Any:
    """Return the outline of the function in a module with a decorator."""
    for node in source(module).body:
        if isinstance(node, ast.FunctionDef) and mark in map(ast.unparse, node.decorator_list):
            return outline(module, node.name)
    raise BilensError(f"{module} has no function @{mark}")


@cache
def source(module: str) -> ast.Module:
    """Return the source of a module of bilens."""
    path = Path(__file__).parents[1].joinpath(*module.split("."))
    path = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    return ast.parse(path.read_text(encoding="utf-8"))


def _empty(module: str, name: str) -> type:
    # Annotations such as Int[Tensor, "time"] ask the class for an item.
    members = {"__module__": module, "__class_getitem__": classmethod(lambda kind, _: kind)}
    return type(name, (), members)


def _names(node: ast.stmt) -> list[str]:
    """Return the names that a statement of a module defines."""
    if isinstance(node, ast.Assign):
        return [target.id for target in node.targets if isinstance(target, ast.Name)]
    return [node.name] if isinstance(node, ast.FunctionDef | ast.ClassDef) else []


def _declare(node: ast.stmt, module: str, name: str) -> Any:
    """Run a statement without its code, with outlines of the names that it needs."""
    namespace: dict[str, Any] = {"__name__": module}
    if isinstance(node, ast.ClassDef):
        declared = [part for part in node.body if isinstance(part, ast.AnnAssign | ast.Expr)]
        marks = [mark for mark in node.decorator_list if "dataclass" in ast.unparse(mark)]
        # Only dataclasses are set by options.
        bases, body = (node.bases, declared) if marks else ([], [])
        node = ast.ClassDef(name, bases, [], [*body, ast.Pass()], marks)
    elif isinstance(node, ast.FunctionDef):
        docstring = ast.Expr(ast.Constant(ast.get_docstring(node, clean=False) or ""))
        # The first parameter is the model, which no option sets.
        first, *others = node.args.args
        parameters = copy.copy(node.args)
        parameters.args = [ast.arg(first.arg), *others]
        result = ast.unparse(node.returns) if node.returns else "None"
        namespace[result] = _empty(module, result)
        node = ast.FunctionDef(name, parameters, [docstring], [], node.returns)
    used = {part.id for part in ast.walk(node) if isinstance(part, ast.Name)} - {name}
    for needed in used - set(dir(builtins)) - namespace.keys():
        namespace[needed] = outline(module, needed)
    program = ast.fix_missing_locations(ast.Module([node], []))
    exec(compile(program, module, "exec"), namespace)
    return namespace[name]
