"""Every command that writes leaves devices and named pipes alone, and follows symbolic links."""

import os
import re
import shutil
from pathlib import Path

import pytest

import bilens
from bilens.analyses import built_in
from bilens.cli import COMMANDS, main
from bilens.cli.readings import EXPORT_ENDINGS
from tests.command_line import refusal, work_beside, write_sources
from tests.nightly import nightly

TRAINED = ["model", "--data", "texts.txt", "--length", "8", "--device", "cpu"]
FLOW = ["flow", "model", "--prompt", "t3 t4", "--token", "t5"]
WRITERS = {
    "train images": ["train", "images", "--d-model", "8", "--epochs", "1", "--output"],
    "train language": [
        *["train", "language", "--data", "grammar", "--d-model", "8", "--n-heads", "1"],
        *["--d-hidden", "8", "--n-ctx", "8", "--epochs", "1", "--device", "cpu", "--output"],
    ],
    "ngrams": ["ngrams", "model", "--token", "t3", "--layer", "0", "--k", "2", "--output"],
    "heads": ["heads", "model", "--layer", "0", "--k", "2", "--output"],
    "contexts": [
        *["contexts", "bilinear", "--token", "t3", "--layer", "0", "--data", "texts.txt"],
        *["--k", "1", "--eigenvectors", "1", "--output"],
    ],
    "flow": [*FLOW, "--output"],
    "flow viewer": [*FLOW, "--output", "page.html", "--viewer"],
    "flow-table": ["flow-table", "model", "--questions", "asked.tsv", "--output"],
    "process": ["process", "model", "--output"],
    "anneal": ["anneal", *TRAINED, "--batch-size", "4", "--tokens", "64", "--output"],
    "export": ["export", "annealed", "--output"],
    "linearise": ["linearise", *TRAINED, "--held-out", "16", "--tokens", "99", "--output"],
    "tensorise": [
        *["tensorise", *TRAINED, "--tokens", "0", "--calibration-tokens", "64"],
        *["--pattern-steps", "1", "--layer-steps", "1", "--held-out", "16", "--output"],
    ],
    "report": ["report", "images", "--output"],
    "explore": ["explore", "images", "--space"],
    "demo": ["demo", "--output"],
    "reproduce": ["reproduce", "fig3", "--output"],
    "graph": ["graph", "graph.json", "--output"],
}
"""By name: the arguments before the path that a command writes to."""
EXPORTS = {
    "figure": [*FLOW, "--figure"],
    "save_graph": [*FLOW, "--save-graph"],
    "directions": ["circuit", "model", "--questions", "agreement", "--directions"],
    "arrays": ["eigenvectors", "images", "--arrays"],
}
"""The same of further files, by their options."""
LONG = ("demo", "reproduce", "graph")
"""Minutes of work, or a file that another command wrote; their writers are those of the others."""
BRIEF = ("train images", "ngrams", "flow", "flow viewer", "process", "report")
"""Commands of each way to write, for every day."""
SILENT = ("doctor", "cite")
READINGS = ("ngrams", "heads", "contexts", "flow")  # the other analyses share their writers
FILES = ("report", *READINGS)  # all others write a folder
BEFORE = '<meta name="generator" content="bilens">before'


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    return write_sources(tmp_path_factory.mktemp("sources"))


@pytest.fixture(autouse=True)
def here(sources, tmp_path, monkeypatch):
    monkeypatch.setattr("bilens.data.corpus.GRAMMAR_SENTENCES", 100)
    work_beside(sources, tmp_path, monkeypatch)


def test_every_command_that_writes_is_here():
    named = {name.split()[0] for name in WRITERS} | {*SILENT}
    assert named == {*COMMANDS} - {*built_in()} | {*READINGS}


@pytest.mark.parametrize(
    ("path", "kind"), [("pipe", "named pipe"), ("link", "named pipe"), ("/dev/full", "device")]
)
@pytest.mark.parametrize("name", WRITERS)
def test_what_is_no_file_is_refused_before_any_work(name, path, kind, capsys):
    os.mkfifo("pipe")
    Path("link").symlink_to("pipe")
    assert refusal(capsys, *WRITERS[name], path).startswith(f"error: {path} is a {kind}")
    assert Path("pipe").is_fifo()
    assert Path("link").is_symlink()
    assert Path("/dev/full").is_char_device()


@pytest.mark.parametrize("name", [*WRITERS, *EXPORTS])
def test_a_place_that_cannot_be_made_is_refused_before_any_work(name, monkeypatch, capsys):
    monkeypatch.setattr("bilens.models.load", None)
    path = f"texts.txt/x/page.html{EXPORT_ENDINGS.get(name, ('',))[0]}"
    message = f"{path} could not be written: Not a directory"
    assert message in refusal(capsys, *(WRITERS | EXPORTS)[name], path)


@pytest.mark.parametrize(
    "words",
    [
        ("circuit", "model", "--questions", "q.tsv", "--output", "q.tsv"),
        ("circuit", "model", "--questions", "link.tsv", "--output", "./q.tsv"),
        (*FLOW, "--output", "x.html", "--save-graph", "x.json"),
        (*FLOW, "--figure", "x.svg", "--figure", "x.svg"),
        ("graph", "q.tsv", "--output", "q.tsv"),
    ],
)
def test_no_output_overwrites_what_another_option_names(words, capsys):
    questions = "t1 t2\tt3\tt4\tt5 t2\n"
    Path("q.tsv").write_text(questions)
    Path("link.tsv").symlink_to("q.tsv")
    assert re.search("would overwrite .*, which the command names too", refusal(capsys, *words))
    assert Path("q.tsv").read_text() == questions
    assert not Path(words[-1]).exists() or words[-1].endswith(".tsv")


PAGES = dict.fromkeys((*FILES, "graph"), "page.html")
PAGES |= {"flow-table": "out/table.html", "reproduce": "out/fig3.html"}
"""What writes pages, but for demo, which calls the others."""


@pytest.mark.parametrize("name", PAGES)
def test_a_page_of_others_is_left_alone(name, capsys):
    page = Path(PAGES[name])
    page.parent.mkdir(exist_ok=True)
    page.write_text("<p>mine")
    output = page.parent if page.parent.name else page
    message = f"error: {page} exists, and bilens did not write it"
    assert refusal(capsys, *WRITERS[name], output).startswith(message)
    assert page.read_text() == "<p>mine"


@pytest.mark.long
@pytest.mark.parametrize("name", nightly([name for name in WRITERS if name not in LONG], BRIEF))
def test_the_target_of_a_link_is_written(name):
    Path("elsewhere").mkdir()
    link, target = Path("link.html"), Path("elsewhere") / "target.html"
    if name in FILES:
        target.write_text(BEFORE)
    elif name != "explore":  # a Space goes into a new folder only
        target.mkdir()
    link.symlink_to(target)
    main([*WRITERS[name], "link.html"])
    assert link.is_symlink()
    assert target.read_text() != BEFORE if name in FILES else any(target.iterdir())


def test_a_file_of_a_folder_may_be_a_link_and_no_pipe(capsys):
    folder, config = Path("out"), Path("config.json")
    folder.mkdir()
    config.write_text("before")
    (folder / config).symlink_to(config.absolute())
    main(["process", "model", "--output", "out"])
    assert (folder / config).is_symlink()
    assert "llama" in config.read_text()
    bilens.load("out")
    (folder / "model.safetensors").unlink()
    os.mkfifo(folder / "model.safetensors")
    message = "out/model.safetensors is a named pipe"
    assert message in refusal(capsys, "process", "model", "--output", "out")


@pytest.mark.parametrize("name", ["spectra.safetensors", "decomposition.json"])
def test_arrays_are_written_into_no_pipe(name, sources, tmp_path, capsys):
    without = shutil.ignore_patterns("checkpoints")
    run = shutil.copytree(sources / "images", tmp_path / "run", ignore=without)
    os.mkfifo(run / name)
    assert f"{name} is a named pipe" in refusal(capsys, "eigenvectors", run, "--arrays", run)
    assert (run / name).is_fifo()
