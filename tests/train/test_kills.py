"""A training that is killed, or whose checkpoints are damaged, resumes to the same end."""

import json
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from bilens.errors import CheckpointError
from bilens.train import classifier, trainer
from bilens.train.run_directory import RunDirectory, only_process_in, read_training
from tests.command_line import run_python
from tests.train.kill_attack import KINDS, train_one
from tests.train.runs import check_same_weights, ctrl_c


def check_outcomes(folder: Path) -> None:
    for kind, outcome in json.loads((folder / "outcomes.json").read_text()).items():
        assert outcome["failures"] == [], kind
        assert outcome["points"] > 50


def test_a_kill_loses_nothing(work_of_processes):
    check_outcomes(work_of_processes / "kills")


@pytest.mark.slow
def test_a_kill_at_any_file_operation_loses_nothing(tmp_path):
    run_python("-m", "tests.train.kill_attack", 1, tmp_path, *KINDS)
    check_outcomes(tmp_path)


STOPS = {"language": (trainer, "collate", 8)}
STOPS["classifier"] = (classifier._ClassifierSession, "take_step", 10)


@pytest.fixture(scope="module")
def stopped(tmp_path_factory) -> dict[str, Path]:
    """For each kind an uninterrupted run and, in the same folder, a stopped one."""
    result = {}
    for kind, place in STOPS.items():
        folder = result[kind] = tmp_path_factory.mktemp(kind)
        KINDS[kind](folder / "whole")
        with ctrl_c(*place):
            KINDS[kind](folder / "stopped")
    return result


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def flip(path: Path) -> None:
    """Flip a bit in the middle of the weights, which no file format notices."""
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


DAMAGES = {
    "language": [
        "model",
        "config",
        "optimizer",
        "scheduler",
        "rng_state",
        "trainer_state",
        "manif",
    ],
    "classifier": ["training_state", "manifest"],
}


@pytest.mark.parametrize("how", [cut, flip, Path.unlink])
@pytest.mark.parametrize(("kind", "start"), [(k, name) for k in DAMAGES for name in DAMAGES[k]])
def test_a_damaged_checkpoint_is_passed_over(kind, start, how, stopped, tmp_path, caplog):
    run = tmp_path / "run"
    shutil.copytree(stopped[kind] / "stopped", run)
    checkpoints = (run / "checkpoints").iterdir()
    earlier, newest = sorted(checkpoints, key=lambda path: int(path.name.split("-")[1]))
    (damaged,) = newest.glob(f"{start}*")
    how(damaged)
    if how is flip and start in ("model", "training_state"):
        KINDS[kind](run, resume=True)
        check_same_weights(run, stopped[kind] / "whole")
    else:
        assert RunDirectory(run, {}).newest_checkpoint() == earlier
    assert f"{newest} is damaged or incomplete; using an earlier one" in caplog.text


def test_without_a_whole_checkpoint_a_training_begins_again(stopped, tmp_path, caplog):
    run = tmp_path / "run"
    shutil.copytree(stopped["classifier"] / "stopped", run)
    for checkpoint in (run / "checkpoints").iterdir():
        (checkpoint / "manifest.json").write_text("[]")
    (run / "checkpoints" / "checkpoint-of-mine").mkdir()
    train_one(run, resume=True)
    assert "has no checkpoint; the training starts from the beginning" in caplog.text
    check_same_weights(run, stopped["classifier"] / "whole")


def test_a_second_training_in_one_folder_is_refused(tmp_path):
    busy = pytest.raises(CheckpointError, match="Another process is at work in")
    with only_process_in(tmp_path), busy:
        train_one(tmp_path)
    train_one(tmp_path)
    assert read_training(tmp_path)["finished"]


@pytest.mark.parametrize("content", ["", "{", "[1]", "\xff"])
def test_damaged_settings_are_named(content, tmp_path):
    (tmp_path / "training.json").write_text(content, encoding="utf-16")
    with pytest.raises(CheckpointError, match=r"training.json (is damaged|holds a)"):
        train_one(tmp_path, resume=True)


@pytest.mark.parametrize("kind", STOPS)
def test_trainings_in_threads_of_one_process_agree(kind, stopped, tmp_path):
    before, runs = torch.get_rng_state(), [tmp_path / "a", tmp_path / "b"]
    with ThreadPoolExecutor(2) as threads:
        list(threads.map(KINDS[kind], runs))
    assert torch.equal(torch.get_rng_state(), before)
    expected = (stopped[kind] / "whole" / "model.safetensors").read_bytes()
    assert all((run / "model.safetensors").read_bytes() == expected for run in runs)


def test_what_a_failed_block_leaves_unfinished_is_removed(tmp_path):
    with pytest.raises(ZeroDivisionError), only_process_in(tmp_path):
        (tmp_path / ".unfinished-checkpoints").mkdir()
        (tmp_path / ".unfinished-checkpoints" / "file").touch()
        1 / 0  # noqa: B018
    assert [path.name for path in tmp_path.iterdir()] == [".lock"]
