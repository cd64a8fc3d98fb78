"""Figure 4: how alike the eigenvectors of different models are.

Reproduces figure 4 of Pearce et al. 2024: the positive eigenvectors of each digit in d = 300 MNIST
models, by rank, against the positive eigenvector of the same digit in another model that resembles
each most. Eigenvectors are read in pixels through the embedding and compared by |cosine|, and the
similarities averaged over digits. Models have the settings of Table 2 (20 epochs, weight decay 0.5,
input noise 1.0).

A pair never shares its seed: models of different width with the same seed begin with the same first
rows of the embedding and see the images in the same order. Each compared model gives one number,
its mean over the d = 300 models, and the shaded 95 % interval is of the mean of those. As a check,
the last line matches the eigenvectors of the next digit.

The source finds about 0.9 for the first five ranks at d = 300, and 0.5 to 0.6 at d = 30.

Small: d = 30, 50 and 100 from 3 initialisations and d = 300 from 5: some 17 minutes of training on
one core, of which figure 3 shares 14. Paper: 20 initialisations of each size, d = 1000 too, as in
the source: some 3.5 hours.
"""

from collections.abc import Sequence
from statistics import fmean

import torch
from jaxtyping import Float
from torch import Tensor

from bilens.nn import ImageClassifier
from bilens.read import class_spectra
from bilens.tensor.similarity import best_match, unit_rows
from bilens.train import ClassifierTraining
from experiments.curves import confidence_line, line_figure, picture_figure
from experiments.workshop import Outcome, Workshop, interval

__all__ = ["matches", "positive_vectors", "run", "similarity_curves"]

Vectors = list[Float[Tensor, "k n_in"]]
"""Of one model: the positive eigenvectors of each class, the largest eigenvalue first."""

RANKS, TOP, THREE = 20, 5, 3
SOURCE = {"d = 30": "0.5 to 0.6", "d = 300": "about 0.9"}


def run(workshop: Workshop) -> Outcome:
    """Compare models of several sizes with models of d = 300."""
    data = workshop.mnist
    small = {30: 3, 50: 3, 100: 3, 300: 5}
    seeds: dict[int, int] = workshop.choose(small, dict.fromkeys([*small, 1000], 20))
    found: dict[str, list[Vectors]] = {}
    for d_model, count in seeds.items():
        models = workshop.classifiers(data, ClassifierTraining(), count, d_model=d_model)
        found[f"d = {d_model}"] = [positive_vectors(model) for model in models]
    references = found["d = 300"]
    first = references[0][THREE][:TOP]
    mean = data.test_images[data.test_labels == THREE].mean(0)
    first = first * (first @ mean).sign()[:, None]
    rows = {"d = 300, seed 0": [(v, f"rank {i}") for i, v in enumerate(first, start=1)]}
    rows |= {f"{name}, seed 1": matches(first, models[1][THREE]) for name, models in found.items()}
    found["d = 300, next digit"] = [vectors[1:] + vectors[:1] for vectors in references]
    numbers, lines = {}, []
    for name, others in found.items():
        curves = similarity_curves(references, others)
        top = interval([fmean(curve[:TOP]) for curve in curves])
        numbers[name] = {"top_five": top, "source": SOURCE.get(name)}
        lines.append(confidence_line(name, range(1, len(curves[0]) + 1), curves))
    figure = line_figure(
        lines,
        title="Best match of positive eigenvectors of d = 300 models",
        x_title="rank",
        y_title="cosine similarity",
    )
    pictures = picture_figure(rows, data.shape, title="Best matches, digit 3")
    return Outcome(numbers, {"similarity": figure, "digit-3": pictures})


def positive_vectors(model: ImageClassifier) -> Vectors:
    """The positive eigenvectors of each class in pixels, the largest eigenvalue first."""
    spectra = class_spectra(model)
    pairs = zip(spectra.values, spectra.vectors, strict=True)
    return [vectors[values > 0] for values, vectors in pairs]


def similarity_curves(
    references: Sequence[Vectors], others: Sequence[Vectors], ranks: int = RANKS
) -> list[list[float]]:
    """Best match by rank for each of the other models, a mean over classes and references.

    Models at the same place in both sequences share their seed and are no pair.
    """
    ranks = min(ranks, *(len(vectors) for model in references for vectors in model))
    curves = []
    for seed, other in enumerate(others):
        pairs = [
            best_match(a[:ranks], b)
            for number, model in enumerate(references)
            if number != seed
            for a, b in zip(model, other, strict=True)
        ]
        curves.append(torch.stack(pairs).mean(0).tolist())
    return curves


def matches(a: Float[Tensor, "k_a n"], b: Float[Tensor, "k_b n"]) -> list[tuple[Tensor, str]]:
    """The row of b that resembles each row of a most, turned the same way, with its similarity."""
    cosines = unit_rows(a) @ unit_rows(b).T
    best = cosines.abs().argmax(-1)
    chosen = cosines.gather(1, best[:, None])
    turned = chosen.sign() * b[best]
    return [(v, f"{abs(c):.2f}") for v, c in zip(turned, chosen[:, 0].tolist(), strict=True)]
