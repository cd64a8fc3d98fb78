"""Every training sends its tracker the numbers of metrics.jsonl."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from importlib.util import find_spec

import pytest
from accelerate import tracking

from bilens.errors import BilensError
from bilens.nn import ClassifierConfig
from bilens.train import ClassifierTraining, train_classifier, train_classifiers
from bilens.train.language import train_language
from bilens.train.run_directory import read_metrics
from bilens.train.settings import LanguageTraining
from tests.models import digits, small_config, small_corpus

TRAINING = ClassifierTraining(epochs=2, report_to="tensorboard")
CONFIG = ClassifierConfig(64, 10, 8, 1, image_shape=(8, 8))


class Notes:
    made: list["Notes"] = []  # noqa: RUF012

    def __init__(self, project, logging_dir):
        self.folder, self.told, self.events = logging_dir / project, [], []
        Notes.made.append(self)

    def start(self):
        self.events.append("start")

    def store_init_configuration(self, values):
        self.settings = values

    def log(self, values, step):
        self.told.append((step, dict(values)))

    def finish(self):
        self.events.append("finish")


@pytest.fixture
def notes(monkeypatch):
    monkeypatch.setattr("bilens.train.run_directory.find_spec", lambda name: name)
    monkeypatch.setitem(tracking.LOGGER_TYPE_TO_CLASS, "tensorboard", Notes)
    monkeypatch.setattr(Notes, "made", [])
    return Notes


def test_a_classifier_tells_its_tracker(notes, tmp_path):
    train_classifier(CONFIG, digits(), TRAINING, tmp_path)
    (tracker,) = notes.made
    assert tracker.told == [(record["epoch"], record) for record in read_metrics(tmp_path)]
    assert tracker.events == ["start", "finish"]
    assert tracker.folder == tmp_path / "tensorboard"
    assert tracker.settings["data"] == "digits"
    train_classifier(CONFIG, digits(), TRAINING, tmp_path, resume=True)
    assert len(notes.made) == 1


def test_seeds_have_a_tracker_each(notes, tmp_path):
    train_classifiers(CONFIG, digits(), TRAINING, [1, 2], tmp_path)
    assert [tracker.folder.parent.name for tracker in notes.made] == ["seed-1", "seed-2"]
    assert all(len(tracker.told) == 2 for tracker in notes.made)


def test_a_language_model_tells_its_tracker(notes, tmp_path):
    training = LanguageTraining(batch_size=8, epochs=1, log_every=2, report_to="tensorboard")
    train_language(small_config(), small_corpus(), training, tmp_path, use_cpu=True)
    (tracker,) = notes.made
    assert tracker.told == [(record["step"], record) for record in read_metrics(tmp_path)]


def test_a_tracker_that_is_not_installed_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr("bilens.train.run_directory.find_spec", lambda name: None)
    with pytest.raises(BilensError, match="report_to='trackio' needs the package trackio: pip ins"):
        train_classifier(CONFIG, digits(), replace(TRAINING, report_to="trackio"), tmp_path / "new")
    assert not (tmp_path / "new").exists()


FILES = {"tensorboard": "*tfevents*", "wandb": "*.wandb", "trackio": "*.db*"}


@pytest.mark.parametrize("name", FILES)
def test_the_real_trackers(name, tmp_path):
    """Two offline runs at once print nothing into the JSON."""
    if not find_spec(name):
        pytest.skip(f"pip install {name}")
    command = "-m bilens train images --d-model 4 --epochs 2 --seeds 2 --output run --json"
    words = [sys.executable, *command.split(), "--report-to", name]
    where = {**os.environ, "WANDB_MODE": "offline", "TRACKIO_DIR": str(tmp_path / "trackio")}
    shown = subprocess.check_output(words, cwd=tmp_path, env=where)
    assert list(json.loads(shown)["runs"]) == ["run/seed-0", "run/seed-1"]
    assert any(b"train_loss" in path.read_bytes() for path in tmp_path.rglob(FILES[name]))
