"""Kill a training at its file operations, resume it, and compare with an uninterrupted one.

Run as `python -m tests.train.kill_attack EVERY FOLDER KIND ...`; see test_kills.py. Each try is a
fork of this process, which has imported everything that a training needs by training once.
"""

import gc
import json
import os
import signal
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch

from bilens.data import load_images
from bilens.files import UNFINISHED
from bilens.nn import ClassifierConfig
from bilens.train import ClassifierTraining, train_classifier, train_classifiers
from bilens.train.language import train_language
from bilens.train.linearise import anneal
from bilens.train.run_directory import is_begun, read_metrics
from bilens.train.settings import LanguageTraining
from tests.models import small_config, small_corpus
from tests.train.runs import timeless
from tests.train.test_anneal import TRAINING as ANNEALING
from tests.train.test_anneal import corpus, fresh

torch.set_num_threads(1)  # so that a fork has all threads that there are
EVENTS = {"os.rename", "os.remove", "os.rmdir", "os.mkdir", "os.truncate"}
DIGITS = load_images("digits")
CLASSIFIER = ClassifierConfig(64, 10, d_model=8, image_shape=(8, 8))
THREE_EPOCHS = ClassifierTraining(epochs=3, batch_size=400, input_noise=0.3)
WORDS = LanguageTraining(epochs=2, batch_size=8, learning_rate=1e-2, save_every=3, log_every=4)


def train_one(run: Path, *, resume: bool = False) -> None:
    train_classifier(CLASSIFIER, DIGITS, THREE_EPOCHS, run, resume=resume)


def train_two(run: Path, *, resume: bool = False) -> None:
    resume = any(is_begun(run / f"seed-{seed}") for seed in (0, 1))
    train_classifiers(CLASSIFIER, DIGITS, THREE_EPOCHS, [0, 1], run, resume=resume)


def train_words(run: Path, *, resume: bool = False) -> None:
    train_language(small_config(), small_corpus(), WORDS, run, resume=resume, use_cpu=True)


def train_annealed(run: Path, *, resume: bool = False) -> None:
    anneal(fresh(), corpus(), ANNEALING, run, resume=resume, use_cpu=True)


KINDS: dict[str, Callable[..., None]] = {"classifier": train_one, "seeds": train_two}
KINDS |= {"language": train_words, "anneal": train_annealed}


def in_a_fork(call: Callable[[], object]) -> int:
    """Return the exit status of a fork that makes the call and no other cleaning up."""
    child = os.fork()
    if child == 0:
        try:
            call()
        except BaseException as error:
            sys.stderr.write(f"{type(error).__name__}: {error}\n")
            os._exit(1)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def watch(run: Path, act: Callable[[int], object]) -> None:
    """Call `act` with the number of each operation that changes files of the run, before it."""
    count = 0

    def hook(event: str, details: tuple[object, ...]) -> None:
        nonlocal count
        writes = event == "open" and bool(int(details[2] or 0) & (os.O_WRONLY | os.O_RDWR))
        # What shutil.rmtree removes it names by a folder that it has open.
        place = str(details[0]) if writes or event in EVENTS else str(run.parent)
        if f"{run}/" in f"{place}/" or not Path(place).is_absolute():
            count += 1
            act(count)

    sys.addaudithook(hook)


def differences(run: Path, full: Path) -> list[str]:
    """List the results of a training that differ from those of an uninterrupted one."""
    different = [f"{path} is left over" for path in run.rglob(f"{UNFINISHED}*")]
    for path in (*full.rglob("metrics.jsonl"), *full.rglob("model.safetensors")):
        place = path.relative_to(full)
        if "checkpoints" not in place.parts and content(run / place) != content(path):
            different.append(str(place))
    return different


def content(path: Path) -> object:
    of_metrics = path.name == "metrics.jsonl"
    return timeless(read_metrics(path.parent)) if of_metrics else path.read_bytes()


def main(kind: str, every: int, folder: Path) -> dict[str, object]:
    train = KINDS[kind]
    full, counted, log = folder / "full", folder / "counted", folder / "count"
    train(full)
    # Trainings ask for collections, which do not walk through what was imported until here.
    gc.collect()
    gc.freeze()

    def count_operations() -> None:
        watch(counted, lambda number: log.write_text(str(number)))
        train(counted)

    def killed(run: Path, number: int) -> None:
        watch(run, lambda count: count == number and os.kill(os.getpid(), signal.SIGKILL))
        train(run)

    assert in_a_fork(count_operations) == 0
    points = int(log.read_text())
    failures, tried = [], range(1, points + 1, every)
    for number in tried:
        with tempfile.TemporaryDirectory(dir=folder) as name:
            run = Path(name) / "run"
            status = in_a_fork(partial(killed, run, number))
            if status != -signal.SIGKILL:
                failures.append(f"{number}: not killed but ended with {status}")
            elif in_a_fork(lambda run=run: train(run, resume=is_begun(run))):
                failures.append(f"{number}: could not go on")
            elif different := differences(run, full):
                failures.append(f"{number}: {different}")
    return {"points": points, "tried": len(tried), "failures": failures}


def write_outcomes(every: int, folder: Path, *kinds: str) -> None:
    outcomes = {kind: main(kind, every, folder / kind) for kind in kinds}
    (folder / "outcomes.json").write_text(json.dumps(outcomes))


if __name__ == "__main__":
    number, place, *names = sys.argv[1:]
    write_outcomes(int(number), Path(place), *names)
