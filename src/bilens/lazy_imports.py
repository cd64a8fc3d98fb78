"""Modules that are imported when something of them is first used: slow ones, and optional ones."""

from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

from bilens.errors import BilensError

__all__ = [
    "datasets",
    "go",
    "lazy_import",
    "networkx",
    "pd",
    "px",
    "safetensors",
    "tokenizers",
    "transformers",
]


def lazy_import(name: str, *, install: str = "") -> Any:
    """A stand-in for a module, which imports it when an attribute is first asked for.

    Where types matter, the type checker imports the module itself:

        if TYPE_CHECKING:
            import gradio
        else:
            gradio = lazy_import("gradio", install="gradio>=6.31")

    Args:
        name: of the module, as in an import statement.
        install: what pip installs, if bilens does not depend on the module.

    Raises:
        BilensError: (on first use) the module is optional and not installed; says what to install.
    """
    return _LazyModule(name, install)


class _LazyModule(ModuleType):
    def __init__(self, name: str, install: str) -> None:
        super().__init__(name)
        self._install = install

    def __getattr__(self, attribute: str) -> Any:
        package = self.__name__.partition(".")[0]
        try:
            module = import_module(self.__name__)
        except ModuleNotFoundError as error:
            # What is missing inside of an installed package is another problem.
            if not self._install or error.name != package:
                raise
            raise BilensError(
                f"{package} is needed for this and is not installed: pip install '{self._install}'"
            ) from error
        return getattr(module, attribute)


if TYPE_CHECKING:
    import datasets
    import networkx  # type: ignore[import-untyped]
    import pandas as pd
    import plotly.express as px
    import plotly.graph_objects as go
    import safetensors
    import tokenizers
    import transformers
else:  # They take seconds to import; the mathematics, and whoever reads images, do without.
    datasets, networkx, safetensors = map(lazy_import, ("datasets", "networkx", "safetensors"))
    pd, px, go = map(lazy_import, ("pandas", "plotly.express", "plotly.graph_objects"))
    tokenizers, transformers = map(lazy_import, ("tokenizers", "transformers"))
