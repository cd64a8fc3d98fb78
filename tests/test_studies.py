"""Studies stand on what users have: they import public names of bilens only."""

import ast
import importlib
import re
from pathlib import Path

from tests.source import nodes_of_files

ROOT = Path(__file__).parents[1]


def documented():
    """Return the modules that have a page of the reference."""
    pages = "\n".join(page.read_text("utf-8") for page in (ROOT / "docs" / "api").glob("*.md"))
    return set(re.findall(r"^::: (bilens\S*)$", pages, re.MULTILINE))


def is_public(name):
    """Return whether a dotted name is listed by a module, or stands on a page without a list."""
    module, _, last = name.rpartition(".")
    if not module or last.startswith("__") or name in documented():
        return True
    listed = getattr(importlib.import_module(module), "__all__", ())
    return last in listed or (not listed and module in documented() and last[0] != "_")


def imported(nodes):
    """Yield dotted names of bilens that a file imports, or takes from the package."""
    for node in nodes:
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "bilens":
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Import):
            yield from (x.name for x in node.names if x.name.split(".")[0] == "bilens")
        elif isinstance(node, ast.Attribute) and ast.unparse(node).startswith("bilens."):
            yield re.match(r"bilens(\.[a-z]\w*(?=\.))?\.\w+", ast.unparse(node) + ".")[0]


def hidden(nodes):
    """Yield names with an underscore that a file takes from other objects than its own."""
    for node in nodes:
        if isinstance(node, ast.Attribute) and ast.unparse(node.value) not in ("self", "cls"):
            yield from re.findall("^_(?!fields|asdict|replace)[a-z]\\w*", node.attr)


def test_studies_import_public_names_only():
    defined = set()
    for nodes in nodes_of_files().values():
        defined |= {node.name for node in nodes if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    found = []
    for folder in ("experiments", "benchmarks", "docs"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            nodes = [*ast.walk(ast.parse(path.read_text("utf-8")))]
            own = {node.name for node in nodes if isinstance(node, ast.FunctionDef)}
            names = {name for name in imported(nodes) if not is_public(name)}
            names |= {*hidden(nodes)} & defined - own
            found += [f"{path.relative_to(ROOT)}: {name}" for name in sorted(names)]
    assert not found, "\n".join(found)
