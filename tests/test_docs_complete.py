"""The docs leave no room of the package out."""

import re
from pathlib import Path

import bilens

ROOT = Path(__file__).parents[1]
SOURCE = Path(bilens.__file__).parent


def test_every_room_has_its_reference():
    pages = "\n".join(page.read_text() for page in (ROOT / "docs" / "api").glob("*.md"))
    rooms = {
        ".".join(p.parent.relative_to(SOURCE.parent).parts) for p in SOURCE.rglob("__init__.py")
    }
    # Figures are public by the names of bilens.report.
    private = {"bilens.cli", "bilens.read.figures"}
    assert rooms - private <= set(re.findall(r"^::: (\S+)$", pages, re.MULTILINE))
