"""Commands as scripts run them."""

import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from bilens.cli import COMMANDS, commands_of, main
from bilens.convert import give_swish, save_model
from tests.families import tiny
from tests.models import toy_tokenizer

ROOT = Path(__file__).parents[1]
OWN_PATHS = {"PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}", "OMP_NUM_THREADS": "1"}


def others(text: str) -> dict[str, str | None]:
    """Return another value of each option; None for a flag."""
    pairs = (word.partition("=") for word in shlex.split(text))
    return {name: value if equals else None for name, equals, value in pairs}


def output_of(capsys: Any, *args: object) -> str:
    """Return what a command prints."""
    capsys.readouterr()
    main([*map(str, args)])
    return capsys.readouterr().out


def in_json(capsys: Any, *args: object) -> Any:
    """Return the single object that a command prints with --json."""
    shown = output_of(capsys, *args, "--json")
    assert shown.count("\n") == 1
    return json.loads(shown)


def python(*words: object, check: bool = True, **how: Any) -> Any:
    """Run Python in a process of its own; return how it ended, with what it wrote."""
    command = [sys.executable, *map(str, words)]
    return subprocess.run(command, capture_output=True, text=True, check=check, **how)


def run_python(*command: object) -> None:
    """Run Python with a script or a module of the tests."""
    done = python(*command, check=False, env={**os.environ, **OWN_PATHS}, timeout=3600)
    assert done.returncode == 0, done.stderr[-3000:]


def refusal(capsys: Any, *args: Any) -> str:
    """Return the message, in one line, with which a command is refused."""
    capsys.readouterr()
    with pytest.raises(SystemExit) as ended:
        main([*map(str, args)])
    assert ended.value.code in (1, 2)
    return of_command(args, " ".join(capsys.readouterr().err.split()))


def of_command(args: Sequence[Any], message: str) -> str:
    """Return the message of a command, unless it is a traceback or has arguments as in Python."""
    assert "Traceback" not in message
    pattern = r"(?<![\w./-])([a-z]\w*)=[\w'\"([]|(?<![\w./-])([a-z]+_\w+)\b(?![./(=])"
    named = {name for pair in re.findall(pattern, message) for name in pair}
    if str(args[0]) in COMMANDS:
        for command in commands_of(*map(str, args)).values():
            assert not named & {*command.options}, message
    return message


def write_pictures(folder: Path) -> None:
    """Write a folder of class folders with small pictures, of another size than those of digits."""
    for number in range(20):
        place = folder / "ab"[number % 2]
        place.mkdir(parents=True, exist_ok=True)
        Image.new("L", (5, 4), number).save(place / f"{number}.png")


def write_sources(folder: Path) -> Path:
    """Write a model, the same annealed and exported, texts of their tokens, and two classifiers."""
    tokenizer = toy_tokenizer()
    save_model(folder / "model", tiny("llama", dtype=torch.float32), tokenizer)
    annealed = tiny("llama", dtype=torch.float32)
    give_swish(annealed).beta = 0
    save_model(folder / "annealed", annealed, tokenizer)
    lines = (" ".join(f"t{3 + (i * 7 + j) % 20}" for j in range(9)) for i in range(60))
    (folder / "texts.txt").write_text("\n".join(lines))
    (folder / "asked.tsv").write_text("t3 t4 t5\tt6\tt7\tt3 t8 t5\n")
    main(["export", str(folder / "annealed"), "--output", str(folder / "bilinear")])
    write_pictures(folder / "pictures")
    brief = ["train", "images", "--d-model", "8", "--epochs", "1"]
    main([*brief, "--output", str(folder / "images")])
    main([*brief, "--n-layers", "2", "--output", str(folder / "deep")])
    return folder


def work_beside(sources: Path, folder: Path, monkeypatch: Any) -> Path:
    """Enter a new folder with links to all sources, offline; data sets are cached beside it."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.delenv("BILENS_DATA", raising=False)
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", str(folder / "cache"))
    here = folder / "here"
    here.mkdir()
    for path in sources.iterdir():
        (here / path.name).symlink_to(path)
    monkeypatch.chdir(here)
    return here
