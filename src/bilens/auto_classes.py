"""transformers' Auto classes open bilens's language models, whichever of the two comes first."""

import sys
from importlib import import_module
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

__all__ = ["register_auto_classes"]

LIBRARY, MODELS = "transformers", "bilens.nn.language"


def register_auto_classes() -> None:
    """Import bilens's language models, which registers them, now or right after transformers."""
    if LIBRARY in sys.modules:
        import_module(MODELS)
    else:  # transformers takes a second to import, and images do without it.
        sys.meta_path.insert(0, _Finder())


class _Finder:
    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        # After the package, not after its module of Auto classes: while that one is imported,
        # others that the models need are half-way.
        spec = PathFinder.find_spec(name, path) if name == LIBRARY else None
        if spec is None or spec.loader is None:
            return None
        execute = spec.loader.exec_module

        def execute_and_register(module: ModuleType) -> None:
            execute(module)
            import_module(MODELS)

        spec.loader.exec_module = execute_and_register  # type: ignore[method-assign]
        return spec
