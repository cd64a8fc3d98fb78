"""The source of the package, parsed once for all tests of a process."""

import ast
from functools import cache
from pathlib import Path

import bilens

SOURCE = Path(bilens.__file__).parent


@cache
def nodes_of_files() -> dict[Path, list[ast.AST]]:
    """Return all nodes of the syntax tree of each file, the whole file first."""
    files = SOURCE.rglob("*.py")
    return {path: [*ast.walk(ast.parse(path.read_text(encoding="utf-8")))] for path in files}


def all_nodes() -> list[ast.AST]:
    return [node for nodes in nodes_of_files().values() for node in nodes]
