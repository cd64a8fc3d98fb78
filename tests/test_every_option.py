"""Every option of every command changes the result, or is refused by name."""

import json
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from PIL import Image

import bilens
from bilens.analyses import built_in, find_analysis
from bilens.cli import COMMANDS, commands_of, main
from bilens.cli.commands import read_words
from bilens.cli.readings import command_line
from bilens.convert import save_model
from tests.command_line import in_json, of_command, others, work_beside, write_sources
from tests.families import tiny
from tests.models import digits, random_model, toy_tokenizer
from tests.nightly import nightly

pytestmark = pytest.mark.long

ELSEWHERE = {"output", "figure", "width", "figures", "viewer", "save_graph", "arrays", "device"}
ELSEWHERE |= {"device_map", "low_memory", "directions"}
"""Options of places and formats, and of where the same numbers are computed."""


QUESTIONS = "t3 t4 t5\tt6\tt7\tt3 t8 t5\tone\nt4 t5 t6\tt7\tt9\tt9 t5 t6\tone\n"
QUESTIONS += "t5 t9 t8\tt3\tt7\tt5 t4 t8\tone\nt8 t4 t5\tt6\tt3\tt9 t4 t5\tone\n"
OF_PRODUCTS = "flow squared --prompt 't3 t4 t5' --token t6"
PAIRS = "circuit model --questions questions.tsv"
ONE = "circuit model --prompt 't3 t4 t5' --token t8 --against 't3 t8 t5'"
READ = "--data long.txt --token t3"
IMAGES = "data=fashion-mnist data_dir=nowhere"
TEXTS = "data=others.txt data_dir=nowhere"
OF_CONTEXTS = f"token=t4 layer=1 minus=t5 eigenvectors=2 k=2 {TEXTS}"
OF_FLOW = "prompt='t3 t4 t7' token=t7 minus=t8 target=probability"
OF_FLOW += " answer='t8 t9' generate=2"
OF_FLOW += f" chat shown=3 ablate=2 against='t3 t8 t5' mean replace=t4=t8 {TEXTS}"
OF_CIRCUIT = "prompt='t3 t4 t7' token=t7 minus=t9 against='t3 t9 t5' questions=others.tsv"
OF_CIRCUIT += " chat keep=0.3 size=2 heads level=parts controls"
OF_REPORT = "add=own.py basis=pixels drop=0.5 metric=weights order=activation token=t7 minus=t8"
OF_REPORT += " layer=1 among=25 prompt='t3 t4 t7' against='t3 t9 t5'"
OF_SPACE = "host=localhost port=8000 open_browser add=own.py space=other device=cpu"
OF_HEADS = "layer=1 heads=1 k=2 components=1 distance=2 position=4 among=25"
REPORT = "report --output page.html"
OTHERS = {
    "ngrams model --token t3 --layer 0": "token=t4 layer=1 minus=t5 k=3 position=4 among=25",
    "ngrams learned --token t3 --layer 0 --position 3": "position=4",
    "heads model --layer 0 --k 4": OF_HEADS,
    "heads learned --layer 0 --position 3": "position=4 distance=2",
    "summary model --data long.txt": f"chat prompt='t3 t4' token=t3 minus=t4 n_tokens=40 {TEXTS}",
    "contexts bilinear --token t3 --layer 0 --data long.txt": OF_CONTEXTS,
    "composition model": "",
    "generate model --tokens 5 --prompt t3": "prompt=t4 chat tokens=4 temperature=0 seed=1",
    "flow model --prompt 't3 t4 t5' --token t6": OF_FLOW.replace("mlp.0@2", "head.0.1@2"),
    "flow model --prompt 't3 t4 t5' --answer 't6 t8'": OF_FLOW,
    "flow model --prompt 't3 t4 t5' --generate 3": OF_FLOW,
    OF_PRODUCTS: OF_FLOW,
    f"{OF_PRODUCTS} --against 't3 t9 t5'": OF_FLOW,
    f"{OF_PRODUCTS} --replace t4=t9": OF_FLOW,
    f"{OF_PRODUCTS} --mean --data long.txt": OF_FLOW.replace(" mean", ""),
    "lens model --prompt 't3 t4 t5'": "prompt='t3 t4 t7' chat against='t3 t8 t5' layers=1 k=1",
    "diff model tuned --prompt 't3 t4 t5' --token t6": (
        "prompt='t3 t4 t7' token=t7 minus=t8 against='t3 t8 t5' chat target=probability undo=1"
        " orders=1"
    ),
    "diff model tuned --questions questions.tsv": "chat questions=others.tsv undo=1 orders=1",
    ONE: OF_CIRCUIT,
    PAIRS: OF_CIRCUIT,
    f"{PAIRS} --level parts": OF_CIRCUIT.replace("=parts", "=stages"),
    "circuit model --questions tasks.tsv": OF_CIRCUIT,
    "task-directions model --questions questions.tsv": "questions=others.tsv chat k=2 strongest=3",
    "flow-table model --questions questions.tsv --output table": "questions=others.tsv",
    "eigenvectors images --output page.html": f"basis=pixels order=activation {IMAGES}",
    "certify images": f"images=20 image=drawing.png {IMAGES}",
    "certify images --image drawing.png": f"images=20 image=other.png {IMAGES}",
    "explain images": f"image=1 n_classes=2 k=2 {IMAGES}",
    "paths deep --k 20": f"k=10 {IMAGES}",
    "bonds deep": f"drop=0.5 metric=weights {IMAGES}",
    f"{REPORT} images": f"{OF_REPORT} {IMAGES}",
    f"{REPORT} deep": f"{OF_REPORT} {IMAGES}",
    f"{REPORT} model {READ}": f"{OF_REPORT} {TEXTS}",
    f"{REPORT} bilinear {READ}": f"{OF_REPORT} {TEXTS}",
    f"{REPORT} bilinear {READ} --prompt 't3 t4 t5' --add flow": f"{OF_REPORT} {TEXTS}",
    "process model": "steps=fold_norms",
    "explore images --space space": f"{OF_SPACE} data=mnist data_dir=nowhere",
}
RUNS = {command: (shlex.split(command), others(text)) for command, text in OTHERS.items()}
"""By command: its words, and another value of each of its options."""

UNTRIED = {"cite", "doctor", "demo", "export"}  # no option but that of a place
UNTRIED |= {"graph"}  # in tests/pages/test_saved_graph.py
UNTRIED |= {"reproduce", "train", "anneal", "linearise", "tensorise"}  # minutes of training
OWN = '''from bilens.analysis import Reading, analysis
@analysis("own")
def read_own(model: object) -> Reading:
    """Return nothing."""
    return Reading()
'''
CASES = [(name, option) for name, (_, options) in RUNS.items() for option in options]


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    folder = write_sources(tmp_path_factory.mktemp("options"))
    for seed, name in enumerate(("long.txt", "others.txt")):
        words = Random(seed).choices([f"t{number}" for number in range(3, 10)], k=9000)
        lines = (" ".join(words[i : i + 11]) for i in range(0, len(words), 11))
        (folder / name).write_text("\n".join(lines))
    first = answered(folder / "model", QUESTIONS)
    others = answered(folder / "model", QUESTIONS.replace("t3", "t9"))
    (folder / "questions.tsv").write_text(first)
    (folder / "others.tsv").write_text(others)
    (folder / "tasks.tsv").write_text(first + others.replace("one", "two"))
    (folder / "own.py").write_text(OWN)
    for image, name in zip(digits().test_images, ("drawing.png", "other.png"), strict=False):
        Image.fromarray((image.reshape(8, 8) * 255).byte().numpy()).save(folder / name)
    save_model(folder / "tuned", tiny("llama", 5, torch.float32), toy_tokenizer())
    for part, name in (("positions", "learned"), ("attention", "squared")):
        save_model(folder / name, random_model(n_layers=2, **{part: name}), toy_tokenizer())
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


def outcome(command: list[str], option: str, capsys: Any) -> tuple[bool, str]:
    """Return whether a command ended well, and its record and pages, or its message.

    Where they only repeat the option is left out.
    """
    capsys.readouterr()
    try:
        main([*command, "--json"])
    except SystemExit:
        return False, of_command(command, capsys.readouterr().err.rpartition("error: ")[2])
    record = json.dumps(without(option, json.loads(capsys.readouterr().out)))
    places = map(Path, ("page.html", "space/app.py"))
    pages = [place.read_text() for place in places if place.is_file()]
    repeated = rf"--{option.replace('_', '-')}\b( [^-\s<]+)?"
    pages = [re.sub(repeated, "", page) for page in pages]
    # Other orders of the same sums round differently.
    numbers = re.compile(r"-?\d+\.\d+(e-?\d+)?")
    return True, numbers.sub(lambda match: f"{float(match[0]):.4g}", "\n".join([record, *pages]))


def without(name: str, value: Any) -> Any:
    """Return a record without what has a name, at any depth."""
    if isinstance(value, dict):
        return {key: without(name, x) for key, x in value.items() if key != name}
    return [without(name, x) for x in value] if isinstance(value, list) else value


@pytest.mark.parametrize(
    ("name", "option"), nightly(CASES, CASES[::5]), ids=lambda part: part.replace(" ", "-")
)
def test_an_option_changes_the_result_or_is_refused(
    name, option, sources, tmp_path, monkeypatch, capsys
):
    words, options = RUNS[name]
    flag, value = f"--{option.replace('_', '-')}", options[option]
    work_beside(sources, tmp_path, monkeypatch)
    went, after = outcome([*words, flag, *([value] if value else [])], option, capsys)
    if not went:
        assert re.search(rf"\b{option}\b|{flag}\b", after), after
        return
    (tmp_path / "before").mkdir()
    work_beside(sources, tmp_path / "before", monkeypatch)
    ended, before = outcome(words, option, capsys)
    assert ended, before
    assert (after == before) is False, f"{flag} changes nothing"


IN_WORDS = ("circuit", "task-directions")  # whose numbers stand in sentences still
ONLY_NUMBERS = re.compile(r"(?:[-+]?\d[\d.,]*%?|e-?\d+|[\s,;+x()\[\]]|to|tensor)+")


def texts_of(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list):
        for part in value.values() if isinstance(value, dict) else value:
            yield from texts_of(part)


@pytest.mark.parametrize("name", [name for name in RUNS if not name.startswith(IN_WORDS)])
def test_no_number_of_a_record_is_a_text(name, sources, tmp_path, monkeypatch, capsys):
    work_beside(sources, tmp_path, monkeypatch)
    record = in_json(capsys, *RUNS[name][0])
    # Of two numbers of one name the second is numbered; tables may share a caption.
    assert not [k for k, v in record.items() if k.endswith(" 2") and not isinstance(v, list)]
    # Of digits, a class is named by its number.
    texts = texts_of({key: value for key, value in record.items() if key != "class_names"})
    assert not [text for text in texts if re.search(r"\d", text) and ONLY_NUMBERS.fullmatch(text)]


@pytest.mark.parametrize("name", {name.split()[0]: name for name in RUNS}.values())
def test_what_a_command_says_last_is_in_its_record(name, sources, tmp_path, monkeypatch, capsys):
    work_beside(sources, tmp_path, monkeypatch)
    main([*RUNS[name][0], "--json"])
    shown = capsys.readouterr()
    said = re.findall(r"^(?:\w+: )?[A-Z\d].* .*[a-z0-9)%]\.$", shown.err, re.MULTILINE)
    assert "\n".join(said) == json.loads(shown.out).get("answer", "")


@pytest.mark.parametrize("name", [name for name in RUNS if name.split()[0] in built_in()])
def test_the_command_on_a_page_is_read_as_it_was(name, sources, tmp_path, monkeypatch):
    work_beside(sources, tmp_path, monkeypatch)
    command, *words = RUNS[name][0]
    entry, commands = find_analysis(command), commands_of(command)
    words += ["--undo", "1", "2"] if command == "diff" else []  # several values
    settings = read_words(commands, "bilens", words).keywords
    line = shlex.split(command_line(entry, settings["model"], settings))
    assert line[:2] == ["bilens", command]
    again = read_words(commands, "bilens", line[2:]).keywords
    names = [option.name for option in entry.options]
    assert [again[name] for name in names] == [settings[name] for name in names]


def test_no_option_is_forgotten():
    asked: dict[str, set[str]] = {}
    for words, options in RUNS.values():
        asked.setdefault(words[0], set()).update(options)
    for name in {*COMMANDS} - UNTRIED:
        (command,) = commands_of(name).values()
        known = {option.name for option in command.parameters} - {
            "model",
            "run_dir",
            "tuned",
            *ELSEWHERE,
        }
        assert known == asked[name] - ELSEWHERE, name
    # Each kind of input takes options of its own.
    for words, options in RUNS.values():
        if words[0] in ("report", "circuit", "flow"):
            assert asked[words[0]] - {"mean"} <= options.keys(), words
