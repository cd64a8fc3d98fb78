"""Train image classifiers, several seeds as one batched model; the data stays on the device.

A small classifier leaves most of the machine idle, since the overhead of each call is larger than
its arithmetic. Stacking n seeds turns n small products into one batched product.
"""

import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from copy import deepcopy
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.func import functional_call, vmap
from torch.nn import functional

from bilens.checks import check_finite, check_weights, checked
from bilens.data import ImageData
from bilens.errors import BilensError, CheckpointError
from bilens.nn import ClassifierConfig, ImageClassifier
from bilens.progress import progress_bar
from bilens.train.run_directory import (
    RunDirectory,
    interrupt_between_steps,
    is_begun,
    open_run,
    part,
)
from bilens.train.settings import ClassifierTraining


def add_noise(
    x: Float[Tensor, "*batch n"], noise: Float[Tensor, "*batch n"], scale: float
) -> Float[Tensor, "*batch n"]:
    """Add standard noise times `scale` times the standard deviation of each vector's elements.

    Source: Pearce et al. 2024 (first version), appendix A.
    """
    centred = x.detach() - x.detach().mean(dim=-1, keepdim=True)
    # torch.std takes ten times as long on a CPU.
    deviation = (
        torch.linalg.vector_norm(centred, dim=-1, keepdim=True) / max(x.shape[-1] - 1, 1) ** 0.5
    )
    return torch.addcmul(x, noise, scale * deviation)


class LatentNoise:
    """Noise on the inputs of embedding, layers and unembedding, active only inside `drawn`."""

    def __init__(self, model: ImageClassifier, scale: float) -> None:
        self.scale = scale
        parts: list[nn.Module] = [model.embed, *model.layers, model.unembed] if scale else []
        self.widths = [model.config.n_inputs, *[model.config.d_model] * len(parts)][: len(parts)]
        self._left: Iterator[Tensor] | None = None
        self._handles = [part.register_forward_pre_hook(self._before) for part in parts]

    def remove(self) -> None:
        """Remove the hooks from the model."""
        for handle in self._handles:
            handle.remove()

    @contextmanager
    def drawn(self, noise: Sequence[Tensor]) -> Iterator[None]:
        """Add this noise inside the block: the first tensor to the first part, and so on."""
        self._left = iter(noise)
        try:
            yield
        finally:
            self._left = None

    def _before(self, module: nn.Module, inputs: tuple[Tensor]) -> tuple[Tensor] | None:
        # A hook rather than an argument of the model: the classifier stays free of training code,
        # and `vmap` maps over the noise as over any other tensor.
        if self._left is None:
            return None
        return (add_noise(inputs[0], next(self._left), self.scale),)


@dataclass
class _Place:
    """Position of a training: finished epochs, and the sums of the current epoch.

    `correct` is the number of training images that were classified correctly. `seconds` is the
    model's share of the time of the stack. `history` has a record for each finished epoch.
    """

    epoch: int
    step: int
    loss_sum: float
    correct: int
    seconds: float
    history: list[dict[str, Any]]


class Member:
    """One of the models that are trained together: its position and its run directory."""

    def __init__(
        self,
        config: ClassifierConfig,
        training: ClassifierTraining,
        device: torch.device,
        run: RunDirectory | None,
    ) -> None:
        self.training, self.run = training, run
        with torch.device("meta"):
            self.model = ImageClassifier(config)
        self.model.to_empty(device="cpu")
        self.model.reset_parameters(torch.Generator().manual_seed(training.seed))
        self.model.to(device).eval()
        self.noise = torch.Generator(device).manual_seed(training.seed)
        self.slots: dict[str, Tensor] = {}
        self.place = _Place(0, 0, 0.0, 0, 0.0, [])

    def load(self) -> None:
        """Resume from the newest checkpoint, if any."""
        assert self.run is not None
        state = self.run.load_state(self.noise.device)
        if state is not None:
            record, tensors = state
            self.place = _Place(**record)
            self.model.load_state_dict(part(tensors, "model"))
            self.slots = part(tensors, "optimizer")
            self.noise.set_state(tensors["noise.state"].cpu())

    def save(self, steps: int) -> None:
        """Write the model, then a checkpoint; `steps` are those of an epoch."""
        self._check_finite()
        if self.run is None:
            return
        self.model.save_files(self.run.path)
        self.model.source = self.run.path
        step = steps * self.place.epoch + self.place.step
        model, noise = self.model.state_dict(), {"state": self.noise.get_state()}
        self.run.save_state(step, vars(self.place), model=model, optimizer=self.slots, noise=noise)

    def _check_finite(self, data: ImageData | None = None) -> float:
        """Raise if the training diverged; else return the accuracy on the test set of `data`."""
        try:
            check_weights(self.model)
            check_finite(loss=torch.tensor(self.place.loss_sum))
            test = None if data is None else (data.test_images, data.test_labels)
            return 0.0 if test is None else self.model.accuracy(*test)
        except BilensError as error:
            raise BilensError(
                f"The loss became infinite or NaN in epoch {self.place.epoch + 1} of seed "
                f"{self.training.seed}. Lower the learning rate (now "
                f"{self.training.learning_rate}), or check the data for NaN."
            ) from error

    def finish_epoch(self, data: ImageData) -> dict[str, Any]:
        """Measure, record and move on to the next epoch."""
        accuracy = self._check_finite(data)
        place, training = self.place, self.training
        seen = len(data.train_labels)
        record = {
            "epoch": place.epoch + 1,
            "train_loss": place.loss_sum / seen,
            "train_accuracy": place.correct / seen,
            "test_accuracy": accuracy,
            "learning_rate": training.learning_rate * training.decay**place.epoch,
            "train_seconds": round(place.seconds, 3),
        }
        place.history.append(record)
        if self.run is not None:
            self.run.add_metrics(record)
        place.epoch, place.step, place.seconds = place.epoch + 1, 0, 0.0
        place.loss_sum, place.correct = 0.0, 0
        return record


class _Stack:
    """Models at the same position, with stacked weights and one optimizer.

    The weights of each model are views of the stack, so every model is up to date after each step.
    """

    def __init__(self, members: Sequence[Member], data: ImageData) -> None:
        self.members, self.data, self.training = members, data, members[0].training
        models = [member.model for member in members]
        # A single model trains as it is: `vmap` over one model would cost time for nothing.
        self.alone = len(models) == 1
        # `functional_call` replaces every weight of the template, so it holds none of its own.
        self.template = models[0] if self.alone else deepcopy(models[0]).to("meta")
        self.weights = dict(models[0].named_parameters())
        self.buffers = {
            name: self._join([model.get_buffer(name) for model in models])
            for name, _ in models[0].named_buffers()
        }
        if not self.alone:
            for name in self.weights:
                parts = [model.get_parameter(name) for model in models]
                self.weights[name] = nn.Parameter(self._join([weight.data for weight in parts]))
                for number, weight in enumerate(parts):
                    weight.data = self._slice(self.weights[name].data, number)
            for name, stacked in self.buffers.items():
                for number, model in enumerate(models):
                    model.get_buffer(name).data = self._slice(stacked, number)
        self.optimizer = torch.optim.AdamW(
            self.weights.values(), weight_decay=self.training.weight_decay, fused=True
        )
        # AdamW acts on each element by itself, so stacked moments give the same steps.
        for name, parameter in self.weights.items() if members[0].slots else ():
            slots = [part(member.slots, name) for member in members]
            for slot in slots[0]:
                joined = self._join([moments[slot] for moments in slots])
                self.optimizer.state[parameter][slot] = joined
        self.latent = LatentNoise(self.template, self.training.latent_noise)
        self.noise_size = self.training.input_noise * data.train_images.std(-1, keepdim=True)
        self.place = members[0].place
        # Sums stay on the device: reading them at each step would wait for the GPU.
        device = data.train_images.device
        self.loss_sum = torch.tensor([m.place.loss_sum for m in members], device=device)
        self.correct = torch.tensor([m.place.correct for m in members], device=device)

    def steps_of_epoch(self) -> Iterator[None]:
        """Train to the end of the current epoch, and yield after each step."""
        training, size = self.training, len(self.data.train_images)
        self.template.train()
        for group in self.optimizer.param_groups:
            group["lr"] = training.learning_rate * training.decay**self.place.epoch
        orders = torch.stack([self._order(member.training.seed, size) for member in self.members])
        for indices in orders.split(training.batch_size, dim=1)[self.place.step :]:
            start = time.perf_counter()
            self._take_step(indices)
            share = (time.perf_counter() - start) / len(self.members)
            for member in self.members:
                member.place.step += 1
                member.place.seconds += share
            yield
        self.template.eval()

    def _order(self, seed: int, size: int) -> Tensor:
        """Return the order of the images in this epoch."""
        # A function of seed and epoch only, so that a resumed epoch has the same order.
        device = self.data.train_images.device
        generator = torch.Generator(device).manual_seed(_mix(seed, self.place.epoch))
        return torch.randperm(size, generator=generator, device=device)

    def _take_step(self, indices: Tensor) -> None:
        x, noise = self._batch(indices)
        labels = self.data.train_labels[indices]
        if self.alone:
            with self.latent.drawn([tensor[0] for tensor in noise]):
                logits = self.template(x[0])[None]
        else:
            logits = vmap(self._logits_of_one)(self.weights, self.buffers, x, noise)
        flat = functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none")
        entropies = flat.view_as(labels)
        self.optimizer.zero_grad()
        # The sum over models of their mean losses: no weight appears in two terms, so each model
        # gets the gradient that it would have by itself.
        entropies.mean(1).sum().backward()
        self.optimizer.step()
        with torch.no_grad():
            self.loss_sum += entropies.sum(1)
            self.correct += (logits.argmax(-1) == labels).sum(1)

    def _batch(self, indices: Tensor) -> tuple[Tensor, list[Tensor]]:
        """Return the noisy images of a step, and the latent noise of each part of the models."""
        images = self.data.train_images
        x = images.index_select(0, indices.flatten()).unflatten(0, indices.shape)
        on_input = [images.shape[1]] if self.training.input_noise else []
        widths = [*on_input, *self.latent.widths]
        count, size = indices.shape
        drawn = x.new_empty(count, size * sum(widths))
        # One draw for each model from its own generator: a seed meets the same noise whether it
        # is trained by itself or in a stack.
        for member, row in zip(self.members, drawn, strict=True):
            row.normal_(generator=member.noise)
        parts = drawn.split([size * width for width in widths], dim=1)
        noise = [flat.unflatten(1, (size, -1)) for flat in parts]
        if on_input:
            x.addcmul_(noise.pop(0), self.noise_size[indices])
        return x, noise

    def _logits_of_one(
        self,
        weights: Mapping[str, Tensor],
        buffers: Mapping[str, Tensor],
        x: Tensor,
        noise: list[Tensor],
    ) -> Tensor:
        with self.latent.drawn(noise):
            stored = {**weights, **buffers}
            parts = {name: _transpose_matrix(tensor) for name, tensor in stored.items()}
            logits: Tensor = functional_call(self.template, parts, (x,))
        return logits

    def settle(self) -> None:
        """Hand the sums of the epoch and the optimizer's moments to the members."""
        sums = zip(self.members, self.loss_sum.tolist(), self.correct.tolist(), strict=True)
        for number, (member, loss_sum, correct) in enumerate(sums):
            member.place.loss_sum, member.place.correct = loss_sum, correct
            member.slots = {
                f"{name}.{slot}": self._slice(value, number)
                for name, weight in self.weights.items()
                for slot, value in self.optimizer.state[weight].items()
            }

    def finish_epoch(self) -> list[dict[str, Any]]:
        """Return the record of each member for the epoch that has just ended."""
        self.settle()
        self.loss_sum.zero_()
        self.correct.zero_()
        return [member.finish_epoch(self.data) for member in self.members]

    def release(self) -> None:
        """Copy the weights out of the stack into every model, and remove the noise."""
        self.latent.remove()
        # A view would keep the stack of all models alive, and save all of it.
        for member in self.members if not self.alone else ():
            for tensor in (*member.model.parameters(), *member.model.buffers()):
                tensor.data = tensor.data.clone(memory_format=torch.contiguous_format)

    def _join(self, tensors: Sequence[Tensor]) -> Tensor:
        """Stack a tensor of each model; scalars, the optimizer's step counts, are shared."""
        if self.alone or tensors[0].ndim == 0:
            return tensors[0]
        return torch.stack([_transpose_matrix(tensor) for tensor in tensors])

    def _slice(self, tensor: Tensor, number: int) -> Tensor:
        """Return one model's view of a stacked tensor."""
        return tensor if self.alone or tensor.ndim == 0 else _transpose_matrix(tensor[number])


def train_together(members: Sequence[Member], data: ImageData) -> None:
    """Train models at the same position to their end."""
    training, place = members[0].training, members[0].place
    steps = -(-len(data.train_labels) // training.batch_size)
    stack = _Stack(members, data)
    with progress_bar() as bar, interrupt_between_steps() as interrupt:
        done = steps * place.epoch + place.step
        task = bar.add_task("training", total=steps * training.epochs, completed=done, note="")
        while place.epoch < training.epochs:
            for _ in stack.steps_of_epoch():
                bar.advance(task)
                if interrupt.requested:
                    stack.settle()
                    for member in members:
                        member.save(steps)
                    raise KeyboardInterrupt
            records = stack.finish_epoch()
            for member in members:
                member.save(steps)
            loss, accuracy = (
                statistics.mean(record[name] for record in records)
                for name in ("train_loss", "test_accuracy")
            )
            bar.update(task, note=f"loss {loss:.4f}, test accuracy {accuracy:.2%}")
    stack.release()
    for member in members:
        if member.run is not None and not member.run.finished:
            member.run.finish()


def _transpose_matrix(tensor: Tensor) -> Tensor:
    """Transpose matrices and return other tensors as they are."""
    # The gradient of a batched product arrives transposed. Matrices that are stacked transposed
    # take it as it is, without a copy.
    return tensor.mT if tensor.ndim == 2 else tensor


def _mix(seed: int, epoch: int) -> int:
    """Combine seed and epoch into a seed that neither weights nor noise use."""
    return (seed * 1_000_003 + epoch + 1) % 2**63


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
