"""Readings in a notebook, and in the page that nbconvert makes of it."""

import base64
import re

import nbformat
import pytest
from nbclient import NotebookClient
from nbconvert import HTMLExporter

from bilens.convert import save_model
from tests.models import random_model, toy_tokenizer

START = """import bilens
import torch
model = bilens.load("model")
from bilens.read.flow import Question
from bilens.pages import spectrum_figure
from bilens.residual import Pass
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
    tokenizer = toy_tokenizer()
    save_model(folder / "model", random_model(vocab_size=len(tokenizer)).float(), tokenizer)
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


def test_pictures_are_interactive_in_the_notebook_itself(notebook):
    for (code, kind), cell in zip(SHOWN.items(), notebook.cells[1:], strict=True):
        (output,) = cell.outputs
        assert ("application/vnd.plotly.v1+json" in output.data) == (kind == "picture"), code
        assert len(output.data["text/plain"]) < 400, code
