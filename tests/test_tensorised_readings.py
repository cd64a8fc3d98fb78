"""Everything that reads language models reads a transformer that was made a tensor."""

import pytest

from bilens.cli import main
from bilens.explore.model_pages import ModelPages
from bilens.models import load
from bilens.tensor import bonds
from tests.command_line import in_json, refusal
from tests.models import random_model, small_corpus
from tests.nightly import nightly

PROMPT, TOKEN = "once lily ate", "soup"
BRIEF = ["--tokens", "64", "--length", "8", "--calibration-tokens", "64", "--layer-steps", "1"]
BRIEF += ["--pattern-steps", "1", "--batch-size", "2", "--sample-batch", "8", "--device", "cpu"]


@pytest.fixture(scope="module")
def tensor(tmp_path_factory):
    folder, corpus = tmp_path_factory.mktemp("tensor"), small_corpus()
    sizes = {"n_layers": 2, "mlp": "swiglu", "norm": "rms", "attention": "softmax"}
    model = random_model(vocab_size=len(corpus.tokenizer), positions="rotary", **sizes).float()
    model.save_pretrained(folder / "original")
    corpus.tokenizer.save_pretrained(folder / "original")
    main(["tensorise", str(folder / "original"), *BRIEF, "--output", str(folder / "tensor")])
    return folder / "tensor"


COMMANDS = {
    "ngrams": ["--token", TOKEN, "--layer", "1"],
    "heads": ["--layer", "1", "--heads", "1", "--k", "3"],
    "contexts": ["--token", TOKEN, "--layer", "1", "--data", "grammar"],
    "composition": [],
    "generate": ["--prompt", PROMPT, "--tokens", "3"],
    "flow": ["--prompt", PROMPT, "--token", TOKEN],
    "report": ["--data", "grammar", "--layer", "1", "--token", TOKEN],
}


@pytest.mark.parametrize("name", nightly(COMMANDS, COMMANDS.keys() - {"contexts", "report"}))
def test_commands_read_it(tensor, name, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("bilens.data.corpus.GRAMMAR_SENTENCES", 400)
    assert in_json(capsys, name, tensor, *COMMANDS[name])


def test_texts_to_read_it_on_have_to_be_named(tensor, capsys):
    assert "name texts with --data" in refusal(capsys, "report", tensor)


def test_the_explorer_reads_it(tensor):
    site = ModelPages(load(str(tensor)), small_corpus(), (), {})
    asked = {"token": TOKEN, "minus": "tom", "layer": "1"}
    reading = site._read("contexts", asked.items())
    assert len(reading.all_eigenvectors.values) == 17, "the stream and the constant"


def test_its_layers_have_bonds(tensor):
    model = load(str(tensor))
    result = bonds([model.mlp(0), model.mlp(1)], model.direction(TOKEN))
    assert result.certificate([bond.k for bond in result.bonds]) < 1e-6 < result.certificate([1, 1])
