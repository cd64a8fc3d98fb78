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

Pictures are of the first seed, accuracies of all (the source may train for up to 100 epochs).

Small: 3 initialisations, about 1.5 minutes for each model on one core. Paper: 5.
"""

from dataclasses import replace
from statistics import fmean
from typing import Any

from matplotlib.figure import Figure

from bilens.data import ImageData
from bilens.images import class_spectra
from bilens.pages import eigenvector_figure
from bilens.tensor import Spectrum
from bilens.train import ClassifierTraining
from experiments.context import Outcome, RecipeContext
from experiments.fig9 import class_figures, describe_ends
from experiments.results import Row

SEEDS = (3, 5)
"""Initialisations at either scale."""
CLASSES, SHOWN, ONE, SECOND, OTHER = 7, 3, 1, 2, "4"
NEAR = 0.1
"""Points by which an accuracy may be below the source's."""


def run(context: RecipeContext) -> Outcome:
    """Decompose the first model of either data set; measure all."""
    numbers: dict[str, Any] = {}
    figures: dict[str, Figure] = {}
    for key, data, weight_decay, source in (
        ("mnist", context.mnist, 0.5, 0.9805),
        ("fashion_mnist", context.fashion, 1.0, None),
    ):
        training = ClassifierTraining(weight_decay=weight_decay, input_noise=1.0)
        models = context.classifiers(data, training, context.seed_range(SEEDS))
        spectrum = class_spectra(models[0])
        names = data.class_names[:CLASSES]
        for label, name in enumerate(names):
            size = spectrum[label].activations(data.test_images).mean(0).abs()
            ordered = spectrum[label].ordered_by(size).oriented(data.test_images)
            figures[f"{key}-{label}"] = eigenvector_figure(
                ordered, data.test_images, data.shape, title=f"{data.name}: {name}", k=SHOWN
            )
        numbers[key] = {
            "accuracies": [m.accuracy(data.test_images, data.test_labels) for m in models],
            "source_accuracy": source,
            "eigenvalue_rank_of_most_active": {
                name: eigenvalue_rank_of_most_active(spectrum[label], data)
                for label, name in enumerate(names)
            },
        }
        if key == "mnist":
            figures |= class_figures(spectrum[ONE], data, ONE, k=SHOWN)
            numbers["digit_1"] = describe_ends(spectrum[ONE], data, SHOWN)
    of_one = numbers["digit_1"]["positive"][0]["top_inputs"]
    rows = [
        Row(
            "MNIST: fours among the three top images of the first eigenvector of a one",
            sum(name == OTHER for name in of_one),
            n=1,
            source=SHOWN,
            held=all(name == OTHER for name in of_one),
        )
    ]
    for key, name, source in (("mnist", "MNIST", 98.05), ("fashion_mnist", "Fashion-MNIST", None)):
        accuracies = numbers[key]["accuracies"]
        row = Row.of_shares(f"{name}: accuracy", accuracies, scale=100, unit="%", source=source)
        held = None if source is None else 100 * fmean(accuracies) >= source - NEAR
        rows.append(replace(row, held=held))
        ranks = numbers[key]["eigenvalue_rank_of_most_active"].values()
        often = sum(rank <= SECOND for rank in ranks) / len(ranks)
        claim = f"{name}: share of classes whose most active eigenvector is the first or second"
        rows.append(Row(claim, often, n=len(ranks), held=often > 1 / 2))
    return Outcome(numbers, figures, rows=rows)


def eigenvalue_rank_of_most_active(spectrum: Spectrum, data: ImageData) -> int:
    """Return the rank by eigenvalue, from 1, of the eigenvector of largest mean activation."""
    most = spectrum.activations(data.test_images).mean(0).argmax()
    return 1 + int((spectrum.values > spectrum.values[most]).sum())
