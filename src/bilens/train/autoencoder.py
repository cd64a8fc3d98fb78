"""Train a sparse autoencoder over any stream of vectors."""

import math
from collections.abc import Callable
from contextlib import ExitStack
from copy import deepcopy
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from bilens.checks import checked
from bilens.errors import BilensError, CheckpointError
from bilens.nn import AutoencoderConfig, SparseAutoencoder
from bilens.progress import progress_bar
from bilens.settings import CheckedSettings, Count, NotNegative, Positive, Seed
from bilens.tensor import BilinearTensor
from bilens.train.run_directory import RunDirectory, interrupt_between_steps, open_run
from bilens.train.session import Session, initialised

SAVE_EVERY = 500
"""Steps between checkpoints: half a minute for the sizes of the case study."""

Sampler = Callable[[int, torch.Generator], Tensor]
"""Function that draws a batch of n vectors with a generator."""


@dataclass(frozen=True)
class AutoencoderTraining(CheckedSettings):
    """Settings of the training of a sparse autoencoder.

    Attributes:
        steps: steps of the optimizer.
        batch_size: vectors in a step.
        learning_rate: learning rate of Adam.
        l1: weight of the sum of activations, which makes them sparse.
        similarity: weight of the penalty on features with parallel or opposite directions.
        power: p of that penalty's norm.
        similarity_sample: features that the penalty compares in a step; all pairs of 5,000 would
            cost more than the autoencoder itself.
        seed: seed of the weights, the batches and the samples.

    Source: Pearce & Dooms 2024, appendix "SAE training", which does not state weights and rates.
    """

    steps: Count = 4000
    batch_size: Count = 256
    learning_rate: Positive = 1e-3
    l1: NotNegative = 0.1
    similarity: NotNegative = 0.01
    power: Positive = 10.0
    similarity_sample: Count = 512
    seed: Seed = 0


@checked
def row_sampler(rows: Float[Tensor, "samples d_in"]) -> Sampler:
    """Draw rows of a matrix that is in memory, such as a layer's outputs."""
    if rows.ndim != 2 or len(rows) == 0:
        raise BilensError(
            f"rows has shape {tuple(rows.shape)}; expected (samples, d_in), not empty"
        )
    return lambda n, generator: rows[_below(len(rows), n, generator)]


def pair_sampler(tensor: BilinearTensor) -> Sampler:
    """Draw input-pair vectors r_ij = B[:, i, j] of random pairs, at O(batch rank n_out) a batch.

    Source: Pearce & Dooms 2024, "SAE over input pair vectors".
    """

    def draw(n: int, generator: torch.Generator) -> Tensor:
        i, j = (_below(tensor.n_in, n, generator) for _ in range(2))
        L, R = tensor.left.T, tensor.right.T
        return ((L[i] * R[j] + L[j] * R[i]) / 2) @ tensor.out.T

    return draw


@checked
def similarity_penalty(
    features: Float[Tensor, "d_in n_features"], power: Positive
) -> Float[Tensor, ""]:
    """(sum over pairs a < b of |f_a . f_b|^p)^(1/p): with a high p, the most similar pairs count.

    Source: Pearce & Dooms 2024, appendix "SAE training".
    """
    cosines = (features.T @ features).triu(diagonal=1).abs()
    # p-th powers of small cosines underflow to gradients of 0/0 when all of them vanish.
    return (cosines**power).sum().clamp_min(1e-30) ** (1 / power)


@checked
def train_autoencoder(
    config: AutoencoderConfig,
    sample: Sampler,
    training: AutoencoderTraining,
    run: Path | None = None,
    *,
    resume: bool = False,
) -> SparseAutoencoder:
    """Minimise |y - y'|^2 + l1 |f|_1 + similarity |features|_p; the result is in evaluation mode.

    The vectors are scaled to unit mean square for training, and the scale is folded back into the
    trained autoencoder. The autoencoder, the settings and a checkpoint are written to `run` every
    few hundred steps and at the end. Ctrl-C writes them too, and stops the training between two
    steps. A resumed training ends with the same bits, and may have more steps.

    Args:
        config: sizes of the autoencoder.
        sample: source of the vectors; a resumed training needs the same source.
        training: settings of the training.
        run: the directory to write to; None keeps everything in memory.
        resume: resume from the state in `run`.

    Raises:
        BilensError: the vectors do not fit, are all zero or not finite, or training diverged.
        CheckpointError: `run` holds no state that `resume` could start from.
        KeyboardInterrupt: ctrl-C, after everything was saved.
    """
    if resume and run is None:
        raise BilensError("resume=True needs the run directory to resume from")
    settings = {**asdict(training), "model": asdict(config)}
    with ExitStack() as stack:
        directory = None
        session = _AutoencoderSession(config, sample, training)
        if run is not None:
            opened = open_run(run, settings, resume=resume, length="steps")
            directory = stack.enter_context(opened)
        if resume and directory is not None:
            session.load(directory)
        bar = stack.enter_context(progress_bar())
        interrupt = stack.enter_context(interrupt_between_steps())
        task = bar.add_task(
            "sparse autoencoder", total=training.steps, completed=session.place["step"], note=""
        )
        place = session.place
        while place["step"] < training.steps:
            session.take_step()
            bar.advance(task)
            ended = place["step"] == training.steps
            if interrupt.requested or place["step"] % SAVE_EVERY == 0 or ended:
                session.save_all(directory)
            if interrupt.requested and not ended:
                raise KeyboardInterrupt
        if directory is not None and not directory.finished:
            directory.finish()
    return session.finished()


class _AutoencoderSession(Session):
    """One training of an autoencoder; its place has the step and the scale of the vectors."""

    model: SparseAutoencoder

    def __init__(
        self, config: AutoencoderConfig, sample: Sampler, training: AutoencoderTraining
    ) -> None:
        self.sample, self.training = sample, training
        generator = torch.Generator().manual_seed(training.seed)
        first = sample(4096, generator)
        if first.shape[-1] != config.d_in:
            raise BilensError(
                f"sample returns vectors of {first.shape[-1]} elements, expected d_in={config.d_in}"
            )
        scale = float(first.pow(2).sum(-1).mean().sqrt())
        if not (math.isfinite(scale) and scale > 0):
            raise BilensError(f"The vectors have mean length {scale}; expected a number above 0")
        model = initialised(SparseAutoencoder, config, training.seed).to(first.device)
        with torch.no_grad():
            model.decoder_bias.copy_(first.mean(0) / scale)
        optimizer = torch.optim.Adam(model.parameters(), training.learning_rate, fused=True)
        super().__init__(model, optimizer, generator, {"step": 0, "scale": scale})
        self.loss = torch.zeros(())

    def check(self, place: dict[str, Any], run: RunDirectory) -> None:
        """Raise CheckpointError if the vectors differ from those of the run."""
        scale = self.place["scale"]
        # Vectors cannot be compared, since a sampler draws them; their mean length can.
        if not math.isclose(place["scale"], scale, rel_tol=1e-3):
            raise CheckpointError(
                f"sample returns vectors of mean length {scale:.6g}, but {run.path} was "
                f"trained on vectors of {place['scale']:.6g}. Resume with the same vectors, or "
                "train elsewhere."
            )

    def save_all(self, run: RunDirectory | None) -> None:
        """Write the run; raise instead if the training diverged, and leave the files unchanged."""
        step = self.place["step"]
        tensors = (self.loss, *self.model.parameters())
        if not all(torch.isfinite(tensor).all() for tensor in tensors):
            raise BilensError(
                f"The loss became infinite or NaN by step {step}; lower learning_rate"
            )
        if run is not None:
            self.finished().save_files(run.path)
            self.save(run, step)

    def take_step(self) -> None:
        training, model, generator = self.training, self.model, self.generator
        place = self.place
        # In the dtype of the weights: rows may be in float64.
        y = self.sample(training.batch_size, generator).to(model.encoder.dtype) / place["scale"]
        f = model.encode(y)
        error = (model.decode(f) - y).pow(2).sum(-1).mean()
        n_features = model.config.n_features
        sampled = min(training.similarity_sample, n_features)
        indices = torch.randperm(n_features, generator=generator)[:sampled]
        alike = similarity_penalty(model.features[:, indices], training.power)
        loss = error + training.l1 * f.sum(-1).mean() + training.similarity * alike
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        model.normalise()
        place["step"] += 1
        self.loss = loss.detach()

    @torch.no_grad()
    def finished(self) -> SparseAutoencoder:
        """Return a copy of the autoencoder for vectors at their original scale."""
        model = deepcopy(self.model)
        model.encoder_bias.mul_(self.place["scale"])
        model.decoder_bias.mul_(self.place["scale"])
        return model.eval()


def _below(limit: int, n: int, generator: torch.Generator) -> Tensor:
    return torch.randint(limit, (n,), generator=generator)
