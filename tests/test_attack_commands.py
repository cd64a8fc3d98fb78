"""Bad commands and bad files end with one message and status 1 or 2, never with a traceback.

The suite tries each option with a few bad values, and `pytest -m slow` with all of them.
"""

import itertools
import json
import os
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers.pre_tokenizers import WhitespaceSplit

from bilens.cli import main
from bilens.convert import give_swish, save_model
from tests.families import tiny
from tests.language import toy_tokenizer

BAD = [
    *("-1", "0", "x", "", "1e400", "9" * 20, "9" * 400, "9" * 5000, "nan", "inf", "-inf", "1.5"),
    *("512", "\udcff", "💥", "a\0b", "t3,,t4", "../..", "/dev/null", "x" * 5000, "[1]", "\x1b[2J"),
]
"""Values of options that expect a number, a text, tokens or a path."""
DEVICES = ["meta", "cuda:99", "abacus", "", "mps", "cpu:-1", "\udcff", "9" * 30]
DATA = {"--data": "texts.txt"}
BRIEF = {**DATA, "--length": "8", "--tokens": "64"}
COMMANDS: dict[tuple[str, ...], dict[str, str]] = {
    ("ngrams", "model"): {"--token": "t3", "--minus": "", "--layer": "0", "--k": "2"},
    ("heads", "model"): dict.fromkeys(("--layer", "--head", "--distance", "--k"), "1"),
    ("contexts", "bilinear"): {**DATA, "--token": "t3", "--layer": "0", "--k": "1"},
    ("flow", "model"): {"--prompt": "t3 t4", "--token": "t5", "--minus": "", "--k": "3"},
    ("flow", "model", "--prompt", "t3", "--token", "t5"): {
        **{"--threshold": "0.1", "--shown": "5", "--ablate": "1"}
    },
    ("generate", "model"): {"--prompt": "t3", "--temperature": "1", "--seed": "0"},
    ("spectra", "bilinear"): {"--tokens": "t3", "--layer": "0", "--top": "2", "--batch": "3"},
    ("spectra", "bilinear", "--tokens", "t3"): {"--tolerance": "1e-3"},
    ("report", "bilinear"): {**DATA, "--token": "t3", "--layer": "0", "--among": "5"},
    ("decompose", "deep"): {"--paths": "3", "--basis": "model"},
    ("decompose", "deep", "--bonds", "--metric", "weights"): {"--drop": "0.1"},
    ("linearise", "model"): {**BRIEF, "--held-out": "16", "--budget": "0.1", "--layers": "1"},
    ("anneal", "model"): {**BRIEF, "--batch-size": "4", "--learning-rate": "1e-4"},
    ("process", "model"): {"--steps": "fold_norms"},
    ("export", "annealed"): {},
    ("train", "images"): {"--d-model": "8", "--n-layers": "1", "--epochs": "1", "--data": "digits"},
}
"""Commands, and options with values that are good."""
OUTPUTS = {"flow": "f.html", "report": "r.html"}
FEW = 4

ACCEPTED = {
    ("--minus", ""): "subtracts nothing",
    ("--minus", "t3,,t4"): "the comma too many is skipped",
    ("--layer", "0"): "is the first layer",
    ("--head", "0"): "is the first head",
    ("--distance", "0"): "is a token that attends to itself",
    ("--distance", "512"): "lies within the range of rotary positions",
    ("--k", "512"): "is more than there are: all are shown",
    ("--threshold", "0"): "splits everything",
    ("--shown", "512"): "is more than there are: all are shown",
    ("--shown", "9" * 20): "is more than there are: all are shown",
    ("--ablate", "0"): "removes nothing",
    ("--ablate", "512"): "is more than there are: all are removed",
    ("--ablate", "9" * 20): "is more than there are: all are removed",
    ("--temperature", "0"): "takes the most likely token",
    ("--temperature", "1.5"): "is a temperature",
    ("--temperature", "512"): "is a temperature",
    ("--seed", "0"): "is a seed",
    ("--seed", "512"): "is a seed",
    ("--tokens", "0"): "is token number 0 for spectra",
    ("--batch", "512"): "is one file for all tokens",
    ("--among", "512"): "is more than there are: all are read",
    ("--paths", "512"): "is more than there are: all are searched",
    ("--paths", "9" * 20): "is more than there are: all are searched",
    ("--drop", "0"): "keeps the accuracy",
    ("--drop", "1.5"): "lets accuracy fall by 1.5 points",
    ("--budget", "0"): "makes no layer linear",
    ("--budget", "1.5"): "is a budget",
    ("--budget", "512"): "makes all layers linear",
    ("--tokens", "512"): "is more than there are: all are used",
    ("--tokens", "9" * 20): "is more than there are: all are used",
    ("--tokens", "9" * 400): "is more than there are: all are used",
    ("--held-out", "9" * 400): "is more than there are",
    ("--layers", "0"): "makes no layer linear",
    ("--held-out", "512"): "is more than there are",
    ("--held-out", "9" * 20): "is more than there are",
    ("--batch-size", "512"): "is one batch",
    ("--learning-rate", "1.5"): "is a learning rate, and a bad one",
    ("--learning-rate", "512"): "is a learning rate, and a bad one",
    ("--n-layers", "512"): "is a depth",
    ("--learning-rate", "0"): "trains nothing but beta",
    ("--d-model", "512"): "is a width",
    ("--data", "/dev/null"): "is never read: the name of the data only",
}
"""Values that are no mistake, and why."""


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    """Return a folder with a model of each kind and a text."""
    folder = tmp_path_factory.mktemp("attacked")
    tokenizer = toy_tokenizer()
    tokenizer.backend_tokenizer.pre_tokenizer = WhitespaceSplit()
    save_model(folder / "model", tiny("llama", dtype=torch.float32), tokenizer)
    annealed = tiny("llama", dtype=torch.float32)
    give_swish(annealed).beta = 0
    save_model(folder / "annealed", annealed, tokenizer)
    lines = (" ".join(f"t{3 + (i * 7 + j) % 20}" for j in range(9)) for i in range(60))
    (folder / "texts.txt").write_text("\n".join(lines))
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        main(["export", "annealed", "--output", "bilinear"])
        training = ["train", "images", "--d-model", "8", "--epochs", "1", "--n-layers", "2"]
        main([*training, "--output", "deep"])
        main(["decompose", "deep", "--bonds", "--metric", "weights"])
    return folder


@pytest.fixture
def here(sources, tmp_path, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("BILENS_DATA", raising=False)
    (tmp_path / "here").mkdir()
    for path in sources.iterdir():
        (tmp_path / "here" / path.name).symlink_to(path)
    monkeypatch.chdir(tmp_path / "here")
    return tmp_path / "here"


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
    assert code in (1, 2), code
    assert "Traceback" not in message
    assert "\x1b" not in message
    assert code == 2 or message.startswith("error: "), message
    return message


def commands_with(option: str, value: str, command: tuple[str, ...]) -> list[str]:
    options = COMMANDS[command] | {option: value}
    given = itertools.chain.from_iterable(
        (key, v) for key, v in options.items() if v or key == option
    )
    outputs = {"export", "generate", "ngrams", "heads", "contexts", "decompose"}
    output = [] if command[0] in outputs else ["--output", OUTPUTS.get(command[0], "out")]
    return [*command, *given, *output]


OPTIONS = [(command, option) for command, options in COMMANDS.items() for option in options]


def check_values(command: tuple[str, ...], option: str, values: list[str], capsys) -> None:
    for value in values:
        if command[0] == "train" and option == "--epochs" and value.isdigit():
            continue  # as many epochs as that are a long training, and no mistake
        shutil.rmtree("out", ignore_errors=True)
        if not outcome(commands_with(option, value, command), capsys):
            assert (option, value) in ACCEPTED, (command, option, value)


@pytest.mark.parametrize(("command", "option"), OPTIONS)
def test_bad_values(command, option, here, capsys):
    start = 7 * OPTIONS.index((command, option))  # another few for each option
    values = [BAD[(start + 5 * number) % len(BAD)] for number in range(FEW)]
    check_values(command, option, values, capsys)


@pytest.mark.slow
@pytest.mark.parametrize(("command", "option"), OPTIONS)
def test_all_bad_values(command, option, here, capsys):
    check_values(command, option, BAD, capsys)


@pytest.mark.parametrize("command", [c for c in COMMANDS if c[0] != "export"])
def test_devices_that_are_not_there(command, here, capsys):
    for device in DEVICES:
        assert outcome(commands_with("--device", device, command), capsys), device


def damaged(folder: Path, name: str, content: bytes) -> Path:
    """Return a copy of a model's folder, with other content in one of its files."""
    target = Path("damaged")
    shutil.rmtree(target, ignore_errors=True)
    shutil.copytree(folder, target, ignore=shutil.ignore_patterns("checkpoints", ".lock"))
    (target / name).write_bytes(content)
    return target


READ = {
    "model": ["ngrams", "damaged", "--token", "t3"],
    "deep": ["decompose", "damaged", "--paths", "5"],
}
CONTENTS = {
    "nothing": b"",
    "a brace": b"{",
    "a list": b"[]",
    "a number": b"3",
    "text": b'"text"',
    "deep nesting": b"[" * 100_000,
    "bytes": bytes(range(256)),
    "another object": b'{"a": {"b": [1, 2, {"c": null}]}}',
    "zeros": bytes(1000),
    "a header of 2^63 bytes": b"\xff" * 7 + b"\x7f" + bytes(100),
}


@pytest.mark.parametrize("source", READ)
@pytest.mark.parametrize("content", CONTENTS)
def test_damaged_files(source, content, here, capsys):
    names = [
        path.name for path in (here / source).iterdir() if path.suffix in (".json", ".safetensors")
    ]
    essential = {"config.json", "model.safetensors", "training.json", "tokenizer.json"}
    for name in names:
        damaged(here / source, name, CONTENTS[content])
        message = outcome(READ[source], capsys)
        assert message or name not in essential, (name, content)


@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors")
@pytest.mark.parametrize("source", READ)
def test_settings_of_other_types(source, here, capsys):
    settings = json.loads((here / source / "config.json").read_text())
    for name, value in itertools.product(settings, (None, -1, 0, 2**70, "x", [], {}, True, 1e300)):
        changed = json.dumps({**settings, name: value}).encode()
        damaged(here / source, "config.json", changed)
        outcome(READ[source], capsys)


@pytest.mark.parametrize(
    ("folder", "names"),
    [
        ("deep", ["layers.0.left.weight"]),
        ("deep/cut", ["layers.0.out.weight"]),
        pytest.param("deep", None, marks=pytest.mark.slow),
        pytest.param("deep/cut", None, marks=pytest.mark.slow),
    ],
)
def test_flipped_bits(folder, names, here, capsys):
    """The highest bit of an exponent makes a weight of about 1e38."""
    weights = load_file(here / folder / "model.safetensors")
    for name, bit in itertools.product(names or weights, (30,) if names else (30, 29, 28)):
        changed = {key: weight.clone() for key, weight in weights.items()}
        changed[name].view(torch.int32).flatten()[0] ^= 1 << bit
        target = damaged(here / folder, "model.safetensors", b"")
        save_file(changed, target / "model.safetensors")
        if not (target / "training.json").exists():
            shutil.copy(here / "deep" / "training.json", target)
        for options in (["--paths", "5"], ["--bonds", "--metric", "weights"]):
            outcome(["decompose", "damaged", *options], capsys)


def test_models_that_are_not_models(here, capsys):
    os.mkfifo("pipe")
    (here / "link").symlink_to("nowhere")
    (here / "file").write_text("text")
    (here / "a.gguf").mkdir()
    (here / "a.bin").write_bytes(b"")
    sources = ["pipe", "link", "file", "a.gguf", "a.bin", "/dev/null", ".", "..", "", "x" * 5000]
    sources += ["\udcff", "a\0b", "some/model", "https://example.org/model", "texts.txt", "--"]
    commands = (["ngrams", "--token", "t3"], ["process"], ["report"], ["decompose"], ["export"])
    for source, command in itertools.product(sources, commands):
        if (source, command) != (".", ["export"]):
            assert outcome([command[0], source, *command[1:]], capsys), (source, command)


def test_a_tokenizer_without_an_unknown_token(here, capsys):
    """It opens in transformers, and fails at the first word that it does not know."""
    folder = damaged(here / "model", "void", b"")
    path = folder / "tokenizer.json"
    content = json.loads(path.read_text())
    content["model"]["unk_token"] = "[UNK]"
    path.write_text(json.dumps(content))
    for command in (
        ["flow", "damaged", "--prompt", "what is this", "--token", "t3"],
        ["generate", "damaged", "--prompt", "what is this"],
        ["anneal", "damaged", "--data", "texts.txt", "--output", "out"],
    ):
        assert "Missing [UNK] token from the vocabulary" in outcome(command, capsys)
