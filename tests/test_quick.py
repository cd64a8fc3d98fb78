"""Help and errors of usage are quick: neither imports the libraries that compute, draw or serve."""

import json
import re
import subprocess
import sys

import pytest

from bilens.analyses import built_in
from bilens.cli import COMMANDS
from bilens.cli.console import check_own
from bilens.errors import BilensError
from tests.command_line import python, refusal
from tests.test_output import WRITERS

SLOW = ("torch", "transformers", "pandas", "matplotlib", "datasets", "huggingface_hub")
SLOW += ("sklearn", "pyarrow", "tokenizers")
NAMES = [*COMMANDS, "train images", "train language"]
FILES = [f"{name} model --questions no-such-file.tsv" for name in ("circuit", "task-directions")]
FILES.append("flow-table model --questions no-such-file.tsv --output table")
"""Commands that read a file of questions before they load a model."""
UNASKED = (
    *("circuit model", "diff model other", "circuit model --prompt a --questions agreement"),
    *("circuit model --prompt a --token b", "circuit model --questions agreement --heads"),
    *("flow model --prompt a --data x", "flow model --prompt a --token b,b --minus b"),
    *("flow model --prompt a --mean --against b", "flow model --prompt a --replace b=c"),
    *("flow model --prompt a --output a.pdf", "flow model --prompt a --answer b --token c"),
    *("ngrams model --token a --minus a", "summary model --minus a", "heads model --layer -1"),
    *("explain run --image none.png", "contexts model --token a --eigenvectors -1"),
)
"""What no model makes right."""
LATER = (
    *("report model --minus a", "report model --against a", "report model --add nothing"),
    *("linearise model --data a --tokens 7 --length 8", "train images --beta 3"),
    *("train language --positions learned --rope-base 9", "report model --add flow flow"),
    *("circuit model --questions /dev/null", "flow model --prompt a --token b --output /dev/null"),
)
"""What other commands refuse before they import what computes."""
WRONG = (
    *("bonds run --drop much", "train images --n-layers 0"),
    *("train language --preset huge", "tensorise model --layer-steps -1"),
    *("ngrams model --token a --k 0", "xyz", "--help", ""),
)
CALLS = [
    *([*name.split(), "--help"] for name in NAMES),
    *([*name.split(), "--no-such-option"] for name in NAMES[::4]),
    *([name] for name in built_in()),
    ["flow", "model", "--prompt", "a", "--token", "b", "--output", ""],
    *(call.split() for call in (*FILES, *WRONG, *UNASKED, *LATER)),
]
RUN = """
import json, sys
from bilens.cli import main
slow, calls = json.loads(sys.argv[1])
for call in calls:
    before = set(sys.modules)
    try:
        main(call)
    except SystemExit as ended:
        status = ended.code
    imported = [name for name in slow if name in sys.modules and name not in before]
    print(json.dumps([call, status, imported]), file=sys.__stdout__)
"""


def test_help_and_errors_of_usage_import_nothing_slow():
    shown = python("-c", RUN, json.dumps([SLOW, CALLS])).stdout
    rows = [json.loads(line) for line in shown.splitlines() if line.startswith("[[")]
    assert [call for call, _, _ in rows] == CALLS
    assert [(call, imported) for call, _, imported in rows if imported] == []
    for call, status, _ in rows:
        is_later = "no-such-file.tsv" in call or " ".join(call) in LATER
        assert status == (0 if "--help" in call else 1 if is_later else 2), call


OF_IMAGES = """
import sys
from bilens import __main__ as program
training = "train images --n-layers 1 --epochs 1 --output run"
for words in (training, "explain run", "eigenvectors run", "certify run"):
    sys.argv = ["bilens", *words.split()]
    program.main()
    assert "transformers" not in sys.modules, words
"""


def test_images_are_trained_on_and_read_without_transformers(tmp_path):
    python("-c", OF_IMAGES, cwd=tmp_path)


def test_the_end_of_a_closed_or_full_output():
    for target, reason in ((">&-", "standard output is closed"), (">/dev/full", "No space left")):
        # With buffers, as is usual: the error comes when the last of them is flushed.
        command = f"env -u PYTHONUNBUFFERED {sys.executable} -m bilens --help {target}"
        ran = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=False)
        assert ran.returncode == 1
        assert re.fullmatch(f"error: .*{reason}.*\n", ran.stderr)


def test_a_text_in_another_encoding_than_the_shell_says():
    command = ["-m", "bilens", "flow", "run", "--prompt", "é", "--token", "a"]
    env = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONPATH": ":".join(sys.path)}
    ran = python(*command, env=env, check=False)
    assert ran.returncode == 1
    assert "is not valid ascii, and no file here; with PYTHONUTF8=1 Python reads" in ran.stderr


@pytest.fixture(autouse=True)
def own_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("name", WRITERS)
def test_an_empty_path_is_no_folder(name, tmp_path, capsys):
    assert "expected a path" in refusal(capsys, *WRITERS[name], "")
    assert list(tmp_path.iterdir()) == []


def test_a_default_place_with_files_of_others_is_left_alone(tmp_path, capsys):
    folder = tmp_path / "runs" / "digits"
    folder.mkdir(parents=True)
    check_own(folder)
    (folder / "notes.txt").write_text("mine")
    message = refusal(capsys, "train", "images", "--epochs", "1")
    assert "bilens did not write it; move it, or choose another --output" in message
    assert [path.name for path in folder.iterdir()] == ["notes.txt"]
    (folder / "training.json").write_text("{}")
    check_own(folder)
    page, numbers = tmp_path / "page.html", tmp_path / "page.json"
    numbers.write_text("mine")
    with pytest.raises(BilensError, match=r"page\.json exists, and bilens did not write it"):
        check_own(numbers, page)
    page.write_text('<meta name="generator" content="bilens">')
    check_own(numbers, page)


@pytest.mark.parametrize(
    ("command", "name"),
    [("flow model --prompt a --token b", "page.json"), ("report model --figures svg", "figures")],
)
def test_what_others_have_beside_a_page_is_left_alone(command, name, tmp_path, capsys):
    (tmp_path / name).mkdir()
    (tmp_path / "page.html").touch()  # by the shell, for what goes to standard output
    (tmp_path / name / "notes.txt").write_text("mine")
    message = refusal(capsys, *command.split(), "--output", "page.html")
    assert f"{name} exists, and bilens did not write it" in message


@pytest.mark.parametrize("words", [["--help"], ["flow", "--help"], ["train", "images"]])
def test_without_docstrings_commands_say_so_in_one_line(words):
    ran = python("-OO", "-B", "-m", "bilens", *words, check=False)
    assert (ran.returncode, ran.stdout) == (1, "")
    assert ran.stderr.startswith("error: Python runs with PYTHONOPTIMIZE=2 or -OO")
    assert "Traceback" not in ran.stderr
