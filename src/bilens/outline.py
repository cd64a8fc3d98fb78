"""Functions and types of bilens as their source declares them, without an import of their module.

The options of a command are the parameters of a function whose module imports torch and
transformers, and that takes seconds. `bilens NAME --help` and errors of usage need only its
signature and its docstring.
"""

import ast
import builtins
import copy
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any


@cache
def outline(module: str, name: str) -> Any:
    """Return a function, a dataclass or an alias of a type by its name in a module.

    Functions have no body and no type of their first parameter. Dataclasses have no methods. Other
    classes, results of functions, and types of other libraries are empty classes of that name.
    """
    # Modules that are imported: they need nothing but the standard library.
    light = (
        "bilens.options",
        "bilens.settings",
        "collections.abc",
        "dataclasses",
        "pathlib",
        "typing",
    )
    if module in light:
        return getattr(import_module(module), name)
    for node in source(module).body if module.startswith("bilens.") else []:
        if isinstance(node, ast.ImportFrom):
            for alias in node.names:
                if name == (alias.asname or alias.name):
                    return outline(str(node.module), alias.name)
        elif name in _names(node):
            return _declare(node, module, name)
    return _empty(module, name)


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
        is_field = [isinstance(part, ast.AnnAssign | ast.Expr) for part in node.body]
        body: list[ast.stmt] = [p for p, wanted in zip(node.body, is_field, strict=True) if wanted]
        marks = [mark for mark in node.decorator_list if "dataclass" in ast.unparse(mark)]
        # Only dataclasses are set by options.
        bases = node.bases if marks else []
        body = body if marks else []
        node = ast.ClassDef(name, bases, [], body or [ast.Pass()], marks)
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
