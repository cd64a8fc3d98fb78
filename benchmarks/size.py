"""Sizes of the source: lines, files, classes, public names, longest and complex functions, hooks.

`python -m benchmarks.size` prints them and writes `results/size.json`. Public names are those that
the `__all__` lists of packages and documented modules hold, each once; hooks are registrations
outside `bilens.hooks`. Walks are those of `benchmarks.walks`.
"""

import ast
import tomllib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from experiments.results import Recording, Row

from benchmarks.walks import returns, walks

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "src" / "bilens"
DECISIONS = (ast.If, ast.IfExp, ast.For, ast.While, ast.ExceptHandler, ast.Assert, ast.match_case)
COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
COMPLEX = 15
OF_A_FLOW = {"token", "minus", "against", "replace", "ablate"}
AIMS = {
    "lines of the package": 33_000,
    "classes": 180,
    "public names": 140,
    "lines of tests": 22_000,
    "lines of recipes and benchmarks": 9_000,
    "longest function": 80,
    "functions of complexity above 15": 5,
    "places that spell the arguments of a flow": 1,
    "dependencies of a core install": 8,
    "a report's model: stays": 40,
    "a report's model: rooms": 12,
    "a report's model: returns": 15,
    "a classifier through bonds: stays": 30,
    "a classifier through bonds: rooms": 10,
    "a classifier through bonds: returns": 10,
    "a question through flow: stays": 20,
    "a question through flow: rooms": 8,
    "a question through flow: returns": 6,
    "a question through circuit: stays": 12,
    "a question through circuit: rooms": 6,
    "a question through circuit: returns": 4,
}


def texts(*folders: Path) -> list[str]:
    """Return the Python source of some folders, a text for each file."""
    return [path.read_text(encoding="utf-8") for f in folders for path in f.rglob("*.py")]


def assigned(tree: ast.Module) -> Iterator[tuple[str, ast.expr | None]]:
    """Yield the names that a module assigns, with their values."""
    for node in tree.body:
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            yield node.target.id, node.value
        if isinstance(node, ast.Assign):
            names = [name for target in node.targets for name in ast.walk(target)]
            for name in names:
                if isinstance(name, ast.Name):
                    yield name.id, node.value


def complexity(function: ast.FunctionDef) -> int:
    """Return the cyclomatic complexity of a function: one more than its decisions."""
    count = 1
    for node in ast.walk(function):
        if isinstance(node, ast.BoolOp):
            count += len(node.values) - 1
        elif isinstance(node, ast.comprehension):
            count += 1 + len(node.ifs)
        count += isinstance(node, DECISIONS)
    return count


def is_nested(node: ast.AST) -> bool:
    """Return whether a comprehension or a call of zip holds another one."""
    inside = [part for part in ast.walk(node) if part is not node]
    if isinstance(node, COMPREHENSIONS):
        return any(isinstance(part, COMPREHENSIONS) for part in inside)
    return is_zip(node) and any(map(is_zip, inside))


def is_zip(node: ast.AST) -> bool:
    """Return whether a node is a call of zip."""
    return isinstance(node, ast.Call) and ast.unparse(node.func) == "zip"


def counts() -> dict[str, float]:
    """Return the sizes of the package by what is counted."""
    found, names, lines, longest = Counter[str](), set[str](), 0, 0
    paths = [*PACKAGE.rglob("*.py")]
    for path in paths:
        text = path.read_text(encoding="utf-8")
        lines += len(text.splitlines())
        tree = ast.parse(text)
        for name, value in assigned(tree):
            if name == "__all__" and value is not None and path.stem != "lazy_imports":
                names |= set(ast.literal_eval(value))
            found["constants of modules"] += name.isupper() and len(name) > 1
        for node in ast.walk(tree):
            found["classes"] += isinstance(node, ast.ClassDef)
            if isinstance(node, ast.FunctionDef) and node.end_lineno is not None:
                arguments = {argument.arg for argument in node.args.args + node.args.kwonlyargs}
                found["places that spell the arguments of a flow"] += arguments >= OF_A_FLOW
                found["functions of complexity above 15"] += complexity(node) > COMPLEX
                longest = max(longest, node.end_lineno - node.lineno + 1)
            found["comprehensions"] += isinstance(node, COMPREHENSIONS)
            found["nested comprehensions and zips"] += is_nested(node)
            if isinstance(node, ast.Attribute) and path.stem != "hooks":
                is_hook = node.attr.startswith("register_") and node.attr.endswith("_hook")
                found["registrations outside hooks"] += is_hook
    comprehensions = found.pop("comprehensions")
    sizes = {"lines of the package": lines, "files of the package": len(paths)}
    sizes |= {"classes": found.pop("classes"), "public names": len(names), **found}
    sizes["longest function"] = longest
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    sizes["dependencies of a core install"] = len(project["dependencies"])
    return sizes | {"comprehensions per thousand lines": round(1000 * comprehensions / lines, 1)}


def main() -> None:
    """Print and write the sizes."""
    recording, sizes = Recording(), counts()
    folders = {
        "lines of tests": ["tests"],
        "lines of recipes and benchmarks": ["experiments", "benchmarks"],
    }
    for name, places in folders.items():
        sizes[name] = sum(len(text.splitlines()) for text in texts(*(ROOT / x for x in places)))
    for room in sorted(path.parent for path in PACKAGE.glob("*/__init__.py")):
        sizes[f"{room.name}: lines"] = sum(len(text.splitlines()) for text in texts(room))
    for name in ("CHANGELOG", "CONTRIBUTING"):
        sizes[f"{name}: words"] = len((ROOT / f"{name}.md").read_text(encoding="utf-8").split())
    for name, rooms in walks().items():
        sizes[f"{name}: stays"] = len(rooms)
        sizes |= {f"{name}: rooms": len(set(rooms)), f"{name}: returns": returns(rooms)}
    rows = []
    for name, size in sizes.items():
        aim = AIMS.get(name)
        aims = {} if aim is None else {"aim": aim}
        rows.append(Row(name, size, baselines=aims, held=None if aim is None else size <= aim))
        print(f"{name:35}{size:10,}")
    recording.write(
        "size",
        title="Size of the source",
        command="python -m benchmarks.size",
        rows=rows,
        settings={"complexity": COMPLEX},
    )


if __name__ == "__main__":
    main()
