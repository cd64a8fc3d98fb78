"""Which files of results are older than the code that measured them: `make results` lists them.

The code of a file is the recipe or benchmark of its command, and every module that it imports,
directly or not. From a package only the modules that define the imported names count. A change of
comments alone is none. Files that README takes its numbers from come first.
"""

import ast
import re
import subprocess
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from experiments.results import ROOT, load_results

PROGRAM = re.compile(r"bilens reproduce (\w+)|python -m benchmarks\.(\w+)")
OF_README = (*("attention", "bonds", "fig3", "patching", "story", "unseen_templates"),)
"""Files that README takes its numbers from; a test holds that it has no others."""


def main() -> None:
    """Print each file with the modules that changed since its commit, or how many."""
    results = load_results()
    for name in sorted(results, key=lambda name: (name not in OF_README, name)):
        result, place = results[name], "README, " if name in OF_README else ""
        modules = programs(result["command"])
        changed = sorted(path for path in dependencies(modules) if has_changed(path, result))
        about = ", ".join(changed[:3]) + (f" and {len(changed) - 3} more" if changed[3:] else "")
        if not modules:
            about = "no recipe or benchmark measures it"
        if about:
            print(f"{place}{name}.json ({result['commit']}): {about}")


def programs(command: str) -> list[str]:
    """Return the modules of a command that exist."""
    found = []
    for recipe, benchmark in PROGRAM.findall(command):
        found.append(f"experiments.{recipe}" if recipe else f"benchmarks.{benchmark}")
    return [name for name in found if file_of(name) is not None]


def dependencies(modules: list[str]) -> set[str]:
    """Return the paths of modules and of all that they import, from the root of the clone."""
    paths: set[str] = set()
    waiting = list(modules)
    while waiting:
        path = file_of(waiting.pop())
        if path is None or str(path) in paths:
            continue
        paths.add(str(path))
        waiting += imported(path)
    return paths


def file_of(module: str) -> Path | None:
    """Return the path of a module of this repository, or None."""
    place = Path(*module.split("."))
    for base in (Path(), Path("src")):
        for path in (base / f"{place}.py", base / place / "__init__.py"):
            if (ROOT / path).is_file():
                return path
    return None


@cache
def imported(path: Path) -> list[str]:
    """Return the modules that define the names that a file imports."""
    names: list[str] = []
    for node in ast.walk(ast.parse((ROOT / path).read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names += [name for alias in node.names for name in defined(node.module, alias.name)]
    return names


def defined(module: str, name: str) -> Iterator[str]:
    """Yield the module that defines a name, looked up through packages that pass it on."""
    path = file_of(module)
    if file_of(f"{module}.{name}") is not None:
        yield f"{module}.{name}"
    elif path is not None and path.name == "__init__.py":
        for node in ast.walk(ast.parse((ROOT / path).read_text(encoding="utf-8"))):
            if not isinstance(node, ast.ImportFrom) or not node.module:
                continue
            if name in [alias.asname or alias.name for alias in node.names]:
                yield from defined(node.module, name)
                return
        yield module
    else:
        yield module


def has_changed(path: str, result: dict[str, str]) -> bool:
    """Return whether a file's code differs from that at the commit of a result."""
    differing = _git("diff", "--name-only", result["commit"])
    if differing is not None and path not in differing.splitlines():
        return False
    before = _git("show", f"{result['commit']}:{path}")
    return before is None or code(before) != code((ROOT / path).read_text(encoding="utf-8"))


@cache
def code(text: str) -> str:
    """Return the syntax tree of a file without its docstrings."""
    tree = ast.parse(text)
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        if isinstance(body, list):
            node.body = [part for part in body if not _is_text(part)]  # type: ignore[attr-defined]
    return ast.dump(tree)


@cache
def _git(*arguments: str) -> str | None:
    """Return what git prints, or None if it knows no such commit or file."""
    found = subprocess.run(
        ["git", "-C", str(ROOT), *arguments], capture_output=True, text=True, check=False
    )
    return found.stdout if found.returncode == 0 else None


def _is_text(node: ast.AST) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)


if __name__ == "__main__":
    main()
