"""The docs and the README: every block of Python runs, and every command line is one."""

import re
import shlex
import shutil
from pathlib import Path
from unittest.mock import patch

import pytest
import torch

import bilens.cli
from bilens.convert import save_model
from bilens.data import Grammar
from bilens.files import write_json
from bilens.nn import ATTENTIONS, ClassifierConfig
from bilens.residual.families import FAMILIES
from bilens.train import ClassifierTraining, train_classifier
from tests.families import LIKE_LLAMA, tiny
from tests.models import digits, random_model, random_text

ROOT = Path(__file__).parents[1]
# The tutorials run as notebooks, in test_tutorials.
TUTORIALS = ROOT / "docs" / "tutorials"
DOCS = [page for page in sorted((ROOT / "docs").rglob("*.md")) if page.parent != TUTORIALS]
PAGES = [ROOT / "README.md", *DOCS]
FENCE = re.compile(r"^```(python|sh)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
BLOCKS = {
    page: [(m[1], m[2], page.read_text()[: m.start()].count("\n")) for m in names]
    for page in PAGES
    if (names := list(FENCE.finditer(page.read_text())))
}
# Commands with one of these words in them need data, a browser or minutes: they are parsed alone.
HEAVY = re.compile(
    r"mnist|tinystories|my-stories|data grammar|--figures|--order|reproduce|bilens demo|pythia|"
    r"MODEL|annealed|bilinear|runs/linear|HuggingFaceTB|SmolLM2"
)
TRAINING = ClassifierTraining(epochs=3, batch_size=100, weight_decay=0.0, input_noise=0.2)


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Small versions of the runs of the pages."""
    folder = tmp_path_factory.mktemp("docs") / "runs"
    for name, layers in (("digits", 1), ("two", 2)):
        config = ClassifierConfig(64, 10, 12, layers, image_shape=(8, 8))
        train_classifier(config, digits(), TRAINING, folder / name)
    shutil.copytree(folder / "digits", folder / "mnist")
    shutil.copytree(folder / "two", folder / "demo" / "deep")
    grammar = Grammar()
    words = len(grammar.vocabulary)
    for name, size, attention in (
        ("grammar", words, "softmax"),
        ("grammar-bilinear", words, "bilinear"),
        ("tinystories", 2100, "softmax"),
    ):
        model = random_model(vocab_size=size, attention=attention).float()
        save_model(folder / name, model, grammar.tokenizer())
        write_json(folder / name / "training.json", {"data": "grammar"})
    shutil.copytree(folder / "grammar", folder / "demo" / "grammar")
    # hidden_act linear is what an annealed model is exported with.
    changes = {"vocab_size": 60, "num_hidden_layers": 4, "hidden_act": "linear"}
    annealed = tiny("llama", dtype=torch.float32, settings={**LIKE_LLAMA, **changes})
    save_model(folder / "annealed-tiny", annealed, None)
    return folder


@pytest.fixture
def place(runs, tmp_path, monkeypatch):
    """Return a folder with those runs, a small grammar, and a hub with runs/digits."""
    shutil.copytree(runs, tmp_path / "runs")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("bilens.data.corpus.GRAMMAR_SENTENCES", 400)
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", str(tmp_path / "cache"))
    fetched = "bilens.nn.checkpoint.hf_hub_download"
    monkeypatch.setattr(fetched, lambda _, name, **hub: str(tmp_path / "runs" / "digits" / name))
    monkeypatch.setattr("bilens.nn.checkpoint.Checkpointed.push_to_hub", lambda *_: None)
    monkeypatch.setattr("bilens.explore.Explorer.launch", lambda *_, **settings: None)
    with patch.dict(FAMILIES), patch.dict(ATTENTIONS):
        yield


@pytest.mark.usefixtures("place")
@pytest.mark.parametrize("page", BLOCKS, ids=lambda page: str(page.relative_to(ROOT)))
def test_the_code_runs(page):
    state = {"__name__": page.stem, "x": digits().test_images, "ids": random_text()}
    for language, code, line in BLOCKS[page]:
        if language == "python":
            if name := re.match(r"# (\w+\.py)\n", code):
                Path(name[1]).write_text(code)
            exec(compile("\n" * (line + 1) + code, str(page), "exec"), state)
            continue
        for command in code.replace("\\\n", "").splitlines():
            follow(command)


def follow(command: str) -> None:
    """Run a bilens command, or only parse a heavy one; look a make target up."""
    words = shlex.split(command, comments=True)
    if "make" in words:
        assert f"\n{words[1]}:" in (ROOT / "Makefile").read_text()
    elif "torchrun" in words:
        bilens.cli.parse(words[words.index("bilens") + 1 :])
    elif "bilens" in words[:1]:
        bilens.cli.parse(words[1:])
        if not HEAVY.search(command):
            if "train" in words and "--output" in words and "--resume" not in words:
                # A reader trains what is there for the other pages already.
                shutil.rmtree(words[words.index("--output") + 1], ignore_errors=True)
            brief = ["--epochs", "2"] if words[1:3] == ["train", "images"] else []
            # The last of several values counts.
            bilens.cli.main([*words[1:], *brief])
