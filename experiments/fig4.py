"""Figure 4: similarity of the eigenvectors of different models.

Reproduces figure 4 of Pearce et al. 2024. The positive eigenvectors of each digit in d = 300 MNIST
models, by rank, are compared with those of the same digit in another model. The most similar one is
the match. Eigenvectors are read in pixels through the embedding and compared by |cosine|, and the
similarities averaged over digits. Models have the settings of Table 2 (20 epochs, weight decay 0.5,
input noise 1.0).

The first version of the paper, with 5 initialisations of each size, trains with latent noise: 0.33
standard deviations before the embedding, the layer and the readout. It has no other input noise.
Such models of d = 300, and models without any noise, are compared among themselves.

The models of a pair have different seeds. Those of different width with the same seed begin with
the same first rows of the embedding, and see the images in the same order. Each compared model has
one number, its mean over the d = 300 models, and the shaded 95 % interval is of the mean of those.
As a check, the last line matches the eigenvectors of the next digit.

The source finds about 0.9 for the first five ranks at d = 300, and 0.5 to 0.6 at d = 30.

Small: 5 initialisations, 34 minutes on one core (figures 3 and 5 share 22 of them). Paper: 20
of each size and kind, d = 1000 too, as in the source: some 5.5 hours.
"""

from collections.abc import Sequence
from dataclasses import replace
from statistics import fmean
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import normalize

from bilens.images import class_spectra
from bilens.nn import ImageClassifier
from bilens.train import ClassifierTraining
from experiments.context import Outcome, RecipeContext
from experiments.curves import confidence_line, line_figure, picture_figure
from experiments.results import Row, interval

Vectors = list[Float[Tensor, "k n_in"]]
"""Positive eigenvectors of each class of a model, the largest eigenvalue first."""

SEEDS = (5, 20)
"""Initialisations at either scale."""
LEAST_SEEDS = 2
"""Each model is compared with others."""
RANKS, TOP, THREE = 20, 5, 3
SAME, LATENT, OTHER = "d = 300", "d = 300, latent noise", "d = 300, next digit"
KINDS = {
    LATENT: ClassifierTraining(input_noise=0.0, latent_noise=0.33),
    "d = 300, no noise": ClassifierTraining(input_noise=0.0),
}
SOURCE = {"d = 30": "0.5 to 0.6", SAME: "about 0.9", LATENT: "about 0.9"}
SOURCE_NUMBERS = {SAME: 0.9, LATENT: 0.9}


def run(context: RecipeContext) -> Outcome:
    """Compare models of several sizes with models of d = 300."""
    data = context.mnist
    seeds = context.seed_range(SEEDS)
    by_model = {}
    for d_model in context.choose((30, 50, 100, 300), (30, 50, 100, 300, 1000)):
        models = context.classifiers(data, ClassifierTraining(), seeds, d_model=d_model)
        by_model[f"d = {d_model}"] = [positive_vectors(model) for model in models]
    references = by_model[SAME]
    pairs = {name: (references, others) for name, others in by_model.items()}
    for name, training in KINDS.items():
        alike = context.classifiers(data, training, seeds)
        vectors = [positive_vectors(model) for model in alike]
        pairs[name] = vectors, vectors
    pairs[OTHER] = references, [vectors[1:] + vectors[:1] for vectors in references]
    numbers, lines = {}, []
    tops = {}
    for name, (ours, others) in pairs.items():
        curves = similarity_curves(ours, others)
        tops[name] = [fmean(curve[:TOP]) for curve in curves]
        numbers[name] = {"top_five": interval(tops[name]), "source": SOURCE.get(name)}
        lines.append(confidence_line(name, range(1, len(curves[0]) + 1), curves))
    figure = line_figure(
        lines,
        title="Best match of positive eigenvectors of d = 300 models",
        x_title="rank",
        y_title="cosine similarity",
    )
    first = references[0][THREE][:TOP]
    mean = data.test_images[data.test_labels == THREE].mean(0)
    first = first * (first @ mean).sign()[:, None]
    shown = {f"{SAME}, seed 0": [(v, f"rank {i}") for i, v in enumerate(first, start=1)]}
    for name, others in by_model.items():
        shown[f"{name}, seed 1"] = matches(first, others[1][THREE])
    pictures = picture_figure(shown, data.shape, title="Best matches, digit 3")
    rows = []
    for name, matched in tops.items():
        if name == OTHER:
            continue
        claimed = SOURCE_NUMBERS.get(name)
        average = fmean(matched)
        row = Row.of_shares(
            f"best match of the first {TOP} positive eigenvectors: {name}",
            matched,
            baselines={"another digit": fmean(tops[OTHER])} if "d = 300" in name else {},
            source=claimed,
        )
        rows.append(replace(row, held=None if claimed is None else round(average, 1) == claimed))
    widths = [int(name.removeprefix("d = ")) for name in by_model]
    settings = {"d_model": widths, "eigenvectors": TOP}
    figures = {"similarity": figure, "digit-3": pictures}
    return Outcome(numbers, figures, rows=rows, settings=settings)


Basis = Literal["model", "pixels"]
"""Space in which eigenvectors are orthonormal."""


def positive_vectors(model: ImageClassifier, basis: Basis = "model") -> Vectors:
    """Return the positive eigenvectors of each class in pixels, the largest eigenvalue first."""
    spectrum = class_spectra(model, basis=basis)
    pairs = zip(spectrum.values, spectrum.vectors, strict=True)
    return [vectors[values > 0] for values, vectors in pairs]


def similarity_curves(
    references: Sequence[Vectors], others: Sequence[Vectors], ranks: int = RANKS
) -> list[list[float]]:
    """Return the best match by rank for each other model, a mean over classes and references.

    Models at the same place in both sequences share their seed and are no pair.
    """
    ranks = min(ranks, *(len(vectors) for model in references for vectors in model))
    curves = []
    for seed, other in enumerate(others):
        pairs = [
            (normalize(a[:ranks]) @ normalize(b).T).abs().amax(-1)
            for number, model in enumerate(references)
            if number != seed
            for a, b in zip(model, other, strict=True)
        ]
        curves.append(torch.stack(pairs).mean(0).tolist())
    return curves


def matches(a: Float[Tensor, "k_a n"], b: Float[Tensor, "k_b n"]) -> list[tuple[Tensor, str]]:
    """Return the row of b nearest to each row of a, with the same sign, and its similarity."""
    cosines = normalize(a) @ normalize(b).T
    best = cosines.abs().argmax(-1)
    matched = cosines.gather(1, best[:, None])
    turned = matched.sign() * b[best]
    return [(v, f"{abs(c):.2f}") for v, c in zip(turned, matched[:, 0].tolist(), strict=True)]
