"""Compare the public names of two versions, and find each old one in the table of the CHANGELOG.

`python -m tools.renames adb73e0` compares 0.2.0 with the working tree: all modules, and names and
members of classes in the modules that have a page. It prints those that are neither there still
nor in the table's first column.
"""

import argparse
import ast
import io
import re
import subprocess
import tarfile
from pathlib import Path
from tempfile import TemporaryDirectory

ROOT = Path(__file__).parent.parent


def public_names(root: Path) -> set[str]:
    """Return the dotted names of a version in the folder `root`."""
    source = root / "src"
    files = {
        ".".join(path.relative_to(source).with_suffix("").parts).removesuffix(".__init__"): path
        for path in source.rglob("*.py")
    }
    trees = {name: ast.parse(path.read_text(encoding="utf-8")) for name, path in files.items()}
    # A module without a page is private, and so are its names; its place is listed all the same.
    pages = "".join(path.read_text(encoding="utf-8") for path in (root / "docs/api").glob("*.md"))
    names = {name for name in trees if "._" not in name}
    for module in set(names) & set(re.findall(r"^::: ([\w.]+)", pages, re.MULTILINE)):
        for name in _exported(trees[module]):
            names.add(f"{module}.{name}")
            names |= {f"{module}.{name}.{member}" for member in _members(trees, module, name)}
    return names


def _exported(tree: ast.Module) -> list[str]:
    for node in tree.body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            return list(ast.literal_eval(node.value))
    defined = [node for node in tree.body if isinstance(node, ast.FunctionDef | ast.ClassDef)]
    return [node.name for node in defined if not node.name.startswith("_")]


def _members(trees: dict[str, ast.Module], module: str, name: str) -> set[str]:
    """Return the public methods and fields of a class, those of its bases in bilens included."""
    place = _class(trees, module, name)
    if place is None:
        return set()
    module, node = place
    members = {
        part.name if isinstance(part, ast.FunctionDef) else ast.unparse(part.target)
        for part in node.body
        if isinstance(part, ast.FunctionDef | ast.AnnAssign)
    }
    for base in node.bases:
        members |= _members(trees, module, ast.unparse(base).partition("[")[0])
    return {member for member in members if not member.startswith("_")}


def _class(trees: dict[str, ast.Module], module: str, name: str) -> tuple[str, ast.ClassDef] | None:
    for node in ast.walk(trees[module]) if module in trees else ():
        if isinstance(node, ast.ClassDef) and node.name == name:
            return module, node
        if isinstance(node, ast.ImportFrom) and node.module in trees:
            for alias in node.names:
                # A room that is imported from its own package is no class.
                if (alias.asname or alias.name) == name and node.module != module:
                    return _class(trees, node.module, alias.name)
    return None


def named_in(changelog: str, version: str) -> set[str]:
    """Return the words of the first column of a version's table."""
    section = changelog.partition(f"\n## {version}\n")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| (.+?) \| ", section, re.MULTILINE)
    return {word for row in rows for word in re.findall(r"\w+", row)}


def main() -> None:
    """Print the names of the old version that are gone without a row."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("commit", help="the old version")
    commit = parser.parse_args().commit
    archive = subprocess.run(
        ["git", "archive", commit, "src", "docs/api"], cwd=ROOT, capture_output=True, check=True
    ).stdout
    with TemporaryDirectory() as folder, tarfile.open(fileobj=io.BytesIO(archive)) as files:
        files.extractall(folder, filter="data")
        old = public_names(Path(folder))
    new = public_names(ROOT)
    rows = named_in((ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), "0.3.0")
    gone = {name for name in old - new if not _is_below(name, old - new)}
    missing = sorted(name for name in gone if name.rpartition(".")[2] not in rows)
    print(f"{len(old)} public names of {commit}, {len(gone)} of them gone or renamed")
    print(f"{len(missing)} of these without a row in CHANGELOG.md")
    print(*missing, sep="\n")


def _is_below(name: str, gone: set[str]) -> bool:
    """Return True for a name inside a module or class that is gone itself."""
    parts = name.split(".")
    return any(".".join(parts[:k]) in gone for k in range(1, len(parts)))


if __name__ == "__main__":
    main()
