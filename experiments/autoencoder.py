"""Sparse autoencoders of the MNIST case study, over any stream of vectors.

Source: Pearce & Dooms 2024, appendix "SAE training", which does not state weights and rates.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from jaxtyping import Float
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from tqdm import tqdm

from bilens.errors import BilensError
from bilens.tensor import BilinearTensor

Sampler = Callable[[int, torch.Generator], Tensor]
"""Function that draws a batch of n vectors with a generator."""


class SparseAutoencoder(nn.Module):
    """f = ReLU(E (y - b_D) + b_E),  y' = F f + b_D, with features F of unit length as columns."""

    def __init__(self, d_in: int, n_features: int, seed: int = 0) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.features = nn.Parameter(torch.randn(d_in, n_features, generator=generator))
        self.normalise()
        self.encoder = nn.Parameter(self.features.detach().T.contiguous())
        self.encoder_bias = nn.Parameter(torch.zeros(n_features))
        self.decoder_bias = nn.Parameter(torch.zeros(d_in))

    def encode(self, y: Float[Tensor, "*batch d_in"]) -> Float[Tensor, "*batch n_features"]:
        """Return the activations of the features, none negative."""
        y = y.to(self.encoder.dtype)
        return torch.relu((y - self.decoder_bias) @ self.encoder.T + self.encoder_bias)

    def decode(self, f: Float[Tensor, "*batch n_features"]) -> Float[Tensor, "*batch d_in"]:
        """Return the vectors with these activations."""
        return f @ self.features.T + self.decoder_bias

    @torch.no_grad()
    def normalise(self) -> None:
        """Scale every feature to unit length."""
        # A dead feature of zeros stays as it is.
        self.features.div_(self.features.norm(dim=0).clamp_min(1e-12))


@dataclass(frozen=True)
class AutoencoderTraining:
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
    """

    steps: int = 4000
    batch_size: int = 256
    learning_rate: float = 1e-3
    l1: float = 0.1
    similarity: float = 0.01
    power: float = 10.0
    similarity_sample: int = 512
    seed: int = 0


def row_sampler(rows: Float[Tensor, "samples d_in"]) -> Sampler:
    """Draw rows of a matrix that is in memory, such as a layer's outputs."""
    return lambda n, generator: rows[torch.randint(len(rows), (n,), generator=generator)]


def pair_sampler(tensor: BilinearTensor) -> Sampler:
    """Draw input-pair vectors r_ij = B[:, i, j] of random pairs, at O(batch rank n_out) a batch.

    Source: Pearce & Dooms 2024, "SAE over input pair vectors".
    """

    def draw(n: int, generator: torch.Generator) -> Tensor:
        i, j = (torch.randint(tensor.n_in, (n,), generator=generator) for _ in range(2))
        L, R = tensor.left.T, tensor.right.T
        return ((L[i] * R[j] + L[j] * R[i]) / 2) @ tensor.out.T

    return draw


def similarity_penalty(
    features: Float[Tensor, "d_in n_features"], power: float
) -> Float[Tensor, ""]:
    """Return (sum over pairs a < b of |f_a . f_b|^p)^(1/p): a high p counts the most similar."""
    cosines = (features.T @ features).triu(diagonal=1).abs()
    # p-th powers of small cosines underflow to gradients of 0/0 when all of them vanish.
    return (cosines**power).sum().clamp_min(1e-30) ** (1 / power)


SAVED = 100
"""Steps between two checkpoints."""


def train_autoencoder(
    sample: Sampler, n_features: int, training: AutoencoderTraining, kept: Path | None = None
) -> SparseAutoencoder:
    """Minimise |y - y'|^2 + l1 |f|_1 + similarity |features|_p.

    The vectors are scaled to unit mean square for training, and the scale is folded back into the
    trained autoencoder, whose weights are frozen. A training that was stopped resumes from
    its file `kept`.
    """
    generator = torch.Generator().manual_seed(training.seed)
    first = sample(4096, generator)
    scale = float(first.pow(2).sum(-1).mean().sqrt())
    model = SparseAutoencoder(first.shape[-1], n_features, training.seed)
    with torch.no_grad():
        model.decoder_bias.copy_(first.mean(0) / scale)
    optimizer = torch.optim.Adam(model.parameters(), training.learning_rate, fused=True)
    done = 0
    if kept is not None and kept.exists():
        tensors = load_file(kept)
        done = int(tensors["step"])
        generator.set_state(tensors["generator"])
        model.load_state_dict({name: tensors[f"model.{name}"] for name in model.state_dict()})
        for name, weight in model.named_parameters():
            slots = ("step", "exp_avg", "exp_avg_sq")
            optimizer.state[weight] = {slot: tensors[f"{name}.{slot}"] for slot in slots}
    for step in tqdm(range(done, training.steps), desc="autoencoder", leave=False, disable=None):
        y = sample(training.batch_size, generator).to(model.encoder.dtype) / scale
        f = model.encode(y)
        error = (model.decode(f) - y).pow(2).sum(-1).mean()
        compared = torch.randperm(n_features, generator=generator)[: training.similarity_sample]
        alike = similarity_penalty(model.features[:, compared], training.power)
        loss = error + training.l1 * f.sum(-1).mean() + training.similarity * alike
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        model.normalise()
        if kept is not None and (step + 1) % SAVED == 0:
            tensors = {f"model.{name}": x.contiguous() for name, x in model.state_dict().items()}
            for name, weight in model.named_parameters():
                tensors |= {f"{name}.{slot}": x for slot, x in optimizer.state[weight].items()}
            tensors |= {"step": torch.tensor(step + 1), "generator": generator.get_state()}
            save_whole(tensors, kept)
    if not all(torch.isfinite(weight).all() for weight in model.parameters()):
        raise BilensError("The loss became infinite or NaN; lower learning_rate")
    model.requires_grad_(False)
    model.encoder_bias.mul_(scale)
    model.decoder_bias.mul_(scale)
    return model


def save_whole(tensors: dict[str, Tensor], path: Path) -> None:
    """Write a file of tensors that is there in full or as it was before."""
    draft = path.with_name(f".{path.name}")
    save_file(tensors, draft)
    draft.replace(path)


def sparsity(
    activations: Float[Tensor, "samples n_features"],
    y: Float[Tensor, "samples d"],
    rebuilt: Float[Tensor, "samples d"],
) -> dict[str, float]:
    """Return sparsity and relative error over one set of samples.

    `l0` is the mean number of active features of an input, `active` and `dead` count the features
    that are active for any or for no input, and the error is the case study's MSE/L2^2.
    """
    on = activations != 0
    active = int(on.any(0).sum())
    # Of all samples together: single samples may be close to zero.
    error = (y - rebuilt).pow(2).sum() / y.pow(2).sum()
    return {
        "l0": float(on.double().sum(-1).mean()),
        "relative_error": float(error),
        "active": active,
        "dead": activations.shape[-1] - active,
    }
