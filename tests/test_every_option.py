"""Every option of every command changes the result, or is refused by name."""

import re
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

import pytest

import bilens
from bilens.cli import COMMANDS, commands_of, main
from bilens.convert import save_model
from tests.command_line import in_json, work_beside, write_sources
from tests.models import random_model, toy_tokenizer
from tests.nightly import nightly

ELSEWHERE = {
    "output": "a place",
    "figure": "a place",
    "width": "that of a figure",
    "figures": "a format of files beside the page",
    "viewer": "a place",
    "save_graph": "a place",
    "arrays": "a place",
    "device": "the numbers are those of any device, within rounding",
    "low_memory": "where weights are while they wait",
}
"""Options that change where or how the same numbers are computed and written."""

QUESTIONS = "t3 t4 t5\tt6\tt7\tt3 t8 t5\tone\nt4 t5 t6\tt7\tt9\tt9 t5 t6\tone\n"
QUESTIONS += "t5 t9 t8\tt3\tt7\tt5 t4 t8\tone\nt8 t4 t5\tt6\tt3\tt9 t4 t5\tone\n"
LAYER = ["--layer", "0"]
FLOW = ["flow", "model", "--prompt", "t3 t4 t5", "--token", "t6"]
OF_PRODUCTS = ["flow", "squared", *FLOW[2:]]
PAIRS = ["circuit", "model", "--questions", "questions.tsv"]
QUESTIONS_LIKE = ["questions", "squared", "--prompt", "t3 t9 t7", "--token", "t6"]
ONE = ["circuit", "model", "--prompt", "t3 t4 t5", "--token", "t8", "--against", "t3 t8 t5"]
IMAGES = {"data": "fashion-mnist", "data_dir": "nowhere"}
TEXTS = {"data": "others.txt", "data_dir": "nowhere"}
FLOW_OPTIONS = {
    "prompt": "t3 t4 t7",
    "token": "t7",
    "minus": "t8",
    "target": "probability",
    "through_patterns": None,
    "weights": "mlp.0@2",
    "shown": "3",
    "ablate": "2",
    "against": "t3 t8 t5",
    "mean": None,
    "replace": "t4=t8",
    **TEXTS,
}
CIRCUIT_OPTIONS = {
    "prompt": "t3 t4 t7",
    "token": "t7",
    "minus": "t9",
    "against": "t3 t9 t5",
    "questions": "others.tsv",
    "keep": "0.3",
    "left": "0",
    "level": "edges",
    "controls": None,
}
REPORT_OPTIONS = {
    "add": "own.py",
    "basis": "pixels",
    "drop": "0.5",
    "metric": "weights",
    "order": "activation",
    "token": "t7",
    "minus": "t8",
    "layer": "1",
    "among": "25",
    "prompt": "t3 t4 t7",
    "against": "t3 t9 t5",
}
REPORT = ["report", "--output", "page.html"]
RUNS: dict[str, tuple[list[str], dict[str, str | None]]] = {
    "ngrams": (
        ["ngrams", "model", "--token", "t3", *LAYER],
        {"token": "t4", "layer": "1", "minus": "t5", "k": "3", "position": "4", "among": "25"},
    ),
    "ngrams, learned positions": (
        ["ngrams", "learned", "--token", "t3", *LAYER, "--position", "3"],
        {"position": "4"},
    ),
    "heads": (
        ["heads", "model", *LAYER, "--k", "4"],
        {
            **{"layer": "1", "heads": "1", "k": "2", "components": "1", "distance": "2"},
            **{"position": "4", "among": "25"},
        },
    ),
    "heads, learned positions": (
        ["heads", "learned", *LAYER, "--position", "3"],
        {"position": "4", "distance": "2"},
    ),
    "summary": (
        ["summary", "model", "--data", "long.txt"],
        {"prompt": "t3 t4", "token": "t3", "minus": "t4", "n_tokens": "40", **TEXTS},
    ),
    "contexts": (
        ["contexts", "bilinear", "--token", "t3", *LAYER, "--data", "long.txt"],
        {"token": "t4", "layer": "1", "minus": "t5", "eigenvectors": "2", "k": "2", **TEXTS},
    ),
    "composition": (["composition", "model"], {}),
    "logits": (["logits", "model", "--prompt", "t3 t4"], {"prompt": "t4 t3", "position": "0"}),
    "generate": (
        ["generate", "model", "--tokens", "5", "--prompt", "t3"],
        {"prompt": "t4", "tokens": "4", "temperature": "0", "seed": "1"},
    ),
    "questions": (
        [*QUESTIONS_LIKE, "--minus", "t19", "--against", "t3 t9 t8"],
        {
            **{"prompt": "t3 t4 t7", "token": "t9", "minus": "t15", "against": "t3 t9 t5"},
            **{"count": "1", "task": "one"},
        },
    ),
    "flow": (FLOW, FLOW_OPTIONS | {"weights": "head.0.1@2"}),
    "flow of products": (OF_PRODUCTS, FLOW_OPTIONS),
    "flow against": ([*OF_PRODUCTS, "--against", "t3 t9 t5"], FLOW_OPTIONS),
    "flow replace": ([*OF_PRODUCTS, "--replace", "t4=t9"], FLOW_OPTIONS),
    "flow against mean": (
        [*OF_PRODUCTS, "--mean", "--data", "long.txt"],
        {name: value for name, value in FLOW_OPTIONS.items() if name != "mean"},
    ),
    "circuit": (ONE, CIRCUIT_OPTIONS),
    "circuit of questions": (PAIRS, CIRCUIT_OPTIONS),
    "circuit of edges": ([*PAIRS, "--level", "edges"], {**CIRCUIT_OPTIONS, "level": "parts"}),
    "circuit of tasks": (["circuit", "model", "--questions", "tasks.tsv"], CIRCUIT_OPTIONS),
    "task-directions": (
        ["task-directions", "model", "--questions", "questions.tsv"],
        {"questions": "others.tsv", "k": "2", "strongest": "3"},
    ),
    "eigenvectors": (
        ["eigenvectors", "images", "--output", "page.html"],
        {"basis": "pixels", "order": "activation", **IMAGES},
    ),
    "explain": (["explain", "images"], {"image": "1", "n_classes": "2", "k": "2", **IMAGES}),
    "paths": (["paths", "deep", "--k", "20"], {"k": "10", **IMAGES}),
    "bonds": (["bonds", "deep"], {"drop": "0.5", "metric": "weights", **IMAGES}),
    "decompose": (
        ["decompose", "images"],
        {
            **{"basis": "pixels", "paths": "10", "drop": "0.5", "metric": "weights"},
            **{"bonds": None, "data_dir": "nowhere"},
        },
    ),
    "decompose, deep": (
        ["decompose", "deep", "--paths", "20"],
        {
            **{"basis": "pixels", "paths": "10", "drop": "0.5", "metric": "weights"},
            **{"bonds": None, "data_dir": "nowhere"},
        },
    ),
    "decompose, bonds": (
        ["decompose", "deep", "--bonds"],
        {
            **{"basis": "pixels", "paths": "10", "drop": "0.5", "metric": "weights"},
            **{"data_dir": "nowhere"},
        },
    ),
    "report": ([*REPORT, "images"], {**REPORT_OPTIONS, **IMAGES}),
    "report, deep": ([*REPORT, "deep"], {**REPORT_OPTIONS, **IMAGES}),
    "report, gated": (
        [*REPORT, "model", "--data", "long.txt", "--token", "t3"],
        {**REPORT_OPTIONS, **TEXTS},
    ),
    "report, bilinear": (
        [*REPORT, "bilinear", "--data", "long.txt", "--token", "t3"],
        {**REPORT_OPTIONS, **TEXTS},
    ),
    "report, with a flow": (
        [
            *REPORT,
            *("bilinear", "--data", "long.txt", "--token", "t3", "--prompt", "t3 t4 t5"),
            *("--add", "flow"),
        ],
        {**REPORT_OPTIONS, **TEXTS},
    ),
    "process": (["process", "model"], {"steps": "fold_norms"}),
    "token-spectra": (
        ["token-spectra", "bilinear", "--layer", "0", "--tokens", "t3,t4", "--top", "2"],
        {"layer": "1", "tokens": "t5", "top": "3", "batch": "1", "tolerance": "1e-9"},
    ),
    "explore a Space": (
        ["explore", "images", "--space", "space"],
        {
            **{"host": "localhost", "port": "8000", "share": None, "open_browser": None},
            **{"add": "own.py", "space": "other", "device": "cpu", "data": "mnist"},
            **{"data_dir": "nowhere"},
        },
    ),
}
"""By name: a command, and another value of each of its options; None for a flag."""

UNTRIED = {
    "cite": "it has no options",
    "doctor": "it has no options",
    "demo": "it has a place only",
    "export": "it has a place only",
    "reproduce": "minutes of training",
    "train": "minutes of training",
    "anneal": "minutes of training",
    "linearise": "minutes of training",
    "tensorise": "minutes of training",
}
"""Commands whose options are not tried here, with the reason."""
OWN = '''
from bilens.analysis import Reading, analysis


@analysis("own")
def read_own(model: object) -> Reading:
    """Return nothing."""
    return Reading()
'''
CASES = [(name, option) for name, (_, options) in RUNS.items() for option in options]


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    folder = tmp_path_factory.mktemp("options")
    write_sources(folder)
    for seed, name in enumerate(("long.txt", "others.txt")):
        words = Random(seed).choices([f"t{number}" for number in range(3, 10)], k=9000)
        lines = [" ".join(words[i : i + 11]) for i in range(0, len(words), 11)]
        (folder / name).write_text("\n".join(lines))
    first = answered(folder / "model", QUESTIONS)
    others = answered(folder / "model", QUESTIONS.replace("t3", "t9"))
    (folder / "questions.tsv").write_text(first)
    (folder / "others.tsv").write_text(others)
    (folder / "tasks.tsv").write_text(first + others.replace("one", "two"))
    (folder / "own.py").write_text(OWN)
    for name, settings in {
        "learned": {"positions": "learned"},
        "squared": {"attention": "squared"},
    }.items():
        save_model(folder / name, random_model(n_layers=2, **settings), toy_tokenizer())
    return folder


def answered(model: Path, questions: str) -> str:
    """Return lines of questions in which the token is the one that a model prefers."""
    view, lines = bilens.load(model), []
    for line in questions.splitlines():
        text, *tokens, against, task = line.split("\t")
        logits = view.logits(view.ids(text)[None])[0, -1]
        tokens.sort(key=lambda name: -float(logits[view.token(name)]))
        lines.append("\t".join((text, *tokens, against, task)) + "\n")
    return "".join(lines)


def outcome(command: list[str], capsys: Any) -> tuple[bool, str]:
    """Return whether a command ended well, and its record and pages, or its message."""
    capsys.readouterr()
    try:
        main([*command, "--json"])
    except SystemExit:
        return False, capsys.readouterr().err.rpartition("error: ")[2]
    record = capsys.readouterr().out
    places = ["page.html", "space/app.py", "runs/spectra-bilinear-0/spectra.json"]
    pages = [Path(place).read_text() for place in places if Path(place).is_file()]
    # Other orders of the same sums round differently.
    numbers = re.compile(r"-?\d+\.\d+(e-?\d+)?")
    return True, numbers.sub(lambda match: f"{float(match[0]):.4g}", "\n".join([record, *pages]))


@pytest.mark.parametrize(
    ("name", "option"), nightly(CASES, CASES[::5]), ids=lambda part: part.replace(" ", "-")
)
def test_an_option_changes_the_result_or_is_refused(
    name, option, sources, tmp_path, monkeypatch, capsys
):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.delenv("BILENS_DATA", raising=False)
    words, options = RUNS[name]
    value, flag = options[option], f"--{option.replace('_', '-')}"
    changed = [*words, flag] if value is None else [*words, flag, value]
    work_beside(sources, tmp_path, monkeypatch)
    went, after = outcome(changed, capsys)
    if not went:
        assert re.search(rf"\b{option}\b|{flag}\b", after), after
        return
    if name not in BEFORE:
        (tmp_path / "before").mkdir()
        work_beside(sources, tmp_path / "before", monkeypatch)
        ended, BEFORE[name] = outcome(words, capsys)
        assert ended, BEFORE[name]
    assert (after == BEFORE[name]) is False, f"{flag} changes nothing"


BEFORE: dict[str, str] = {}
"""By name: the outcome of a command as it stands in `RUNS`."""


IN_WORDS = ("circuit", "task-directions")
"""Analyses whose numbers stand in sentences still."""
ONLY_NUMBERS = re.compile(r"(?:[-+]?\d[\d.,]*%?|e-?\d+|[\s,;+x()\[\]]|to|tensor)+")


def texts_of(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list):
        for part in value.values() if isinstance(value, dict) else value:
            yield from texts_of(part)


@pytest.mark.parametrize("name", [name for name in RUNS if not name.startswith(IN_WORDS)])
def test_no_number_of_a_record_is_a_text(name, sources, tmp_path, monkeypatch, capsys):
    monkeypatch.delenv("BILENS_DATA", raising=False)
    work_beside(sources, tmp_path, monkeypatch)
    record = in_json(capsys, *RUNS[name][0])
    # Of two numbers of one name the second is numbered; tables may share a caption.
    assert not [k for k, v in record.items() if k.endswith(" 2") and not isinstance(v, list)]
    found = [*texts_of(record)]
    assert not [text for text in found if re.search(r"\d", text) and ONLY_NUMBERS.fullmatch(text)]


def test_no_option_is_forgotten():
    asked: dict[str, set[str]] = {}
    for words, options in RUNS.values():
        asked.setdefault(words[0], set()).update(options)
    for name in set(COMMANDS) - set(UNTRIED):
        (command,) = commands_of(name).values()
        known = {option.name for option in command.parameters} - {"model", "run_dir", *ELSEWHERE}
        assert known == asked[name] - set(ELSEWHERE), name
    # Each kind of input takes options of its own.
    for words, options in RUNS.values():
        if words[0] in ("report", "circuit", "flow"):
            assert asked[words[0]] - {"mean"} <= options.keys(), words
