"""Train an image classifier: the whole set on the device, nothing between it and the products."""

import json
import math
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from bilens.data import ImageData
from bilens.errors import BilensError
from bilens.files import write_text
from bilens.nn import ClassifierConfig, ImageClassifier
from bilens.progress import progress_bar
from bilens.train.interrupt import interrupt_between_steps
from bilens.train.noise import noisy
from bilens.train.state import TrainingState

__all__ = ["METRICS_NAME", "ClassifierTraining", "train_classifier"]

METRICS_NAME = "metrics.jsonl"
"""The file in a run with a line of metrics for each epoch."""


@dataclass(frozen=True)
class ClassifierTraining:
    """How to train an image classifier. The defaults are Table 2 of Pearce et al. 2024.

    Attributes:
        epochs: passes over the training set.
        batch_size: images in a step.
        learning_rate: of AdamW in the first epoch.
        decay: factor on the learning rate after each epoch.
        weight_decay: of AdamW; the paper takes 0.5 for MNIST and 1.0 for Fashion-MNIST.
        input_noise: Gaussian noise on the pixels, in standard deviations of the image's pixels.
        latent_noise: the same before the embedding, every layer and the unembedding, in standard
            deviations of the vector's elements.
        seed: of the initial weights, the order of the images and the noise.
    """

    epochs: int = 20
    batch_size: int = 100
    learning_rate: float = 1e-3
    decay: float = 0.85
    weight_decay: float = 0.5
    input_noise: float = 1.0
    latent_noise: float = 0.0
    seed: int = 0

    def __post_init__(self) -> None:
        for name, least in (("epochs", 1), ("batch_size", 1), ("seed", 0)):
            if getattr(self, name) < least:
                raise BilensError(f"{name}={getattr(self, name)}, expected at least {least}")
        for name in ("learning_rate", "decay"):
            if not getattr(self, name) > 0:
                raise BilensError(f"{name}={getattr(self, name)}, expected more than 0")
        for name in ("weight_decay", "input_noise", "latent_noise"):
            if not getattr(self, name) >= 0:
                raise BilensError(f"{name}={getattr(self, name)}, expected 0 or more")


def train_classifier(
    config: ClassifierConfig,
    data: ImageData,
    training: ClassifierTraining,
    run: Path | None = None,
    *,
    resume: bool = False,
) -> tuple[ImageClassifier, list[dict[str, Any]]]:
    """Train a classifier on `data`, which stays on its device as one tensor.

    With a `run` directory, the model (loadable at any time), the settings, the metrics of each
    epoch and the state of the training are written after every epoch, and when ctrl-C stops the
    training between two steps. A resumed training ends with the same bits as one that was never
    stopped.

    Args:
        config: what to train.
        data: images and labels.
        training: how to train it.
        run: the directory to write to; None keeps everything in memory.
        resume: go on from the state in `run`.

    Returns:
        The trained model in evaluation mode, and one record of metrics for each epoch.

    Raises:
        BilensError: the data does not fit the model, or the loss is no longer finite.
        CheckpointError: `resume` finds nothing it can go on from.
        KeyboardInterrupt: ctrl-C, after everything was saved.
    """
    if data.n_inputs != config.n_inputs or data.n_classes != config.n_classes:
        raise BilensError(
            f"data {data.name!r} has {data.n_inputs} pixels and {data.n_classes} classes; the "
            f"model reads {config.n_inputs} and tells {config.n_classes} apart"
        )
    if resume and run is None:
        raise BilensError("resume=True needs the run directory to resume from")
    session = _Session(config, data, training, run)
    if resume:
        session.load()
    model, place, noise = session.model, session.place, session.state.generator
    with (
        progress_bar() as bar,
        interrupt_between_steps() as interrupt,
        noisy(model, training.input_noise, training.latent_noise, noise),
    ):
        steps = -(-len(data.train_labels) // training.batch_size)
        task = bar.add_task(
            "training",
            total=steps * training.epochs,
            completed=steps * place.epoch + place.step,
            note="",
        )
        while place.epoch < training.epochs:
            for _ in session.steps_of_epoch():
                bar.advance(task)
                if interrupt.requested:
                    session.save()
                    raise KeyboardInterrupt
            record = session.finish_epoch()
            session.save()
            note = f"loss {record['train_loss']:.4f}, test accuracy {record['test_accuracy']:.2%}"
            bar.update(task, note=note)
    return model.eval(), place.history


@dataclass
class _Place:
    """Where a training stands.

    Attributes:
        epoch: epochs finished.
        step: steps finished in the epoch that is under way.
        loss_sum: of the steps of that epoch.
        correct: samples of that epoch classified correctly while training.
        seconds: time spent in the unfinished epoch so far.
        history: one record of metrics for each finished epoch.
    """

    epoch: int
    step: int
    loss_sum: Tensor
    correct: Tensor
    seconds: float
    history: list[dict[str, Any]]


class _Session:
    """The moving parts of one training, and how they are saved."""

    def __init__(
        self,
        config: ClassifierConfig,
        data: ImageData,
        training: ClassifierTraining,
        run: Path | None,
    ) -> None:
        device = data.train_images.device
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(training.seed)
            self.model = ImageClassifier(config).to(device)
        self.data, self.training, self.run = data, training, run
        optimizer = torch.optim.AdamW(
            self.model.parameters(), weight_decay=training.weight_decay, fused=True
        )
        generator = torch.Generator(device).manual_seed(training.seed)
        settings = {"data": data.name, **asdict(training), "model": asdict(config)}
        settings = json.loads(json.dumps(settings))
        self.state = TrainingState(self.model, optimizer, generator, settings, "epochs")
        zero = torch.zeros((), dtype=torch.float64, device=device)
        self.place = _Place(0, 0, zero, zero.clone(), 0.0, [])

    def load(self) -> None:
        assert self.run is not None
        self.place = _Place(**self.state.load(self.run))

    def save(self) -> None:
        if self.run is None:
            return
        self.model.save_files(self.run)
        lines = (json.dumps(record) + "\n" for record in self.place.history)
        write_text(self.run / METRICS_NAME, "".join(lines))
        self.state.save(self.run, vars(self.place))

    def steps_of_epoch(self) -> Iterator[None]:
        """Do what is left of the epoch under way, giving control back after each step."""
        place, training, images = self.place, self.training, self.data.train_images
        self.model.train()
        for group in self.state.optimizer.param_groups:
            group["lr"] = training.learning_rate * training.decay**place.epoch
        # The order depends on nothing but the seed and the epoch: a resumed epoch finds it again.
        order = torch.Generator(images.device).manual_seed(_mix(training.seed, place.epoch))
        batches = torch.randperm(len(images), generator=order, device=images.device)
        for batch in torch.split(batches, training.batch_size)[place.step :]:
            start = time.perf_counter()
            self._step(images.index_select(0, batch), self.data.train_labels.index_select(0, batch))
            place.step += 1
            place.seconds += time.perf_counter() - start
            yield

    def _step(self, x: Tensor, labels: Tensor) -> None:
        logits = self.model(x)
        loss = functional.cross_entropy(logits, labels)
        self.state.optimizer.zero_grad()
        loss.backward()
        self.state.optimizer.step()
        with torch.no_grad():
            self.place.loss_sum.add_(loss, alpha=len(labels))
            self.place.correct.add_((logits.argmax(-1) == labels).sum())

    def finish_epoch(self) -> dict[str, Any]:
        """Measure, record and move on to the next epoch."""
        place, data = self.place, self.data
        seen = len(data.train_labels)
        loss = float(place.loss_sum) / seen
        if not math.isfinite(loss):
            raise BilensError(
                f"The loss became {loss} in epoch {place.epoch + 1}. Lower the learning rate "
                f"(now {self.training.learning_rate}), or check the data for NaN."
            )
        self.model.eval()
        record = {
            "epoch": place.epoch + 1,
            "train_loss": loss,
            "train_accuracy": float(place.correct) / seen,
            "test_accuracy": self.model.accuracy(data.test_images, data.test_labels),
            "learning_rate": self.state.optimizer.param_groups[0]["lr"],
            "train_seconds": round(place.seconds, 3),
        }
        place.history.append(record)
        place.epoch, place.step, place.seconds = place.epoch + 1, 0, 0.0
        place.loss_sum.zero_()
        place.correct.zero_()
        return record


def _mix(seed: int, epoch: int) -> int:
    """One number for both, different from the seeds in use for weights and noise."""
    return (seed * 1_000_003 + epoch + 1) % 2**63
