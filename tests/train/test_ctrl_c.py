"""Ctrl-C at any moment of a training, and `resume` ends where an uninterrupted training ends.

The signal comes from another thread, so it falls into a step, between two, or into the writing of a
checkpoint. `test_kills` has the same for processes that are killed.
"""

import os
import signal
import threading
import time
from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from bilens.nn import AutoencoderConfig
from bilens.train import (
    AutoencoderTraining,
    ClassifierTraining,
    is_begun,
    is_finished,
    row_sampler,
    train_autoencoder,
    train_classifier,
    train_classifiers,
)
from bilens.train.language import train_language
from bilens.train.settings import LanguageTraining
from tests.language import small_config, small_corpus
from tests.models import digits
from tests.nightly import nightly
from tests.train.test_classifier import CONFIG

IMAGES = ClassifierTraining(epochs=6, batch_size=20, input_noise=0.3)
WORDS = LanguageTraining(epochs=6, batch_size=4, learning_rate=1e-2, save_every=5)
FEATURES = AutoencoderTraining(steps=600, batch_size=64)


def train_images(run: Path, *, resume: bool) -> None:
    train_classifier(CONFIG, digits(), IMAGES, run, resume=resume)


def train_seeds(run: Path, *, resume: bool) -> None:
    train_classifiers(CONFIG, digits(), IMAGES, [3, 4], run, resume=resume)


def train_words(run: Path, *, resume: bool) -> None:
    train_language(small_config(), small_corpus(), WORDS, run, resume=resume, use_cpu=True)


def train_features(run: Path, *, resume: bool) -> None:
    rows = torch.randn(200, 16, generator=torch.Generator().manual_seed(0))
    config = AutoencoderConfig(16, 32)
    train_autoencoder(config, row_sampler(rows), FEATURES, run, resume=resume)


@contextmanager
def ctrl_c_after(seconds: float):
    """Press ctrl-C once, from another thread, unless the training is over by then."""
    over = threading.Event()

    def press() -> None:
        if not over.wait(seconds):
            os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=press)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def weights(run: Path) -> list[torch.Tensor]:
    files = sorted(run.glob("**/model.safetensors"))
    files = [file for file in files if "checkpoint" not in str(file)]
    return [tensor for file in files for _, tensor in sorted(load_file(file).items())]


@pytest.mark.parametrize(
    "train",
    nightly([train_images, train_seeds, train_words, train_features], [train_images, train_words]),
)
def test_ctrl_c_in_the_middle_loses_nothing(train: Callable[..., None], tmp_path):
    start = time.monotonic()
    train(tmp_path / "whole", resume=False)
    duration = time.monotonic() - start
    run = tmp_path / "stopped"
    # The second time may be quicker, but not by so much.
    with pytest.raises(KeyboardInterrupt), ctrl_c_after(0.3 * duration):
        train(run, resume=False)
    runs = sorted(run.iterdir()) if train is train_seeds else [run]
    if not all(map(is_finished, runs)):
        # Before anything was written there is nothing to resume.
        train(run, resume=any(map(is_begun, runs)))
    full = weights(tmp_path / "whole")
    assert full
    assert all(torch.equal(a, b) for a, b in zip(weights(run), full, strict=True))
