"""MNIST case study, pairs: features of the layer's weights, from its input-pair vectors.

Reproduces "SAE over input pair vectors" of Pearce & Dooms 2024. A sparse autoencoder is trained on
the vectors r_ij = B[:, i, j] of random pairs of pixels, from the weights and without any image. A
feature's activations over all pairs are a symmetric matrix again: relu(Q(e)_ij + b) for the
feature's encoder e and the biases b. Figures show the eigenvectors of this matrix for the four of
the ten most active features that are most specific to a single digit. Sparsity and error are
measured on 20,000 pairs that are drawn anew.

The source, with d = 1000 and weight decay 1: 5000 features, 3544 active, L0 30.4,
MSE/L2^2 0.29. It gives no weights or rates; ours are tuned on one model for such an L0 and such an
error. Ours has an embedding before the layer, folded in here, and is trained without input noise.

Small: d = 300, 10 epochs, one initialisation: 2.5 minutes on one core, and seconds where the models
are there already. Paper: d = 1000, 20 epochs: not run.
"""

import torch
from jaxtyping import Float, Int
from torch import Tensor

from bilens.nn import ImageClassifier
from bilens.tensor import BilinearTensor, Spectrum
from experiments.autoencoder import AutoencoderTraining, SparseAutoencoder, pair_sampler, sparsity
from experiments.case import case_models, direction_names, eigenvector_figure, layer_tensor
from experiments.context import Outcome, RecipeContext
from experiments.results import Row

SEEDS = (1, 1)
"""Initialisations at either scale."""
FEATURES, CANDIDATES, SHOWN = 5000, 10, 4
PAIRS, UNSEEN = 20_000, 1_000_003
CLAIMS: dict[str, tuple[str, float]] = {
    "active features of a pair of pixels": ("l0", 30.4),
    "relative squared error": ("relative_error", 0.29),
    "features that are active for some pair": ("active", 3544),
}
CLOSE = 0.1
"""How far from the source's a number may be, as a share of it."""
TRAINING = AutoencoderTraining(steps=1200, learning_rate=5e-3, l1=0.115, similarity=0.6)


def run(context: RecipeContext) -> Outcome:
    """Train an autoencoder on one model's weights."""
    data, (model,) = context.mnist, case_models(context, context.seed_range(SEEDS)[:1])
    layer = layer_tensor(model)
    sample = pair_sampler(layer)
    autoencoder = context.autoencoder("pairs", FEATURES, sample, TRAINING)
    r = sample(PAIRS, torch.Generator().manual_seed(UNSEEN))
    f = autoencoder.encode(r)
    top = most_specific(f.mean(0), autoencoder, model)
    names = direction_names(autoencoder.features.T[top], model, data)
    values, vectors = torch.linalg.eigh(pair_activations(layer, autoencoder, top))
    spectra = Spectrum(values, vectors.mT, torch.zeros_like(values))
    measured = sparsity(f, r, autoencoder.decode(f))
    rows = [
        Row(claim, measured[key], n=1, source=source, held=abs(measured[key] / source - 1) <= CLOSE)
        for claim, (key, source) in CLAIMS.items()
    ]
    title = "Pixel pairs that activate a feature: eigenvectors of its activations"
    return Outcome(
        {**measured, "features": FEATURES, "source": {**dict(CLAIMS.values()), "features": 5000}},
        {"features": eigenvector_figure(spectra, names, data, title=title)},
        rows=rows,
        settings={"features": FEATURES, "d_model": context.choose(300, 1000)},
    )


def most_specific(
    mean_activation: Float[Tensor, " m"], autoencoder: SparseAutoencoder, model: ImageClassifier
) -> Int[Tensor, " shown"]:
    """Return the most active features with the largest share of one digit in their logits."""
    order = mean_activation.argsort(descending=True)[:CANDIDATES]
    logits = autoencoder.features.T[order] @ model.unembed.weight.T
    share = logits.pow(2).amax(-1) / logits.pow(2).sum(-1)
    return order[share.argsort(descending=True)[:SHOWN]]


def pair_activations(
    layer: BilinearTensor, autoencoder: SparseAutoencoder, top: Int[Tensor, " k"]
) -> Float[Tensor, "k n_in n_in"]:
    """Activations of some features for the vectors r_ij of all pairs, from the factors."""
    encoder = autoencoder.encoder[top]
    bias = autoencoder.encoder_bias[top] - encoder @ autoencoder.decoder_bias
    return torch.relu(layer.interaction(encoder).dense() + bias[:, None, None])
