"""The tutorials run from the first cell to the last, as notebooks do."""

import time
from pathlib import Path

import jupytext
import pytest
from nbclient import NotebookClient

TUTORIALS = sorted((Path(__file__).parents[1] / "docs" / "tutorials").glob("*.md"))
LIMIT = 180
"""Seconds that a tutorial may take on two cores; none is near it."""


@pytest.mark.parametrize("page", TUTORIALS, ids=lambda page: page.stem)
def test_the_tutorial_runs(page, tmp_path):
    place = {"metadata": {"path": str(tmp_path)}}
    notebook = jupytext.read(page)
    start = time.monotonic()
    NotebookClient(notebook, timeout=LIMIT, kernel_name="python3", resources=place).execute()
    assert time.monotonic() - start < LIMIT
    assert any(cell.cell_type == "code" for cell in notebook.cells)
