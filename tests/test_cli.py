"""The command line as a user meets it."""

import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from textwrap import indent
from types import ModuleType
from typing import Any, get_type_hints

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file

import bilens
from bilens import cli
from bilens.__main__ import main as start
from bilens.cli import COMMANDS, GROUPS, commands_of, main, parse, running
from bilens.cli.commands import whole_number
from bilens.files import read_json
from bilens.images import read_bonds
from bilens.nn import ClassifierConfig, ImageClassifier
from tests.command_line import in_json, output_of, python, refusal
from tests.models import digits

SMALL = ["--d-model", "8", "--epochs", "2", "--weight-decay", "0"]


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("trained")
    for layers in ("1", "2"):
        main(["train", "images", *SMALL, "--n-layers", layers, "--output", f"{folder}/{layers}"])
    return folder


@pytest.fixture(autouse=True)
def own_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def run(trained, tmp_path):
    return shutil.copytree(trained / "1", tmp_path / "run")


@pytest.fixture
def deep_run(trained, tmp_path):
    return shutil.copytree(trained / "2", tmp_path / "deep")


def test_train_eigenvectors_report(run, capsys):
    shown = output_of(capsys, "eigenvectors", run, "--arrays", run)
    for part in ("test accuracy", "eigenvectors per class", f"written: {run}\n"):
        assert part in shown
    record = read_json(run / "decomposition.json")
    spectra = load_file(run / "spectra.safetensors")
    assert spectra["values"].shape == (10, 8)
    vectors = spectra["vectors"]
    rebuilt = torch.einsum("ck,cki,ckj->cij", spectra["values"], vectors, vectors)
    assert torch.allclose(rebuilt, bilens.load(run).tensor().dense(), atol=1e-4)
    assert record["How well it holds"][-1]["accuracy"] == record["test accuracy"]
    assert in_json(capsys, "eigenvectors", run) == record
    main(["report", str(run), "--output", "page.html", "--order", "activation"])
    assert "mean activation" in (run.parent / "page.html").read_text()


def test_several_seeds(tmp_path, capsys):
    command = ["train", "images", *SMALL, "--seed", "5", "--output", tmp_path]
    assert "2 seeds" in output_of(capsys, *command, "--seeds", "2")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["seed-5", "seed-6"]
    result = in_json(capsys, *command, "--seeds", "3", "--resume")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["seed-5", "seed-6", "seed-7"]
    assert list(result["runs"]) == [str(tmp_path / f"seed-{seed}") for seed in (5, 6, 7)]


def test_a_run_is_not_overwritten(run, capsys, caplog):
    before = (run / "model.safetensors").read_bytes()
    message = refusal(capsys, "train", "images", *SMALL, "--output", "run")
    assert "Resume that training with --resume" in message
    assert "or choose another --output" in message
    assert (run / "model.safetensors").read_bytes() == before
    command = ["train", "images", *SMALL, "--output", "run", "--resume"]
    assert "test accuracy" in output_of(capsys, *command)
    assert "run is finished" in caplog.text


@pytest.mark.parametrize(
    "command", ["flow story", "lens story", "train images", "linearise model", "demo", "doctor"]
)
@pytest.mark.parametrize("rank", [0, 1])
def test_what_does_not_share_its_work_refuses_several_processes(command, rank, monkeypatch, capsys):
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", str(rank))
    with pytest.raises(SystemExit) as ended:
        main(command.split())
    assert ended.value.code == 1
    lines = capsys.readouterr().err.splitlines()
    name = command if "train" in command else command.split()[0]
    assert len(lines) == 1 - rank
    said = f"error: bilens {name}{' without --steps' * (name == 'linearise')} runs in one process: "
    assert lines in ([], [f"{said}start it without torchrun"])
    shared = ["train language", "anneal", "linearise --steps 3", "tensorise", "circuit"]
    assert not any(map(cli.check_processes, [words.split() for words in shared]))


@given(st.decimals(-9_999, 9_999, places=3), st.sampled_from("KMBkmb"))
def test_whole_numbers_are_exact(number, unit):
    expected = number * {"K": 10**3, "M": 10**6, "B": 10**9}[unit.upper()]
    assert whole_number(f"{number:f}{unit}") == whole_number(f"{expected:.0f}") == expected


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("train images --data nothing", "nothing"),
        ("train images --learning-rate inf", "--learning-rate=inf, expected a finite"),
        ("train images --epochs many", "'many', expected a whole number such as 1000000"),
        ("train images --resume --output void", "Nothing to resume"),
        ("report run --data void", "name='void', expected digits"),
        ("process run", "run holds ImageClassifier, expected a language model; bilens.load"),
        ("flow story --prompt 日本語 --token she", "--prompt='日本語' holds no token"),
        *(
            (f"{command} --prompt a", "Did you mean story, the model that comes with")
            for command in ("flow storie", "lens STORY", "report Story")
        ),
        ("ngrams story --token grl --layer 0", "it is cut into |gr|##l|; the nearest are girl"),
        ("circuit story", "nothing is asked; expected either --prompt TEXT"),
        ("ngrams run --token girl", "run holds ImageClassifier, and `bilens ngrams` reads languag"),
    ],
)
def test_a_mistake_gets_one_message(run, command, message, monkeypatch, capsys):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    assert message in refusal(capsys, *command.split())


def test_a_run_without_its_record(run, capsys):
    (run / "training.json").unlink()
    assert "training.json is missing or damaged" in refusal(capsys, "eigenvectors", run)


def test_deep_models_are_read_by_their_paths(deep_run, capsys):
    shown = output_of(capsys, "paths", deep_run, "--k", "50", "--arrays", deep_run)
    assert "top effective eigenvalue" in shown
    assert f"written: {deep_run}\n" in shown
    assert load_file(deep_run / "paths.safetensors")["vectors"].shape == (50, 64)


@pytest.mark.long
def test_deep_models_are_cut_to_few_directions(deep_run, capsys):
    options = ["--drop", "0.05", "--metric", "weights", "--arrays", "deep"]
    shown = output_of(capsys, "bonds", "deep", *options)
    assert "error of the logits" in shown
    record = read_json(deep_run / "bonds.json")
    kept = record["ranks"][record["kind"]]
    directions = " + ".join(map(str, kept))
    assert directions in shown
    saved = load_file(deep_run / "bonds.safetensors")
    assert saved["shares.0"].sum() == pytest.approx(1)
    assert saved["read.1"].shape == saved["write.1"].T.shape
    main(["report", "deep"])
    page = (deep_run / "report.html").read_text()
    assert "measured over standard normal inputs" in page
    reading = read_bonds(bilens.load(deep_run), digits(), drop=0.05, metric="weights")
    assert (reading.metric, reading.drop) == ("weights", 0.05)
    ranks = list(reading.cut.ranks)
    assert kept == ranks
    assert f"the model on {directions} directions" in page
    cut = deep_run / "cut"
    assert bilens.load(cut).config.d_model == max(*ranks, 10)
    assert read_json(cut / "training.json")["ranks"] == ranks
    main(["report", str(cut), "--drop", "0.1", "--metric", "gaussian"])
    page = (cut / "report.html").read_text()
    assert "directions" in page
    assert "measured over a Gaussian of " in page


def test_what_is_no_tensor_says_so(tmp_path, capsys):
    main(["train", "images", *SMALL, "--gate", "relu", "--output", str(tmp_path)])
    assert "layers[0] has the gate relu" in refusal(capsys, "eigenvectors", tmp_path)


def test_a_deep_model_is_sent_to_a_command_that_reads_it(tmp_path, capsys):
    ImageClassifier(ClassifierConfig(64, 10, 60, 3, image_shape=(8, 8))).save_pretrained(tmp_path)
    for name in ("eigenvectors", "explain", "paths"):
        assert "`bilens bonds`" in refusal(capsys, name, tmp_path, "--data", "digits")


def helped(capsys, *words: str) -> str:
    """Return what a command shows that ends well without any work."""
    with pytest.raises(SystemExit) as ended:
        main([*words])
    assert not ended.value.code
    return capsys.readouterr().out


def test_help_is_for_readers_of_the_paper(capsys):
    shown = helped(capsys, "train", "images", "--help")
    assert "Table 2 of Pearce" in shown
    assert "input-noise" in shown


@pytest.mark.parametrize(
    ("command", "more"),
    [("report nowhere", ""), ("train images --output new", "; --resume continues from here")],
)
def test_ctrl_c_names_resume_where_there_is_one(command, more, monkeypatch, capsys):
    def stop(*_):
        raise KeyboardInterrupt

    for place in ("bilens.files.check_target", "bilens.inputs.check_data"):
        monkeypatch.setattr(place, stop)
    with pytest.raises(SystemExit) as ended:
        main(command.split())
    assert (ended.value.code, capsys.readouterr().err.strip()) == (130, f"stopped{more}")


def test_ctrl_c_while_modules_are_imported_is_no_error(monkeypatch):
    class Stopping(ModuleType):
        def __getattr__(self, name):
            raise KeyboardInterrupt

    monkeypatch.setitem(sys.modules, "bilens.cli", Stopping("bilens.cli"))
    monkeypatch.setattr(signal, "getsignal", lambda _: signal.SIG_IGN)  # which stays
    with pytest.raises(SystemExit) as ended:
        start()
    assert ended.value.code == 130


PRESS = "os.kill(os.getpid(), signal.SIGINT), sum(range(1000))"
LOST = {
    "in an import": f"import os, signal\ntry: {PRESS}\nexcept BaseException: pass",
    "where nothing can be raised": f"class Dropped:\n    def __del__(_): {PRESS}\nDropped()",
}
WORKING = """
import os, signal, sys, time
signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored in the background of a script
import bilens.cli
from bilens.__main__ import main
def command():
{within}
    time.sleep(10)
    print("not stopped")
bilens.cli.main = command
main()
"""


@pytest.mark.skipif(os.name == "nt", reason="ctrl-C cannot be sent there")
@pytest.mark.parametrize("place", LOST)
def test_ctrl_c_is_not_lost(place, tmp_path):
    """Libraries take it for a missing module, and Python drops it in __del__."""
    (tmp_path / "library.py").write_text(LOST[place])
    within = "import library" if place == "in an import" else LOST[place]
    code = WORKING.format(within=indent(within, "    "))
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])}
    run = python("-c", code, check=False, env=env, timeout=60)
    assert (run.returncode, run.stdout, run.stderr) == (130, "", "")


LEFT = """
import atexit, sys, threading
from bilens.__main__ import main
def work():
    threading.main_thread().join()
    print("thread")
atexit.register(print, "at exit")
threading.Thread(target=work).start()
sys.argv = ["bilens", "--version"]
main()
"""


def test_what_is_left_to_do_is_done_at_the_end():
    text = python("-c", LEFT).stdout
    assert "bilens" in text
    assert text.endswith("thread\nat exit\n")


# By day tests/train/test_classifier.py does so within this process.
@pytest.mark.slow
def test_ctrl_c_and_resume_from_a_shell(tmp_path):
    """The same bits as an uninterrupted run, through a real signal to a real process."""
    train = ["train", "images", *SMALL, "--epochs", "12", "--batch-size", "20", "--output"]
    shell = [sys.executable, "-c", "from bilens.cli import main; main()"]
    stopped, full = tmp_path / "stopped", tmp_path / "whole"
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen([*shell, *train, stopped], env=env, stderr=subprocess.PIPE)
    deadline = time.monotonic() + 60
    while not (stopped / "checkpoints").exists() and time.monotonic() < deadline:
        time.sleep(0.02)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130
    assert b"--resume" in errors
    assert len((stopped / "metrics.jsonl").read_text().splitlines()) < 12
    bilens.load(stopped)
    # In this process, which is on one core like the other: starting one takes longer than training.
    main([*train, str(stopped), "--resume"])
    main([*train, str(full)])
    a, b = (load_file(path / "model.safetensors") for path in (stopped, full))
    assert all(torch.equal(a[name], b[name]) for name in b)


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_an_object_for_json(name):
    for command in commands_of(name).values():
        run = command.run.func if isinstance(command.run, partial) else command.run
        # None is what all but the first of several processes have.
        assert get_type_hints(run)["return"] in (dict[str, Any], dict[str, Any] | None)


def test_a_misspelt_option_that_is_missing_is_named(capsys):
    for command in ("flow story --promt a --token she", "flow story"):
        hint = "--promt is no option; did you mean --prompt?"
        assert (hint in refusal(capsys, *command.split())) == ("--promt" in command)


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_explains_itself(name, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("drawing.png").touch()  # the one file that has to be there before a model is loaded
    shown = helped(capsys, name, "--help")
    assert f"usage: bilens {name}" in shown
    examples = re.findall(r"^ {4}bilens (.*)$", shown, re.MULTILINE)
    assert examples
    assert "\x1b" not in shown
    for example in examples:
        assert example.startswith(name)
        parse(shlex.split(example))


def test_the_overview_names_every_command(capsys):
    shown = helped(capsys, "--help")
    lines = [line.split() for line in shown.splitlines()]
    assert [words[0] for words in lines if words and words[0] in COMMANDS] == list(COMMANDS)
    assert len(set(COMMANDS)) == len(COMMANDS)
    assert all(heading in shown for heading in GROUPS)
    assert "The exit status is 0 on success, 1 after an error" in " ".join(shown.split())


def test_an_unknown_command(capsys):
    for name in COMMANDS:
        wrong = name[:-1] + "_"
        assert f"{wrong} is not a command; did you mean {name}" in refusal(capsys, wrong)
    assert "xyz is not a command; `bilens --help` lists them" in refusal(capsys, "xyz")


def test_the_version(capsys):
    for words in ([], *([name] for name in COMMANDS)):
        assert helped(capsys, *words, "--version") == f"bilens {bilens.__version__}\n"


def test_completion_knows_every_command_and_its_options(capsys):
    shown = helped(capsys, "--tyro-print-completion", "bash")
    assert all(name in shown for name in (*COMMANDS, "--target-loss", "--undo"))


def test_the_doctor_says_what_is_missing(monkeypatch, capsys):
    monkeypatch.setitem(running.OPTIONAL, "not-there", ("figures", "nothing"))
    monkeypatch.setitem(running.OPTIONAL, "neither", ("", "nothing"))
    monkeypatch.setenv("BILENS_DATA", "void")
    result = in_json(capsys, "doctor")
    assert result["versions"]["bilens"] == bilens.__version__
    assert result["optional"]["not-there"] is None
    assert result["optional"]["gguf"]
    assert result["places"]["BILENS_DATA"] == "void (missing)"
    text = output_of(capsys, "doctor")
    assert ["not-there", "missing", "nothing"] in [line.split() for line in text.splitlines()]
    remedy = "What is missing comes with pip install -e '.[figures]', pip install "
    assert remedy in text
    assert "neither" in text.split(remedy)[1]


def test_the_doctor_names_a_triton_that_was_not_tested(monkeypatch, capsys):
    version = pytest.importorskip("triton").__version__
    assert in_json(capsys, "doctor")["optional"]["triton"].startswith(("Triton ", version))
    problem = "Triton 3.6.0 is untested"
    monkeypatch.setattr("bilens.kernels.attention.triton_problem", lambda: problem)
    shown = in_json(capsys, "doctor")["optional"]["triton"]
    assert shown == f"{problem}; the chunked kernel is used"


def test_a_reader_that_closes_early_is_no_error():
    command = f"{sys.executable} -m bilens contexts --help | head -1"
    shown = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=True)
    assert shown.stdout.startswith("usage: bilens contexts")
    assert shown.stderr == ""


WRITING = {
    "page.html": ["flow", "story", "--prompt", "The girl was", "--token", "she"],
    "parts.tsv": ["circuit", "story", "--prompt", "A girl", "--token", "was", "--against", "A boy"],
    "run": ["train", "images", *SMALL],
}


@pytest.mark.long
@pytest.mark.parametrize("name", WRITING)
def test_files_are_written_though_a_reader_closes_early(tmp_path, name):
    words = [sys.executable, "-m", "bilens", *WRITING[name], "--output", name]
    # A pipe that nobody reads is as one whose reader has enough, from the first line on.
    reading, writing = os.pipe()
    os.close(reading)
    done = subprocess.run(words, stdout=writing, stderr=subprocess.PIPE, check=False)
    os.close(writing)
    assert (done.returncode, done.stderr) == (0, b"")
    assert (tmp_path / name).exists()
