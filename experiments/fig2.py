"""Figure 2: eigenvectors of single-layer models of MNIST and Fashion-MNIST.

Reproduces figure 2 of Pearce et al. 2024. Panel A has the first seven classes of either data set.
It shows the top positive eigenvectors by mean activation over the test images, and below them the
negative ones. Each is beside the three images of its largest activation. Panel C has the spectrum
of digit 1 and its three outermost eigenvectors of either sign, by eigenvalue. The models have the
settings of Table 2: d = 300, 20 epochs, input noise 1.0, and weight decay 0.5 for MNIST and 1.0 for
Fashion-MNIST.

The source says that the eigenvector of largest mean activation is often the first or second by
eigenvalue: its rank is recorded for each class. It also says that digit 1's first positive
eigenvector reacts most to three 4s: the classes of those images are recorded. The source has an
accuracy of 98.05 % for the MNIST model (section 5.2) and none for Fashion-MNIST.

Both scales do the same, with seed 0 (the source may train for up to 100 epochs). Training takes
about 1.5 minutes for each model on one core, everything else seconds.
"""

from typing import Any

import plotly.graph_objects as go

from bilens.data import ImageData
from bilens.read import spectra
from bilens.report import eigenvector_figure
from bilens.tensor import Spectrum
from bilens.train import ClassifierTraining
from experiments.context import Outcome, RecipeContext
from experiments.fig9 import class_figures, describe_ends
from experiments.results import Row

SEEDS = (1, 1)
"""Initialisations at either scale."""
CLASSES, SHOWN, ONE, SECOND = 7, 3, 1, 2


def run(context: RecipeContext) -> Outcome:
    """Decompose one model of either data set."""
    numbers: dict[str, Any] = {}
    figures: dict[str, go.Figure] = {}
    for key, data, weight_decay, source in (
        ("mnist", context.mnist, 0.5, 0.9805),
        ("fashion_mnist", context.fashion, 1.0, None),
    ):
        training = ClassifierTraining(weight_decay=weight_decay, input_noise=1.0)
        (model,) = context.classifiers(data, training, context.seed_range(SEEDS)[:1])
        spectrum = spectra(model)
        names = data.class_names[:CLASSES]
        for label, name in enumerate(names):
            size = spectrum[label].activations(data.test_images).mean(0).abs()
            ordered = spectrum[label].ordered_by(size).oriented(data.test_images)
            figures[f"{key}-{label}"] = eigenvector_figure(
                ordered, data.test_images, data.shape, title=f"{data.name}: {name}", k=SHOWN
            )
        numbers[key] = {
            "accuracy": model.accuracy(data.test_images, data.test_labels),
            "source_accuracy": source,
            "eigenvalue_rank_of_most_active": {
                name: eigenvalue_rank_of_most_active(spectrum[label], data)
                for label, name in enumerate(names)
            },
        }
        if key == "mnist":
            figures |= class_figures(spectrum[ONE], data, ONE, k=SHOWN)
            numbers["digit_1"] = describe_ends(spectrum[ONE], data, SHOWN)
    rows = [
        Row("MNIST: accuracy", 100 * numbers["mnist"]["accuracy"], n=1, unit="%", source=98.05),
        Row("Fashion-MNIST: accuracy", 100 * numbers["fashion_mnist"]["accuracy"], n=1, unit="%"),
    ]
    for key, name in (("mnist", "MNIST"), ("fashion_mnist", "Fashion-MNIST")):
        ranks = numbers[key]["eigenvalue_rank_of_most_active"].values()
        often = sum(rank <= SECOND for rank in ranks) / len(ranks)
        claim = f"{name}: share of classes whose most active eigenvector is the first or second"
        rows.append(Row(claim, often, n=len(ranks), held=often > 1 / 2))
    return Outcome(numbers, figures, rows=rows)


def eigenvalue_rank_of_most_active(spectrum: Spectrum, data: ImageData) -> int:
    """Return the rank by eigenvalue, from 1, of the eigenvector of largest mean activation."""
    most = spectrum.activations(data.test_images).mean(0).argmax()
    return 1 + int((spectrum.values > spectrum.values[most]).sum())
