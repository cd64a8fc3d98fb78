"""A training that is killed, or whose checkpoints are damaged, resumes to the same end."""

import json
import shutil
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from bilens.errors import CheckpointError
from bilens.train import ClassifierTraining, classifier, train_classifier, trainer
from bilens.train.language import train_language
from bilens.train.run_directory import RunDirectory, only_process_in, read_training
from bilens.train.settings import LanguageTraining
from tests.command_line import run_python
from tests.models import digits, small_config, small_corpus
from tests.train.kill_attack import KINDS
from tests.train.runs import check_same_weights, press_ctrl_c
from tests.train.test_classifier import CONFIG

WORDS = LanguageTraining(epochs=2, batch_size=8, learning_rate=1e-2, save_every=2, log_every=3)
IMAGES = ClassifierTraining(epochs=4, batch_size=200, input_noise=0.3)


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


def train_words(run: Path, *, resume: bool = False) -> None:
    train_language(small_config(), small_corpus(), WORDS, run, resume=resume, use_cpu=True)


def train_images(run: Path, *, resume: bool = False) -> None:
    train_classifier(CONFIG, digits(), IMAGES, run, resume=resume)


@pytest.fixture(scope="module")
def stopped(tmp_path_factory) -> dict[str, Path]:
    """For each kind an uninterrupted run and, in the same folder, a stopped one."""
    result = {}
    places = {"words": (train_words, trainer, "collate", 8)}
    places["images"] = (train_images, classifier._ClassifierSession, "take_step", 29)
    for kind, (train, *place) in places.items():
        folder = result[kind] = tmp_path_factory.mktemp(kind)
        train(folder / "whole")
        with pytest.MonkeyPatch.context() as patch:
            press_ctrl_c(patch, *place)
            with pytest.raises(KeyboardInterrupt):
                train(folder / "stopped")
    return result


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def flip(path: Path) -> None:
    """Flip a bit in the middle of the weights, which no file format notices."""
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


DAMAGES = {
    "words": ["model", "config", "optimizer", "scheduler", "rng_state", "trainer_state", "manif"],
    "images": ["training_state", "manifest"],
}


@pytest.mark.parametrize("how", [cut, flip, Path.unlink])
@pytest.mark.parametrize(("kind", "start"), [(k, name) for k in DAMAGES for name in DAMAGES[k]])
def test_a_damaged_checkpoint_is_passed_over(kind, start, how, stopped, tmp_path, caplog):
    run, train = tmp_path / "run", {"words": train_words, "images": train_images}[kind]
    shutil.copytree(stopped[kind] / "stopped", run)
    steps = [int(path.name.split("-")[1]) for path in (run / "checkpoints").iterdir()]
    newest = run / "checkpoints" / f"checkpoint-{max(steps)}"
    (damaged,) = newest.glob(f"{start}*")
    how(damaged)
    if how is flip and start in ("model", "training_state"):
        train(run, resume=True)
        check_same_weights(run, stopped[kind] / "whole")
    else:
        result = RunDirectory(run, {}).newest_checkpoint()
        assert result == run / "checkpoints" / f"checkpoint-{min(steps)}"
    assert f"{newest} is damaged or incomplete; using an earlier one" in caplog.text


def test_without_a_whole_checkpoint_a_training_begins_again(stopped, tmp_path, caplog):
    run = tmp_path / "run"
    shutil.copytree(stopped["images"] / "stopped", run)
    for checkpoint in (run / "checkpoints").iterdir():
        (checkpoint / "manifest.json").write_text("[]")
    (run / "checkpoints" / "checkpoint-of-mine").mkdir()
    train_images(run, resume=True)
    assert "has no checkpoint; the training starts from the beginning" in caplog.text
    check_same_weights(run, stopped["images"] / "whole")


def test_a_second_training_in_one_folder_is_refused(tmp_path):
    with (
        only_process_in(tmp_path),
        pytest.raises(CheckpointError, match="Another process is at work in"),
    ):
        train_images(tmp_path)
    train_images(tmp_path)
    assert read_training(tmp_path)["finished"]


@pytest.mark.parametrize("content", ["", "{", "[1]", "\xff"])
def test_damaged_settings_are_named(content, tmp_path):
    (tmp_path / "training.json").write_text(content, encoding="utf-16")
    with pytest.raises(CheckpointError, match=r"training.json (is damaged|holds a)"):
        train_images(tmp_path, resume=True)


def in_threads(train: Callable[[int], None], threads: int) -> None:
    running = [threading.Thread(target=train, args=(number,)) for number in range(threads)]
    for thread in running:
        thread.start()
    for thread in running:
        thread.join()


@pytest.mark.parametrize("train", [train_images, train_words])
def test_trainings_in_threads_of_one_process_agree(train, stopped, tmp_path):
    before = torch.get_rng_state()
    in_threads(lambda number: train(tmp_path / str(number)), 2)
    assert torch.equal(torch.get_rng_state(), before)
    kind = "words" if train is train_words else "images"
    expected = (stopped[kind] / "whole" / "model.safetensors").read_bytes()
    for number in range(2):
        assert (tmp_path / str(number) / "model.safetensors").read_bytes() == expected


def test_what_a_failed_block_leaves_unfinished_is_removed(tmp_path):
    with pytest.raises(ZeroDivisionError), only_process_in(tmp_path):
        (tmp_path / ".unfinished-checkpoints").mkdir()
        (tmp_path / ".unfinished-checkpoints" / "file").touch()
        1 / 0  # noqa: B018
    assert [path.name for path in tmp_path.iterdir()] == [".lock"]
