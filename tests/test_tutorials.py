"""The tutorials run from the first cell to the last."""

import base64
import re
from pathlib import Path

import jupytext
import nbformat
import pytest
import yaml
from docs import hooks
from nbclient import NotebookClient

from tests.brief import BRIEF

ROOT = Path(__file__).parents[1]
TUTORIALS = sorted((ROOT / "docs" / "tutorials").glob("*.md"))
LIMIT = 180
"""Seconds that a cell may take. A tutorial takes a minute on two idle cores, nearly all of it in
the cell that trains."""


def notebook_of(page):
    """Return the code of a page as a notebook."""
    notebook = jupytext.read(page)
    notebook.cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert notebook.cells
    return notebook


@pytest.mark.parametrize("page", TUTORIALS, ids=lambda page: page.stem)
def test_the_code_of_a_tutorial_runs(page, tmp_path, monkeypatch):
    """Here, since kernels take longer to start than these cells to run."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("bilens.data.corpus.GRAMMAR_SENTENCES", 2000)
    state = {}
    for cell in notebook_of(page).cells:
        source = cell.source
        for written, brief in BRIEF.items():
            source = source.replace(written, brief)
        exec(compile(source, str(page), "exec"), state)


@pytest.mark.parametrize("page", TUTORIALS, ids=lambda page: page.stem)
def test_a_notebook_of_the_site_holds_its_figures(page):
    notebook = hooks.notebook_of(page)
    assert notebook.cells[1].source == "%pip install --quiet bilens"
    outputs = [o for cell in notebook.cells for o in cell.get("outputs", [])]
    figures = [o.data["image/png"] for o in outputs if o.output_type == "display_data"]
    assert len(figures) == page.read_text().count("](../pictures/tutorials/") > 0
    assert all(base64.b64decode(text).startswith(b"\x89PNG") for text in figures)
    text = jupytext.writes(notebook, fmt="ipynb")
    assert "../pictures/" not in text
    assert len(text) < 200_000
    nbformat.validate(nbformat.reads(text, as_version=4))


def test_the_index_for_language_models_names_pages_that_exist():
    docs = ROOT / "docs"
    # Its last part has tags of Python.
    menu = (ROOT / "mkdocs.yml").read_text().partition("\nnav:\n")[2].partition("\nvalidation:")[0]
    text = hooks.index_text(yaml.safe_load(menu), docs, "About.")
    assert text.startswith("# bilens\n\n> About.\n\n## Pages\n\n- [What it is](index.html)\n")
    named = re.findall(r"\]\((.+)\.html\)", text)
    assert sorted(named) == sorted(
        str(page.relative_to(docs).with_suffix("")) for page in docs.rglob("*.md")
    )


@pytest.mark.slow
@pytest.mark.parametrize("page", TUTORIALS, ids=lambda page: page.stem)
def test_a_tutorial_runs_as_a_notebook(page, tmp_path, monkeypatch):
    # Kernels beside other tests do not each take all cores.
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    place = {"metadata": {"path": str(tmp_path)}}
    NotebookClient(
        notebook_of(page), timeout=LIMIT, kernel_name="python3", resources=place
    ).execute()


def test_every_training_of_a_tutorial_is_made_brief():
    code = "\n".join(cell.source for page in TUTORIALS for cell in notebook_of(page).cells)
    lengths = re.findall(r"\b(?:epochs=\d+|steps=\d+|tokens=\d+_\d+),?", code)
    assert len(lengths) >= code.count("Training(")
    assert all(length.startswith(tuple(BRIEF)) for length in lengths)
    assert all(written in code for written in BRIEF)
