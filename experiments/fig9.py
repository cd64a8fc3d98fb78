"""Figures 9 and 10: the spectrum and the outermost eigenvectors of every digit.

Reproduces figures 9 and 10 (appendix E) of Pearce et al. 2024. One single-layer MNIST model has the
settings of their Table 2 (d = 300, 20 epochs, weight decay 0.5, input noise 1.0). Figures show the
eigenvalues of each digit's logit, and the largest positive and negative eigenvectors. Each is
beside the three test images of its largest activation.

The source shows pictures and no numbers. Recorded here are the accuracy and the effective rank of
all models, and, for each digit of the first, the rank and the three outermost eigenvalues of either
sign, with the classes of the images beside their eigenvectors.

Small: 3 initialisations, about 1.5 minutes for each on one core, which are those of figure 2.
Paper: 5.
"""

from typing import Any

import torch
from matplotlib.figure import Figure

from bilens.data import ImageData
from bilens.images import class_spectra, top_inputs
from bilens.pages import eigenvector_figure, spectrum_figure
from bilens.tensor import Spectrum
from bilens.train import ClassifierTraining
from experiments.context import Outcome, RecipeContext
from experiments.results import Row

SEEDS = (3, 5)
"""Initialisations at either scale."""
SHOWN = 4


def run(context: RecipeContext) -> Outcome:
    """Decompose the models, and draw the first."""
    data = context.mnist
    models = context.classifiers(data, ClassifierTraining(), context.seed_range(SEEDS))
    spectra = [class_spectra(model) for model in models]
    classes = spectra[0]
    figures: dict[str, Figure] = {}
    by_digit: dict[str, Any] = {}
    for label, name in enumerate(data.class_names):
        spectrum = classes[label]
        figures |= class_figures(spectrum, data, label, k=SHOWN)
        rank = float(spectrum.effective_rank())
        by_digit[name] = {"effective_rank": rank, **describe_ends(spectrum, data)}
    accuracies = [model.accuracy(data.test_images, data.test_labels) for model in models]
    ranks = torch.stack([of_model.effective_rank() for of_model in spectra])
    ends = {"least, of a digit": ranks.mean(0).min(), "largest": ranks.mean(0).max()}
    rows = [
        Row.of_shares("accuracy", accuracies, scale=100, unit="%", source=98.05),
        Row.of(
            "effective rank of a digit, mean",
            ranks.mean(1).tolist(),
            baselines={name: float(end) for name, end in ends.items()},
        ),
    ]
    return Outcome({"accuracies": accuracies, "digits": by_digit}, figures, rows=rows)


def class_figures(spectrum: Spectrum, data: ImageData, label: int, *, k: int) -> dict[str, Figure]:
    """Draw the eigenvalues of one class, and its k outermost eigenvectors of either sign."""
    name, x = data.class_names[label], data.test_images
    oriented = spectrum.oriented(x)
    return {
        f"spectrum-{label}": spectrum_figure(oriented, title=f"Spectrum of {name}"),
        f"eigenvectors-{label}": eigenvector_figure(
            oriented, x, data.shape, title=f"Eigenvectors of {name}", k=k
        ),
    }


def describe_ends(
    spectrum: Spectrum, data: ImageData, k: int = 3
) -> dict[str, list[dict[str, Any]]]:
    """Return the k largest eigenvalues of either sign, with the classes of their top inputs."""
    ends = spectrum.outermost(k)
    labels = data.test_labels[top_inputs(ends, data.test_images)].tolist()
    described = [
        {"eigenvalue": value, "top_inputs": [data.class_names[label] for label in group]}
        for value, group in zip(ends.values.tolist(), labels, strict=True)
    ]
    return {
        "positive": [end for end in described if end["eigenvalue"] > 0],
        "negative": [end for end in described if end["eigenvalue"] < 0],
    }
