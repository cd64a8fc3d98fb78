"""Bad commands and bad files end with one message and status 1 or 2, never with a traceback."""

import itertools
import json
import os
import re
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from bilens.cli import COMMANDS as ALL_COMMANDS
from bilens.cli import commands_of, main
from tests.command_line import of_command, work_beside, write_sources
from tests.nightly import nightly

DEVICES = ["meta", "cuda:99", "abacus", "", "mps", "cpu:-1", "\udcff", "9" * 30]
NAMES = ["", "t3,,t4", "\udcff", "a\0b", "💥", "x" * 5000]
COMMANDS = {
    "ngrams model --token t3": {
        "--layer": ["-1", "512", "1.5", "nan", "9" * 400],
        "--token": NAMES,
        "--k": ["0", "1e400", "x"],
        "--device": DEVICES,
    },
    "heads model": {"--distance": ["-1", "9" * 20], "--head": ["512", "[1]"]},
    "flow model --prompt t3 --token t5 --output f.html": {
        "--ablate": ["nan", "-inf", "x"],
        "--minus": ["\x1b[2J"],
        "--prompt": [""],
    },
    "generate model --prompt t3": {"--temperature": ["-1", "inf"], "--seed": ["1.5", "9" * 20]},
    "contexts bilinear --data texts.txt --token t3 --layer 0": {"--data": ["../..", "/dev/null"]},
    "bonds deep --metric weights": {"--drop": ["-1", "nan"]},
    "anneal model --data texts.txt --length 8 --tokens 64 --output out": {
        "--batch-size": ["0"],
        "--data-dir": ["."],
        "--learning-rate": ["nan", "-1"],
        "--device": DEVICES,
    },
    "train images --data digits --output out": {
        "--n-layers": ["-1"],
        "--d-model": ["9" * 20],
        "--data-dir": ["."],
        "--epochs": ["0"],
        "--learning-rate": ["nan"],
        "--beta": ["0.5"],
    },
    **{
        f"{reading} --output out.json": {"--data": ["pictures", "nowhere"]}
        for reading in ("eigenvectors images", "explain images", "paths deep", "bonds deep")
    },
    "tensorise model --output out --length 8": {
        "--data-dir": ["."],
        "--data-share": ["0.3"],
        "--attention": ["softmax --pattern-steps 3"],
        "--mlp": ["gated --layer-steps 3"],
    },
    "process model --output out": {"--steps": ["x", "💥"], "--device": DEVICES},
}
"""Commands, and bad values of their options."""


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    folder = write_sources(tmp_path_factory.mktemp("attacked"))
    deep = str(folder / "deep")
    main(["bonds", deep, "--metric", "weights", "--arrays", deep])
    return folder


@pytest.fixture
def here(sources, tmp_path, monkeypatch):
    return work_beside(sources, tmp_path, monkeypatch)


def outcome(command: list[str], capsys) -> str:
    """Return the message of an error, or nothing; a raw exception leaves the test."""
    capsys.readouterr()
    try:
        main(command)
    except SystemExit as ended:
        code = ended.code
    else:
        return ""
    message = capsys.readouterr().err
    assert code == 2 or (code == 1 and message.startswith("error: ")), message
    assert not [part for part in ("tyro", "\x1b") if part in message]
    return of_command(command, message)


@pytest.mark.parametrize("command", COMMANDS)
def test_bad_values(command, here, capsys):
    for option, values in COMMANDS[command].items():
        for value in values:
            # A pair of options is written as one value of the first.
            words = re.split(r" (?=--[a-z])", f"{option} {value}")
            pairs = [word for pair in words for word in pair.split(" ", 1)]
            assert outcome([*command.split(), *pairs], capsys), (option, value)


def damaged(folder: Path, name: str, content: bytes) -> Path:
    """Return a copy of a model's folder, with other content in one of its files."""
    target = Path("damaged")
    shutil.rmtree(target, ignore_errors=True)
    shutil.copytree(folder, target, ignore=shutil.ignore_patterns("checkpoints", ".lock"))
    (target / name).write_bytes(content)
    return target


def test_values_of_a_list_are_never_replaced(capsys):
    """A second `--data` would leave the first unread, without a word."""
    tried = set()
    for name in ALL_COMMANDS:
        for kind, command in commands_of(name).items():
            for option in command.lists:
                flag = f"--{option.replace('_', '-')}"
                words = [name, *[kind] * (name == "train"), "model", flag, "a", f"{flag}=b"]
                assert f"{flag} stands twice, expected all of its values" in outcome(words, capsys)
                tried.add(f"{name} {flag}")
    assert {"linearise --data", "linearise --layers", "process --steps", "report --add"} <= tried
    assert not {"flow --figure", "bonds --arrays"} & tried


@pytest.mark.parametrize("command", ["eigenvectors", "ngrams --token t3", "report", "process"])
@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_a_file_of_a_model_is_no_folder(command, name, here, capsys):
    first, *words = command.split()
    message = outcome([first, f"model/{name}", *words], capsys)
    assert f"model/{name} is a file, expected the folder of a model, such as model" in message


READ = {"model": ["ngrams", "damaged", "--token", "t3"], "deep": ["paths", "damaged", "--k", "5"]}
CONTENTS = {
    "nothing": b"",
    "a brace": b"{",
    "a list": b"[]",
    "a number": b"3",
    "text": b'"text"',
    "deep nesting": b"[" * 100_000,
    "bytes": bytes(range(256)),
    "zeros": bytes(1000),
    "another object": b'{"a": {"b": [1, 2, {"c": null}]}}',
    "a header of 2^63 bytes": b"\xff" * 7 + b"\x7f" + bytes(100),
}


@pytest.mark.parametrize("source", READ)
@pytest.mark.parametrize("content", CONTENTS)
def test_damaged_files(source, content, here, capsys):
    essential = {"config.json", "model.safetensors", "training.json", "tokenizer.json"}
    for path in (here / source).iterdir():
        if path.suffix in (".json", ".safetensors"):
            damaged(here / source, path.name, CONTENTS[content])
            message = outcome(READ[source], capsys)
            assert message or path.name not in essential, path.name


SHARES = 10  # of settings with values; the one by day has nine of ten settings and each value


@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors")
@pytest.mark.parametrize("share", nightly(range(SHARES), [0]))
@pytest.mark.parametrize("source", READ)
def test_settings_of_other_types(source, share, here, capsys):
    settings = json.loads((here / source / "config.json").read_text())
    values = (None, -1, 0, 2**70, "x", [], {}, True, 1e300)
    for number, (name, value) in enumerate(itertools.product(settings, values)):
        if number % SHARES == share:
            damaged(here / source, "config.json", json.dumps({**settings, name: value}).encode())
            outcome(READ[source], capsys)


@pytest.mark.parametrize(
    ("folder", "name"), [("deep", "layers.0.left.weight"), ("deep/cut", "layers.0.out.weight")]
)
def test_flipped_bits(folder, name, here, capsys):
    """The highest bit of an exponent makes a weight of about 1e38."""
    weights = load_file(here / folder / "model.safetensors")
    weights[name].view(torch.int32).flatten()[0] ^= 1 << 30
    target = damaged(here / folder, "model.safetensors", b"")
    save_file(weights, target / "model.safetensors")
    if not (target / "training.json").exists():
        shutil.copy(here / "deep" / "training.json", target)
    for command, *options in (["paths", "--k", "5"], ["bonds", "--metric", "weights"]):
        outcome([command, "damaged", *options], capsys)


def test_models_that_are_not_models(here, capsys):
    os.mkfifo("pipe")
    (here / "link").symlink_to("nowhere")
    (here / "file").write_text("text")
    (here / "a.gguf").mkdir()
    (here / "a.bin").write_bytes(b"")
    sources = ["pipe", "link", "file", "a.gguf", "a.bin", "/dev/null", ".", "..", "", "x" * 5000]
    sources += ["\udcff", "a\0b", "some/model", "https://example.org/model", "texts.txt", "--"]
    commands = (["ngrams", "--token", "t3"], ["process"], ["report"], ["eigenvectors"], ["export"])
    for source, command in itertools.product(sources, commands):
        if (source, command) != (".", ["export"]):
            assert outcome([command[0], source, *command[1:]], capsys), (source, command)


def test_a_tokenizer_without_an_unknown_token(here, capsys):
    """It opens in transformers, and fails at the first word that it does not know."""
    content = json.loads((here / "model" / "tokenizer.json").read_text())
    content["model"]["unk_token"] = "[UNK]"
    damaged(here / "model", "tokenizer.json", json.dumps(content).encode())
    flow, generate = "flow damaged --token t3 --prompt a", "generate damaged --prompt a"
    for command in (flow, generate, "anneal damaged --data texts.txt --output out"):
        assert "Missing [UNK] token from the vocabulary" in outcome(command.split(), capsys)
