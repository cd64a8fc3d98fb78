"""Figures 9 and 10: the spectrum and the outermost eigenvectors of every digit.

Reproduces figures 9 and 10 (appendix E) of Pearce et al. 2024. One single-layer MNIST model has the
settings of their Table 2 (d = 300, 20 epochs, weight decay 0.5, input noise 1.0). Figures show the
eigenvalues of each digit's logit, and the largest positive and negative eigenvectors. Each is
beside the three test images of its largest activation.

The source shows pictures and no numbers. Recorded here are the accuracy and, for each digit, the
effective rank and the three outermost eigenvalues of either sign. The classes of the images beside
their eigenvectors are recorded too.

Both scales do the same, with seed 0. Training takes about 1.5 minutes on one core, everything else
seconds; the model is the one of figure 2.
"""

from typing import Any

from matplotlib.figure import Figure

from bilens.data import ImageData
from bilens.images import class_spectra, top_inputs
from bilens.pages import eigenvector_figure, spectrum_figure
from bilens.tensor import Spectrum
from bilens.train import ClassifierTraining
from experiments.context import Outcome, RecipeContext
from experiments.results import Row

SEEDS = (1, 1)
"""Initialisations at either scale."""
SHOWN = 4


def run(context: RecipeContext) -> Outcome:
    """Decompose one model."""
    data = context.mnist
    (model,) = context.classifiers(data, ClassifierTraining(), context.seed_range(SEEDS)[:1])
    classes = class_spectra(model)
    figures: dict[str, Figure] = {}
    by_digit: dict[str, Any] = {}
    for label, name in enumerate(data.class_names):
        spectrum = classes[label]
        figures |= class_figures(spectrum, data, label, k=SHOWN)
        rank = float(spectrum.effective_rank())
        by_digit[name] = {"effective_rank": rank, **describe_ends(spectrum, data)}
    accuracy = model.accuracy(data.test_images, data.test_labels)
    ranks = [digit["effective_rank"] for digit in by_digit.values()]
    rows = [
        Row("accuracy", 100 * accuracy, n=1, unit="%"),
        Row.of_range("effective rank of a digit", ranks),
    ]
    numbers = {"accuracy": accuracy, "digits": by_digit}
    return Outcome(numbers, figures, rows=rows, settings={"low and high": "range over digits"})


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
