"""The registry of analyses: commands, reports and the explorer are generic over it.

    @reading("copying")
    def read_copying(model: ResidualModel, k: int = 10) -> CopyingReading: ...

The type of the first parameter is the kind of model that is read. The other parameters, with their
types, defaults and lines in the docstring's Args, become options of `bilens copying` and controls
of the explorer. Nothing here imports torch, so that `bilens --help` is quick.
"""

import inspect
import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from importlib import import_module, util
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar, get_type_hints

from bilens.errors import BilensError
from bilens.reading import Reading

Function = TypeVar("Function", bound=Callable[..., Reading])

BUILT_IN: Mapping[str, tuple[str, str]] = MappingProxyType(
    {
        "ngrams": ("language.ngrams", "The n-grams of a token, from the weights alone."),
        "heads": ("language.heads", "Tokens that heads attend to, and outputs that they raise."),
        "summary": ("summary", "Size, loss, and the strongest parts for a prompt."),
        "contexts": (
            "language.reading",
            "Eigenvectors of a token, and texts where they are active.",
        ),
        "composition": ("language.heads", "Share of each component's output that later ones read."),
        "logits": ("language.stream", "Next token's logits by path through the last layer."),
        "generate": ("language.contexts", "Let a language model continue a text."),
        "flow": ("flow.reading", "Where a logit comes from on a text, node by node."),
        "recurring": (
            "flow.recurring",
            "Heads and directions that recur in the flows of many texts.",
        ),
        "eigenvectors": ("classifier", "Eigenvectors of a classifier of one layer."),
        "explain": ("classifier", "The eigenvectors that make the highest logits of an image."),
        "paths": ("deep", "Strongest paths through a classifier of several layers."),
        "bonds": ("bonds", "The few directions between the layers of a classifier."),
        "masks": ("classifier", "Pictures from the weights that turn images into a class."),
    }
)
"""By name: the module in `bilens.read` of an analysis of bilens, and a line about it."""


def module_of(name: str) -> str:
    """Return the module of an analysis of bilens."""
    return f"bilens.read.{BUILT_IN[name][0]}"


@dataclass(frozen=True)
class Analysis:
    """A registered function from a model to a reading.

    Attributes:
        name: Its command.
        read: The function.
    """

    name: str
    read: Callable[..., Reading]

    @cached_property
    def hints(self) -> dict[str, Any]:
        """Types of all parameters and of the result."""
        return get_type_hints(self.read, include_extras=True)

    @cached_property
    def parameters(self) -> dict[str, inspect.Parameter]:
        """Parameters by name, without the model."""
        _, *others = inspect.signature(self.read).parameters.values()
        return {parameter.name: parameter for parameter in others}

    @cached_property
    def on(self) -> Any:
        """Type of the model that it reads."""
        return self.hints[next(iter(inspect.signature(self.read).parameters))]

    @cached_property
    def about(self) -> str:
        """The docstring without its sections."""
        text = inspect.getdoc(self.read) or ""
        return re.split(r"\n\n(?:Args|Returns|Raises|Source|Example):\n", text)[0].strip()

    @cached_property
    def line(self) -> str:
        """A line about it: that of the registry, or the first of the docstring."""
        return BUILT_IN[self.name][1] if self.name in BUILT_IN else self.about.split("\n")[0]

    @cached_property
    def help(self) -> dict[str, str]:
        """Description of each parameter, from the Args of the docstring."""
        # Docstrings are the only source of help, so options cannot drift from them.
        section = re.search(
            r"^Args:\n((?:[ \t]+.*\n?|\n)+)", inspect.getdoc(self.read) or "", re.MULTILINE
        )
        lines = re.findall(
            r"^    (\w+): (.*(?:\n {6,}.*)*)", section[1] if section else "", re.MULTILINE
        )
        return {name: " ".join(text.split()) for name, text in lines}

    def fits(self, model: object) -> bool:
        """Return True if it reads models of this kind."""
        return isinstance(model, self.on)


_REGISTERED: dict[str, Analysis] = {}


def reading(name: str) -> Callable[[Function], Function]:
    """Register a function from a model to a reading under a name.

    Args:
        name: Of its command: lowercase letters, digits and hyphens.

    Raises:
        BilensError: the name has other characters, or belongs to a reading of bilens.
    """
    if not re.fullmatch(r"[a-z][a-z0-9-]*", name):
        raise BilensError(
            f"name={name!r}: expected lowercase letters, digits and hyphens, such as 'copying'"
        )

    def register(function: Function) -> Function:
        # A cell of a notebook that runs again replaces its own reading.
        if name in BUILT_IN and function.__module__ != module_of(name):
            raise BilensError(f"name={name!r} is a reading of bilens; choose another name")
        _REGISTERED[name] = Analysis(name, function)
        return function

    return register


def analysis(name: str) -> Analysis:
    """Return the analysis with a name, of bilens or of an imported module.

    Raises:
        BilensError: no analysis has that name.
    """
    # The import registers it; `--help` needs only the names.
    if name not in _REGISTERED and name in BUILT_IN:
        import_module(module_of(name))
    if name not in _REGISTERED:
        names = ", ".join(sorted({*BUILT_IN, *_REGISTERED}))
        raise BilensError(f"{name!r} is not a registered reading; expected one of {names}")
    return _REGISTERED[name]


def named_analyses(name: str) -> list[Analysis]:
    """Return the analysis with a name, or those of a Python file if the name ends in .py.

    Raises:
        BilensError: no analysis has that name.
    """
    return load_file(name) if name.endswith(".py") else [analysis(name)]


def load_file(path: str | Path) -> list[Analysis]:
    """Import a Python file, and return the analyses that it registers.

    Raises:
        BilensError: the file does not exist, or registers none.
    """
    path = Path(path).resolve()
    # Under a name of its own, so that a file cannot shadow a module of the same name.
    spec = util.spec_from_file_location(f"bilens_file_{path.stem}", path)
    if spec is None or spec.loader is None or not path.is_file():
        raise BilensError(f"{path} is not a Python file")
    module = util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    # The file's imports may register readings too.
    added = [entry for entry in _REGISTERED.values() if entry.read.__module__ == spec.name]
    if not added:
        raise BilensError(f"{path} registers no reading; decorate its function with @reading(...)")
    return added
