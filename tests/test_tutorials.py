"""The tutorials run from the first cell to the last, as notebooks do."""

from pathlib import Path

import jupytext
import pytest
from nbclient import NotebookClient

TUTORIALS = sorted((Path(__file__).parents[1] / "docs" / "tutorials").glob("*.md"))
LIMIT = 180
"""Seconds that a cell may take. A tutorial takes a minute on two idle cores, nearly all of it in
the cell that trains."""


@pytest.mark.parametrize("page", TUTORIALS, ids=lambda page: page.stem)
def test_the_tutorial_runs(page, tmp_path, monkeypatch):
    # Kernels beside other tests do not each take all cores.
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    place = {"metadata": {"path": str(tmp_path)}}
    notebook = jupytext.read(page)
    NotebookClient(notebook, timeout=LIMIT, kernel_name="python3", resources=place).execute()
    assert any(cell.cell_type == "code" for cell in notebook.cells)
