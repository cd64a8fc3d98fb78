"""Train a sparse autoencoder over any stream of vectors."""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from bilens.errors import BilensError
from bilens.nn import AutoencoderConfig, SparseAutoencoder
from bilens.progress import progress_bar
from bilens.tensor import BilinearTensor
from bilens.train.interrupt import interrupt_between_steps

__all__ = [
    "AutoencoderTraining",
    "Sampler",
    "pair_sampler",
    "row_sampler",
    "similarity_penalty",
    "train_autoencoder",
]

Sampler = Callable[[int, torch.Generator], Tensor]
"""Gives a batch of so many vectors, drawn with the generator."""


@dataclass(frozen=True)
class AutoencoderTraining:
    """How to train a sparse autoencoder.

    Attributes:
        steps: steps of the optimizer.
        batch_size: vectors in a step.
        learning_rate: of Adam.
        l1: weight of the activations' sum, which makes them sparse.
        similarity: weight of the penalty on features that point the same or opposite ways.
        power: p of that penalty's norm.
        similarity_sample: features that the penalty compares in a step; all pairs of 5,000 would
            cost more than the autoencoder itself.
        seed: of the weights, the batches and the samples.

    Source:
        Pearce & Dooms 2024, appendix "SAE training"; weights and rates are not given there.
    """

    steps: int = 4000
    batch_size: int = 256
    learning_rate: float = 1e-3
    l1: float = 0.1
    similarity: float = 0.01
    power: float = 10.0
    similarity_sample: int = 512
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("steps", "batch_size", "similarity_sample"):
            if getattr(self, name) < 1:
                raise BilensError(f"{name}={getattr(self, name)}, expected at least 1")
        for name in ("l1", "similarity"):
            if not getattr(self, name) >= 0:
                raise BilensError(f"{name}={getattr(self, name)}, expected 0 or more")
        for name in ("learning_rate", "power"):
            if not getattr(self, name) > 0:
                raise BilensError(f"{name}={getattr(self, name)}, expected more than 0")


def row_sampler(rows: Float[Tensor, "samples d_in"]) -> Sampler:
    """Draw rows of a matrix that is in memory, such as a layer's outputs."""
    if rows.ndim != 2 or len(rows) == 0:
        raise BilensError(
            f"rows has shape {tuple(rows.shape)}; expected (samples, d_in), not empty"
        )
    return lambda n, generator: rows[_below(len(rows), n, generator)]


def pair_sampler(tensor: BilinearTensor) -> Sampler:
    """Draw input-pair vectors r_ij = B[:, i, j] of random pairs, computed from the factors.

    The n_in^2 vectors are never held: a batch costs O(batch rank n_out).

    Source:
        Pearce & Dooms 2024, "SAE over input pair vectors".
    """

    def draw(n: int, generator: torch.Generator) -> Tensor:
        i, j = (_below(tensor.n_in, n, generator) for _ in range(2))
        L, R = tensor.left.T, tensor.right.T
        return ((L[i] * R[j] + L[j] * R[i]) / 2) @ tensor.out.T

    return draw


def similarity_penalty(
    features: Float[Tensor, "d_in n_features"], power: float
) -> Float[Tensor, ""]:
    """(sum over pairs a < b of |f_a . f_b|^p)^(1/p): with a high p, the most similar pairs count.

    Source:
        Pearce & Dooms 2024, appendix "SAE training".
    """
    cosines = (features.T @ features).triu(diagonal=1).abs()
    # p-th powers of small cosines underflow to gradients of 0/0 when all of them vanish.
    return (cosines**power).sum().clamp_min(1e-30) ** (1 / power)


def train_autoencoder(
    config: AutoencoderConfig, sample: Sampler, training: AutoencoderTraining
) -> SparseAutoencoder:
    """Minimise |y - y'|^2 + l1 |f|_1 + similarity |features|_p.

    The vectors are scaled to unit mean square for training. The scale is folded back into the
    trained autoencoder, so that it reads the vectors as they are.

    Args:
        config: its sizes.
        sample: where the vectors come from.
        training: how to train it.

    Raises:
        BilensError: the vectors have another width, are all zero or not finite, or training
            diverged.
        KeyboardInterrupt: ctrl-C.
    """
    generator = torch.Generator().manual_seed(training.seed)
    first = sample(4096, generator)
    if first.shape[-1] != config.d_in:
        raise BilensError(f"sample gives vectors of {first.shape[-1]}; d_in is {config.d_in}")
    scale = float(first.pow(2).sum(-1).mean().sqrt())
    if not (math.isfinite(scale) and scale > 0):
        raise BilensError(f"The vectors have mean length {scale}; expected a number above 0")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(training.seed)
        model = SparseAutoencoder(config).to(first.device)
    with torch.no_grad():
        model.decoder_bias.copy_(first.mean(0) / scale)
    optimizer = torch.optim.Adam(model.parameters(), training.learning_rate)
    sampled = min(training.similarity_sample, config.n_features)
    with progress_bar() as bar, interrupt_between_steps() as interrupt:
        task = bar.add_task("sparse autoencoder", total=training.steps, note="")
        for _ in range(training.steps):
            y = sample(training.batch_size, generator) / scale
            f = model.encode(y)
            error = (model.decode(f) - y).pow(2).sum(-1).mean()
            chosen = torch.randperm(config.n_features, generator=generator)[:sampled]
            alike = similarity_penalty(model.features[:, chosen], training.power)
            loss = error + training.l1 * f.sum(-1).mean() + training.similarity * alike
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            model.normalise()
            bar.advance(task)
            if interrupt.requested:
                raise KeyboardInterrupt
    if not torch.isfinite(loss):
        raise BilensError(f"The loss became {float(loss)}; lower learning_rate")
    with torch.no_grad():
        model.encoder_bias.mul_(scale)
        model.decoder_bias.mul_(scale)
    return model.eval()


def _below(limit: int, n: int, generator: torch.Generator) -> Tensor:
    return torch.randint(limit, (n,), generator=generator)
