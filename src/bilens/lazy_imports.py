"""Slow and optional modules, imported on the first use of an attribute."""

import ast
import inspect
import sys
from collections.abc import Callable
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

from bilens.errors import BilensError

# Re-exported modules must be named for the type checker.
__all__ = ["accelerate", "arrow", "datasets", "parquet", "pd"]
__all__ += ["safetensors", "tokenizers", "transformers"]


def lazy_import(name: str, *, install: str = "") -> Any:
    """Return a stand-in for a module that imports it on the first use of an attribute.

    The type checker imports the module itself:

        if TYPE_CHECKING:
            import datasets
        else:
            datasets = lazy_import("datasets", install=".[train]")

    Raises:
        BilensError: (on first use) the module is not installed; says to install `install`.
    """
    package = name.partition(".")[0]

    def find(attribute: str) -> Any:
        try:
            module = import_module(name)
        except ModuleNotFoundError as error:
            # A module missing inside an installed package is another problem: keep its traceback.
            if not install or error.name != package:
                raise
            raise BilensError(
                f"{package} is needed for this and is not installed: pip install -e "
                f"'{install}' in your clone of bilens"
            ) from error
        return getattr(module, attribute)

    stand_in: Any = ModuleType(name)
    stand_in.__getattr__ = find
    return stand_in


def lazy_names(package: str) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Return `__getattr__` and `__dir__` of a package, whose names are imported on first use.

    The names are those that the package imports for the type checker:

        if TYPE_CHECKING:
            from bilens.nn.layers import Gate
        else:
            __getattr__, __dir__ = lazy_names(__name__)
    """
    # lazy_loader would need each name a second time, in a stub file, for the type checker.
    homes: dict[str, str] = {}
    for node in ast.walk(ast.parse(inspect.getsource(sys.modules[package]))):
        if isinstance(node, ast.ImportFrom):
            homes |= dict.fromkeys((alias.name for alias in node.names), str(node.module))

    def find(name: str) -> Any:
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        if homes[name] == package:
            return import_module(f"{package}.{name}")
        return getattr(import_module(homes[name]), name)

    return find, lambda: sorted({*vars(sys.modules[package]), *homes})


if TYPE_CHECKING:
    import accelerate
    import datasets
    import pandas as pd
    import pyarrow as arrow
    import safetensors
    import tokenizers
    import transformers
    from pyarrow import parquet
else:  # They take seconds to import; the mathematics, and whoever reads images, do without.
    accelerate = lazy_import("accelerate", install=".[train]")
    datasets = lazy_import("datasets", install=".[train]")
    arrow = lazy_import("pyarrow", install=".[train]")
    parquet = lazy_import("pyarrow.parquet", install=".[train]")
    safetensors = lazy_import("safetensors")
    names = ("pandas", "tokenizers", "transformers")
    pd, tokenizers, transformers = map(lazy_import, names)
