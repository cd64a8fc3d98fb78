"""What needs no data to be refused is refused before any are read, in one line."""

import pytest
import torch
from transformers import OPTConfig, OPTForCausalLM

from bilens.cli import main
from bilens.convert import save_model
from bilens.data import Corpus
from bilens.nn.language import LanguageConfig, LanguageModel
from tests.command_line import refusal
from tests.families import tiny
from tests.models import toy_tokenizer

SMALL = ["--d-model", "8", "--epochs", "1"]
LINES = ["--data", "texts.txt", "--length", "8", "--tokens", "64"]
OPT = OPTConfig(
    **{"vocab_size": 40, "hidden_size": 16, "ffn_dim": 32, "num_hidden_layers": 2},
    **{"num_attention_heads": 2, "max_position_embeddings": 24, "word_embed_proj_dim": 16},
)
OWN = LanguageConfig(vocab_size=40, d_model=16, n_layers=2, n_heads=2, n_ctx=24, mlp="swiglu")
TAKEN = "already. Resume that training with --resume"
NOTHING = "Nothing to resume in new: no training was begun there"
REFUSED = {
    ("train", "images", *SMALL, "--output", "run"): TAKEN,
    ("train", "images", *SMALL, "--output", "new", "--resume"): NOTHING,
    ("train", "language", "--output", "run"): TAKEN,
    ("train", "language", "--output", "new", "--resume"): NOTHING,
    ("train", "language", "--report-to", "trackio", "--output", "new"): "needs the package trackio",
    ("anneal", "llama", "--data", "texts.txt", "--output", "run"): TAKEN,
    ("anneal", "llama", "--data", "texts.txt", "--output", "new", "--resume"): NOTHING,
    ("anneal", "opt", *LINES[:4], "--output", "new"): "has 2 layers and 0 gated MLPs",
    ("anneal", "opt", "--data", "texts.txt", "--output", "new"): "expected at most 24, the posi",
    ("linearise", "llama", *LINES, "--output", "run"): TAKEN,
    ("linearise", "llama", *LINES, "--layers", "2", "--output", "new"): "expected some of 0 to 1",
    ("linearise", "opt", *LINES, "--output", "new"): "has 2 layers and 0 gated MLPs",
    ("linearise", "gpt2", *LINES, "--output", "new"): "has 2 layers and 0 gated MLPs",
    ("linearise", "opt", *LINES, "--length", "32", "--output", "new"): "--tokens=64|at most 24",
    ("linearise", "own", *LINES, "--budget", "0", "--output", "new"): "budget=0.0: a model of bile",
    ("linearise", "llama", *LINES, "--tokens", "7", "--output", "new"): "at least --length=8",
    ("tensorise", "opt", "--data", "texts.txt", "--length", "8"): "0 gated MLPs",
    ("tensorise", "llama", "--data", "texts.txt", "--output", "run"): TAKEN,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("before")
    torch.manual_seed(0)
    models = {"opt": OPTForCausalLM(OPT), "own": LanguageModel(OWN)}
    models |= {name: tiny(name, dtype=torch.float32) for name in ("llama", "gpt2")}
    for name, model in models.items():
        save_model(folder / name, model, toy_tokenizer())
    (folder / "texts.txt").write_text("t3 t4 t5\n")
    main(["train", "images", *SMALL, "--output", str(folder / "run")])
    return folder


class Rows:
    """Rows of texts that remember how many were made into tensors."""

    def __init__(self, made):
        self.made = made

    def __len__(self):
        return 1000

    def __getitem__(self, place):
        numbers = range(1000)[place]
        self.made.append(len(numbers))
        return {"input_ids": torch.randint(3, 30, (len(numbers), 8))}


def test_no_more_texts_are_made_than_are_used(folder, monkeypatch, tmp_path, capsys):
    made = []
    monkeypatch.chdir(folder)
    monkeypatch.setattr(
        "bilens.data.load_documents",
        lambda name, tokenizer, **how: Corpus("texts", tokenizer, Rows(made), Rows([])),
    )
    main(["linearise", "llama", *LINES, "--held-out", "16", "--output", str(tmp_path / "out")])
    assert sum(made) == 64 // 8


@pytest.mark.parametrize("command", REFUSED, ids=" ".join)
def test_a_refusal_without_data_reads_none(command, folder, monkeypatch, capsys):
    def read(*args, **settings):
        raise AssertionError("data were read")

    monkeypatch.chdir(folder)
    for name in ("load_corpus", "load_documents", "load_images"):
        monkeypatch.setattr(f"bilens.data.{name}", read)
    message = refusal(capsys, *command)
    assert any(part in message for part in REFUSED[command].split("|")) or pytest.fail(message)
    assert not (folder / "new").exists()
