"""Train image classifiers; the data stays on its device."""

import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional

from bilens.checks import check_finite, check_weights, checked
from bilens.data import ImageData
from bilens.errors import BilensError, CheckpointError
from bilens.hooks import hooked
from bilens.nn import ClassifierConfig, ImageClassifier
from bilens.progress import logger, progress_bar
from bilens.train.run_directory import (
    RunDirectory,
    check_free,
    interrupt_between_steps,
    is_begun,
    open_run,
    part,
)
from bilens.train.settings import ClassifierTraining


def add_noise(
    x: Float[Tensor, "*batch n"], scale: float, generator: torch.Generator
) -> Float[Tensor, "*batch n"]:
    """Add Gaussian noise of `scale` times the standard deviation of each vector's elements.

    Source: Pearce et al. 2024 (first version), appendix A.
    """
    centred = x.detach() - x.detach().mean(dim=-1, keepdim=True)
    # torch.std takes ten times as long on a CPU.
    length = torch.linalg.vector_norm(centred, dim=-1, keepdim=True)
    deviation = length / max(x.shape[-1] - 1, 1) ** 0.5
    noise = torch.empty_like(x).normal_(generator=generator)
    return torch.addcmul(x, noise, scale * deviation)


def latent_noise(
    model: ImageClassifier, scale: float, generator: torch.Generator
) -> AbstractContextManager[None]:
    """Add noise to the inputs of embedding, layers and unembedding while the model trains."""

    def add(module: nn.Module, inputs: tuple[Tensor], options: dict[str, Any]) -> Any:
        return ((add_noise(inputs[0], scale, generator),), options) if module.training else None

    # Hooks rather than an argument of the model: the classifier stays free of training code.
    parts = [model.embed, *model.layers, model.unembed] if scale else []
    return hooked(before=[(part, add) for part in parts])


def initialised(config: ClassifierConfig, seed: int) -> ImageClassifier:
    """Return a new model whose weights are drawn from a seed alone."""
    with torch.device("meta"):
        model = ImageClassifier(config)
    model.to_empty(device="cpu")
    model.reset_parameters(torch.Generator().manual_seed(seed))
    return model


class _ClassifierSession:
    """One training of a classifier.

    Its place has the finished epochs, the steps of the current one and their sums: of the losses,
    of the images that were classified correctly, and of the seconds. `history` has a record for
    each finished epoch.
    """

    def __init__(
        self, config: ClassifierConfig, data: ImageData, training: ClassifierTraining
    ) -> None:
        self.data, self.training, device = data, training, data.train_images.device
        self.model: ImageClassifier = initialised(config, training.seed).to(device)
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(), weight_decay=training.weight_decay, fused=True
        )
        # Of all random numbers after the initial weights.
        self.generator = torch.Generator(device).manual_seed(training.seed)
        self.place: dict[str, Any] = {"epoch": 0, "step": 0, "history": []}
        self.place |= {"loss": 0.0, "correct": 0, "seconds": 0.0}
        self.noise_size = training.input_noise * data.train_images.std(-1, keepdim=True)
        self.steps = -(-len(data.train_labels) // training.batch_size)

    def steps_of_epoch(self) -> Iterator[None]:
        """Train to the end of the current epoch, and yield after each step."""
        place, training, images = self.place, self.training, self.data.train_images
        for group in self.optimizer.param_groups:
            group["lr"] = training.learning_rate * training.decay ** place["epoch"]
        # A function of seed and epoch only, so that a resumed epoch has the same order.
        seed = (training.seed * 1_000_003 + place["epoch"] + 1) % 2**63
        generator = torch.Generator(images.device).manual_seed(seed)
        order = torch.randperm(len(images), generator=generator, device=images.device)
        # Sums stay on the device: reading them at each step would wait for the GPU.
        self.loss = torch.tensor(place["loss"], device=images.device)
        self.correct = torch.tensor(place["correct"], device=images.device)
        self.model.train()
        for indices in order.split(training.batch_size)[place["step"] :]:
            start = time.perf_counter()
            self.take_step(indices)
            place["step"] += 1
            place["seconds"] += time.perf_counter() - start
            yield
        self.model.eval()

    def take_step(self, indices: Tensor) -> None:
        """Take a step of the optimizer on some of the training images."""
        x, labels = self.data.train_images[indices], self.data.train_labels[indices]
        if self.training.input_noise:
            noise = torch.empty_like(x).normal_(generator=self.generator)
            x.addcmul_(noise, self.noise_size[indices])
        logits = self.model(x)
        entropies = functional.cross_entropy(logits, labels, reduction="none")
        self.optimizer.zero_grad()
        entropies.mean().backward()
        self.optimizer.step()
        with torch.no_grad():
            self.loss += entropies.sum()
            self.correct += (logits.argmax(-1) == labels).sum()

    def finish_epoch(self) -> dict[str, Any]:
        """Measure, record and move on to the next epoch."""
        place, training, count = self.place, self.training, len(self.data.train_labels)
        with self.divergence_errors():
            check_weights(self.model)
            check_finite(loss=self.loss)
            accuracy = self.model.accuracy(self.data.test_images, self.data.test_labels)
        record = {
            "epoch": place["epoch"] + 1,
            "train_loss": float(self.loss) / count,
            "train_accuracy": int(self.correct) / count,
            "test_accuracy": accuracy,
            "learning_rate": training.learning_rate * training.decay ** place["epoch"],
            "train_seconds": round(place["seconds"], 3),
        }
        place["history"].append(record)
        place.update(epoch=place["epoch"] + 1, step=0, loss=0.0, correct=0, seconds=0.0)
        return record

    def load(self, run: RunDirectory) -> None:
        """Resume from the newest checkpoint, if any."""
        state = run.load_state(self.model.device)
        if state is None:
            return
        self.place, tensors = state
        self.model.load_state_dict(part(tensors, "model"))
        for name, weight in self.model.named_parameters():
            self.optimizer.state[weight] = part(tensors, f"optimizer.{name}")
        self.generator.set_state(tensors["generator.state"].cpu())

    def save(self, run: RunDirectory) -> None:
        """Write the model, then a checkpoint."""
        place, slots = self.place, {}
        with self.divergence_errors():
            check_weights(self.model)
        if place["step"]:
            place.update(loss=float(self.loss), correct=int(self.correct))
        self.model.save_files(run.path)
        self.model.source = run.path
        for name, weight in self.model.named_parameters():
            for slot, value in self.optimizer.state[weight].items():
                slots[f"{name}.{slot}"] = value
        run.save_state(
            self.steps * place["epoch"] + place["step"],
            place,
            model=self.model.state_dict(),
            optimizer=slots,
            generator={"state": self.generator.get_state()},
        )

    @contextmanager
    def divergence_errors(self) -> Iterator[None]:
        """Name the training in errors of numbers that are not finite."""
        try:
            yield
        except BilensError as error:
            raise BilensError(
                f"The loss became infinite or NaN in epoch {self.place['epoch'] + 1} of seed "
                f"{self.training.seed}. Lower the learning rate (now "
                f"{self.training.learning_rate}), or check the data for NaN."
            ) from error


Trained = tuple[ImageClassifier, list[dict[str, Any]]]
"""A model in evaluation mode, and one record of metrics for each epoch."""


@checked
def train_classifier(
    config: ClassifierConfig,
    data: ImageData,
    training: ClassifierTraining,
    run: str | Path | None = None,
    *,
    resume: bool = False,
) -> Trained:
    """Train a classifier on the device of `data`.

    After every epoch the model, the settings, the metrics and a checkpoint are written to `run`.
    Ctrl-C writes them too, and stops the training between two steps. A resumed training ends with
    the same bits as an uninterrupted one, on one machine with one number of threads. A model that
    cannot be told from chance is reported.

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
    if data.n_inputs != config.n_inputs or data.n_classes != config.n_classes:
        raise BilensError(
            f"data {data.name!r} has {data.n_inputs} pixels and {data.n_classes} classes; the "
            f"model reads {config.n_inputs} and tells {config.n_classes} apart"
        )
    settings = {**data.provenance, **asdict(training), "model": asdict(config)}
    with ExitStack() as stack:
        directory = None
        if run is not None:
            context = open_run(Path(run), settings, resume=resume, length="epochs")
            directory = stack.enter_context(context)
        session = _ClassifierSession(config, data, training)
        if directory is not None and resume:
            session.load(directory)
        if directory is None or not directory.finished:
            _train(session, directory)
    return session.model.eval(), session.place["history"]


def _train(session: _ClassifierSession, run: RunDirectory | None) -> None:
    place, epochs, steps = session.place, session.training.epochs, session.steps
    if run is not None:
        run.start_metrics(place["history"])
    noise = latent_noise(session.model, session.training.latent_noise, session.generator)
    bar = progress_bar("training", total=steps * epochs)
    with bar, interrupt_between_steps() as interrupt, noise:
        bar.initial = bar.n = steps * place["epoch"] + place["step"]
        while place["epoch"] < epochs:
            for _ in session.steps_of_epoch():
                bar.update()
                if interrupt.is_set():
                    if run is not None:
                        session.save(run)
                    raise KeyboardInterrupt
            record = session.finish_epoch()
            if run is not None:
                run.add_metrics(record)
                session.save(run)
            loss, accuracy = record["train_loss"], record["test_accuracy"]
            bar.set_postfix_str(f"loss {loss:.4f}, test accuracy {accuracy:.2%}", refresh=False)
    if run is not None:
        run.finish()
    _report_chance(session.data, session.training, place["history"][-1]["test_accuracy"])


def _report_chance(data: ImageData, training: ClassifierTraining, accuracy: float) -> None:
    """Say so if a model cannot be told from one that always names the most frequent class."""
    if data.is_chance(accuracy):
        (name, chance), images = data.commonest, len(data.test_labels)
        steps = training.epochs * -(-len(data.train_labels) // training.batch_size)
        logger.warning(
            f"Test accuracy {accuracy:.2%} cannot be told from chance with {images:,} images "
            f"(always {name!r} has {chance:.2%}). Train for more than these {steps:,} steps "
            f"(epochs={training.epochs}, batch_size={training.batch_size}), with a slower decay "
            f"({training.decay}), less input_noise ({training.input_noise}) or weight_decay "
            f"({training.weight_decay}), or with norm='scalar' if the model has many layers."
        )


@checked
def train_classifiers(
    config: ClassifierConfig,
    data: ImageData,
    training: ClassifierTraining,
    seeds: Sequence[int],
    run: str | Path | None = None,
    *,
    resume: bool = False,
) -> list[Trained]:
    """Train the same classifier from several seeds, one after the other; see `train_classifier`.

    Each has its own run, `seed-N` in `run`, that can be resumed by itself: `resume` resumes the
    seeds that were begun, and begins the others. Raises as `train_classifier`, and for repeated
    seeds.
    """
    if not seeds or len(set(seeds)) < len(seeds):
        raise BilensError(f"seeds={list(seeds)}, expected at least one and none of them twice")
    folders = [None if run is None else Path(run) / f"seed-{seed}" for seed in seeds]
    exists = [folder is not None and is_begun(folder) for folder in folders]
    if resume and not any(exists):
        raise CheckpointError(
            f"Nothing to resume in {run}: none of these seeds was begun there. Train without "
            "--resume."
        )
    if not resume:  # before the first is trained
        for folder in folders:
            if folder is not None:
                check_free(folder)
    results = []
    for seed, folder, there in zip(seeds, folders, exists, strict=True):
        settings = replace(training, seed=seed)
        results.append(train_classifier(config, data, settings, folder, resume=resume and there))
    return results
