"""Train image classifiers, several seeds as one batched model; the data stays on the device."""

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from bilens.checks import checked
from bilens.data import ImageData
from bilens.errors import BilensError, CheckpointError
from bilens.nn import ClassifierConfig, ImageClassifier
from bilens.train.run_directory import is_begun, open_run
from bilens.train.settings import ClassifierTraining
from bilens.train.stacked import Member, train_together

Trained = tuple[ImageClassifier, list[dict[str, Any]]]
"""A model in evaluation mode, and one record of metrics for each epoch."""


@checked
def train_classifier(
    config: ClassifierConfig,
    data: ImageData,
    training: ClassifierTraining,
    run: Path | None = None,
    *,
    resume: bool = False,
) -> Trained:
    """Train a classifier on the device of `data`.

    After every epoch the model, the settings, the metrics and a checkpoint are written to `run`.
    Ctrl-C writes them too, and stops the training between two steps. A resumed training ends with
    the same bits as an uninterrupted one, on one machine with one number of threads.

    Args:
        config: architecture and sizes of the model.
        data: images and labels.
        training: settings of the training.
        run: the directory to write to; None keeps everything in memory.
        resume: resume from the newest intact checkpoint in `run`.

    Returns:
        The trained model in evaluation mode, and one record of metrics for each epoch.

    Raises:
        BilensError: the data does not fit the model, or the training diverged.
        CheckpointError: `run` holds a training and `resume` is False, or no training and it is
            True.
        KeyboardInterrupt: ctrl-C, after everything was saved.
    """
    if resume and run is None:
        raise BilensError("resume=True needs the run directory to resume from")
    return _train(config, data, {training: (run, resume)})[0]


@checked
def train_classifiers(
    config: ClassifierConfig,
    data: ImageData,
    training: ClassifierTraining,
    seeds: Sequence[int],
    run: Path | None = None,
    *,
    resume: bool = False,
) -> list[Trained]:
    """Train the same classifier from several seeds at once, with stacked weights.

    Each model equals the one that `train_classifier` trains from its seed, within rounding. It has
    its own run, `seed-N` in `run`, that can be resumed by itself. Raises as `train_classifier`, and
    for repeated seeds.

    Args:
        config: architecture and sizes of the models.
        data: images and labels.
        training: settings of the training, except for the seed.
        seeds: one for each model.
        run: the directory to write to; None keeps everything in memory.
        resume: resume the seeds that were begun in `run`, and begin the others.
    """
    if not seeds or len(set(seeds)) < len(seeds):
        raise BilensError(f"seeds={list(seeds)}, expected at least one and none of them twice")
    runs: dict[ClassifierTraining, tuple[Path | None, bool]] = {}
    for seed in seeds:
        folder = None if run is None else run / f"seed-{seed}"
        runs[replace(training, seed=seed)] = (folder, folder is not None and is_begun(folder))
    begun = [folder for folder, there in runs.values() if there]
    if resume and not begun:
        raise CheckpointError(
            f"Nothing to resume in {run}: none of these seeds was begun there. Train without "
            "--resume."
        )
    if not resume:
        runs = {settings: (folder, False) for settings, (folder, _) in runs.items()}
    return _train(config, data, runs)


def _train(
    config: ClassifierConfig,
    data: ImageData,
    runs: dict[ClassifierTraining, tuple[Path | None, bool]],
) -> list[Trained]:
    if data.n_inputs != config.n_inputs or data.n_classes != config.n_classes:
        raise BilensError(
            f"data {data.name!r} has {data.n_inputs} pixels and {data.n_classes} classes; the "
            f"model reads {config.n_inputs} and tells {config.n_classes} apart"
        )
    with ExitStack() as stack:
        members = []
        for training, (path, resume) in runs.items():
            settings = {"data": data.name, **asdict(training), "model": asdict(config)}
            run = None
            if path is not None:
                opened = open_run(path, settings, resume=resume, length="epochs")
                run = stack.enter_context(opened)
            members.append(Member(config, training, data.train_images.device, run))
            if resume:
                members[-1].load()
            if run is not None and not run.finished:
                run.start_metrics(members[-1].place.history)
        # A kill between two checkpoints leaves seeds at different places; equals are stacked.
        together: dict[tuple[int, int], list[Member]] = {}
        for member in members:
            together.setdefault((member.place.epoch, member.place.step), []).append(member)
        for group in together.values():
            train_together(group, data)
    return [(member.model.eval(), member.place.history) for member in members]
