"""The tutorials run from the first cell to the last, and notebooks show their readings."""

import base64
import re

import jupytext
import nbformat
import pytest
import yaml
from docs import hooks
from nbclient import NotebookClient
from nbconvert import HTMLExporter

from bilens.convert import save_model
from tests.brief import BRIEF
from tests.command_line import ROOT
from tests.models import random_model, toy_tokenizer

pytestmark = pytest.mark.long

TUTORIALS = sorted((ROOT / "docs" / "tutorials").glob("*.md"))
EACH = pytest.mark.parametrize("page", TUTORIALS, ids=lambda page: page.stem)
LIMIT = 180  # seconds of a cell; one that trains takes a minute on two idle cores


def notebook_of(page):
    notebook = jupytext.read(page)
    notebook.cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert notebook.cells
    return notebook


@EACH
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


def test_the_first_cell_of_a_notebook_installs_what_exists(monkeypatch):
    """bilens is in no package index; in Colab it comes from where the site was built."""
    path = TUTORIALS[0].with_suffix(".ipynb")
    monkeypatch.setenv("GITHUB_REPOSITORY", "someone/bilens")
    source = hooks.notebook_of(path).cells[1].source
    assert source.startswith("%pip install")
    assert "git+https://github.com/someone/bilens" in source
    monkeypatch.delenv("GITHUB_REPOSITORY")
    source = hooks.notebook_of(path).cells[1].source
    assert source.startswith("#")
    assert "pip install -e" in source


@EACH
def test_a_notebook_is_that_of_its_page_and_holds_its_figures(page):
    notebook = nbformat.read(page.with_suffix(".ipynb"), as_version=4)
    ran, written = hooks.code_cells(notebook)[1:], hooks.code_cells(jupytext.read(page))
    assert [x.source for x in ran] == [x.source for x in written], "python -m docs.draw_tutorials"
    outputs = [output for cell in ran for output in cell.outputs]
    figures = [x.data["image/svg+xml"] for x in outputs if x.output_type == "display_data"]
    assert len(figures) == page.read_text().count("](../pictures/tutorials/") > 0
    assert all(text.startswith("<?xml") for text in figures)
    text = nbformat.writes(notebook)
    assert "../pictures/" not in text
    assert len(text) < 200_000
    nbformat.validate(notebook)


def test_the_index_for_language_models_names_pages_that_exist():
    docs = ROOT / "docs"
    # Its last part has tags of Python.
    menu = (ROOT / "mkdocs.yml").read_text().partition("\nnav:\n")[2].partition("\nvalidation:")[0]
    text = hooks.index_text(yaml.safe_load(menu), docs, "About.")
    assert text.startswith("# bilens\n\n> About.\n\n## Pages\n\n- [What it is](index.html)\n")
    pages = [str(page.relative_to(docs).with_suffix("")) for page in docs.rglob("*.md")]
    assert sorted(re.findall(r"\]\((.+)\.html\)", text)) == sorted(pages)


@pytest.mark.slow
@EACH
def test_a_tutorial_runs_as_a_notebook(page, tmp_path, monkeypatch):
    # Kernels beside other tests do not each take all cores.
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    settings = {"kernel_name": "python3", "resources": {"metadata": {"path": str(tmp_path)}}}
    NotebookClient(notebook_of(page), timeout=LIMIT, **settings).execute()


def test_every_training_of_a_tutorial_is_made_brief():
    code = "\n".join(cell.source for page in TUTORIALS for cell in notebook_of(page).cells)
    lengths = re.findall(r"\b(?:epochs=\d+|steps=\d+|tokens=\d+_\d+),?", code)
    assert len(lengths) >= code.count("Training(")
    assert all(length.startswith(tuple(BRIEF)) for length in lengths)
    assert all(written in code for written in BRIEF)


START = """import bilens
import torch
model = bilens.load("model")
from bilens.flows import Question
from bilens.pages import spectrum_figure
from bilens.transformer import Pass
question = Question("t3 t4", "t5", ("t6",), "t3 t7")"""
SHOWN = {
    "bilens.flow(model, 't3 t4', 't5', minus='t6', against='t3 t7')": "picture",
    "bilens.flow(model, 't3 t4', 't5').top(5)": "picture",
    "bilens.circuit(model, [question])": "picture",
    "bilens.bonds([model.mlp(0)], torch.eye(16))": "table",
    "model.ov(0)[0].svd()": "table",
    "model.mlp(0).svd()": "table",
    "Pass.of(model, 't3 t4')": "table",
    "spectrum_figure(model.mlp(0).interaction(torch.ones(16)).eigh(), title='a')": "picture",
    "model.mlp(0).interaction(torch.ones(16)).eigh().plot()": "picture",
}
"""The last line of a cell, and what is seen of it."""


@pytest.fixture(scope="module")
def notebook(tmp_path_factory):
    folder = tmp_path_factory.mktemp("notebook")
    save_model(folder / "model", random_model().float(), toy_tokenizer())
    notebook = nbformat.v4.new_notebook()
    notebook.cells = [nbformat.v4.new_code_cell(code) for code in (START, *SHOWN)]
    place = {"metadata": {"path": str(folder)}}
    NotebookClient(notebook, kernel_name="python3", timeout=300, resources=place).execute()
    return notebook


def test_the_first_cell_has_no_warning(notebook):
    assert notebook.cells[0].outputs == []


def test_each_reading_is_seen_on_the_page_of_the_notebook(notebook):
    page, _ = HTMLExporter().from_notebook_node(notebook)
    cells = re.split('<div class="jp-InputArea', page)[2:]
    assert len(cells) == len(SHOWN)
    for (code, kind), cell in zip(SHOWN.items(), cells, strict=True):
        source = re.search(r'<img[^>]*src="data:image/svg\+xml;base64,([^"]+)"', cell)
        assert (source is not None) == (kind == "picture"), code
        assert ("<table" in cell) == (kind == "table"), code
        if source:
            assert base64.b64decode(source[1]).decode().count("<text") > 3


def test_a_terminal_shows_a_line(notebook):
    for code, cell in zip(SHOWN, notebook.cells[1:], strict=True):
        (output,) = cell.outputs
        assert len(output.data["text/plain"]) < 500, code
