"""Sizes of the source: lines, files, public names, constants, comprehensions and hooks.

`python -m benchmarks.size` prints them. Names are those of all `__all__` lists; hooks are
registrations outside `bilens.hooks`.
"""

import ast
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "src" / "bilens"
COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)


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


def is_nested(node: ast.AST) -> bool:
    """Return whether a comprehension or a call of zip holds another one."""
    inside = [part for part in ast.walk(node) if part is not node]
    if isinstance(node, COMPREHENSIONS):
        return any(isinstance(part, COMPREHENSIONS) for part in inside)
    return is_zip(node) and any(map(is_zip, inside))


def is_zip(node: ast.AST) -> bool:
    """Return whether a node is a call of zip."""
    return isinstance(node, ast.Call) and ast.unparse(node.func) == "zip"


def counts() -> Counter[str]:
    """Count names, constants, comprehensions and hooks of the package."""
    total = Counter[str]()
    for path in PACKAGE.rglob("*.py"):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        for name, value in assigned(tree):
            if name == "__all__" and value is not None:
                total["names"] += len(ast.literal_eval(value))
            total["constants"] += name.isupper() and len(name) > 1
        for node in ast.walk(tree):
            total["comprehensions"] += isinstance(node, COMPREHENSIONS)
            total["nested"] += is_nested(node)
            if isinstance(node, ast.Attribute) and path.stem != "hooks":
                total["hooks"] += node.attr.startswith("register_") and node.attr.endswith("_hook")
    return total


def main() -> None:
    """Print the sizes."""
    package, found = texts(PACKAGE), counts()
    lines = sum(len(text.splitlines()) for text in package)
    others = texts(*(ROOT / name for name in ("tests", "experiments", "benchmarks")))
    print(f"lines; files of the package            {lines:,}; {len(package)}")
    print(f"lines of tests, recipes, benchmarks    {sum(len(t.splitlines()) for t in others):,}")
    print(f"names in all __all__ lists             {found['names']}")
    print(f"constants of modules                   {found['constants']}")
    print(f"comprehensions per 1,000 lines         {1000 * found['comprehensions'] / lines:.1f}")
    print(f"nested comprehensions and zips         {found['nested']}")
    print(f"registrations outside hooks            {found['hooks']}")


if __name__ == "__main__":
    main()
