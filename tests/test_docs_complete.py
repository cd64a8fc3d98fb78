"""The docs leave nothing out: every error message has its entry, every room its reference."""

import ast
import re
from pathlib import Path

import pytest

import bilens

ROOT = Path(__file__).parents[1]
SOURCE = Path(bilens.__file__).parent
CLASSES = ("NotBilinearError", "CheckpointError", "DataError", "BilensError")


def said(node: ast.expr) -> str:
    """A message as the page writes it: … for what is particular to the case."""
    match node:
        case ast.Constant():
            return str(node.value)
        case ast.JoinedStr():
            return "".join(said(part) for part in node.values)
        case ast.BinOp():
            return said(node.left) + said(node.right)
    return "…"


def raised() -> dict[str, set[str]]:
    """The messages of each class of errors in the sources."""
    found: dict[str, set[str]] = {name: set() for name in CLASSES}
    for path in SOURCE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call):
                name = getattr(node.exc.func, "id", "")
                if name in found:
                    found[name].add(said(node.exc.args[0]))
    return found


def listed() -> dict[str, set[str]]:
    """The messages of each class of errors on the page, code spans at the start of an item."""
    page = (ROOT / "docs" / "errors.md").read_text()
    chapters = re.split(r"^## ", page, flags=re.MULTILINE)
    names = {chapter.partition("\n")[0]: chapter for chapter in chapters}
    return {name: set(re.findall(r"^- `([^`]+)`", names[name], re.MULTILINE)) for name in CLASSES}


def fits(entry: str, message: str) -> bool:
    pattern = ".*".join(re.escape(part) for part in entry.split("…"))
    return re.fullmatch(pattern, message.replace("`", ""), re.DOTALL) is not None


@pytest.mark.parametrize("name", CLASSES)
def test_every_error_message_is_explained(name):
    entries = listed()[name]
    missing = [text for text in raised()[name] if not any(fits(entry, text) for entry in entries)]
    assert not missing, "docs/errors.md explains none of these"


@pytest.mark.parametrize("name", CLASSES)
def test_every_explained_error_exists(name):
    messages = raised()[name]
    stale = [entry for entry in listed()[name] if not any(fits(entry, m) for m in messages)]
    assert not stale, "nothing raises these of docs/errors.md"


def test_every_room_has_its_reference():
    pages = "\n".join(page.read_text() for page in (ROOT / "docs" / "api").glob("*.md"))
    rooms = {
        ".".join(p.parent.relative_to(SOURCE.parent).parts) for p in SOURCE.rglob("__init__.py")
    }
    assert rooms - {"bilens.cli"} <= set(re.findall(r"^::: (\S+)$", pages, re.MULTILINE))
