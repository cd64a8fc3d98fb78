"""MNIST case study, the digit basis: the eigenvectors of each digit's logit.

Reproduces "The MNIST digit basis" of Pearce & Dooms 2024: the whole model, from pixels to logits,
is one interaction matrix for each digit. Shown are the eigenvectors of the three largest and of the
three most negative eigenvalues of each. Measured are the test accuracy, that of a network of equal
size with a ReLU, and what is left with those six eigenvectors for each digit.

The source's model is one bilinear layer of d = 1000 on the pixels, trained with weight decay 1, and
has a validation accuracy of 97.8 %. Ours has an embedding before the layer, folded in here, and is
trained with weight decay 1 too and without input noise.

Small: d = 300, 10 epochs, 3 initialisations: 4 minutes on one core, 2 where the models are there
already. Paper: d = 1000, 20 epochs, 3 initialisations: not run, some ten minutes a model.
"""

from statistics import fmean
from typing import Any

from bilens.images import class_spectra
from experiments.case import ENDS, case_models, eigenvector_figure, relu_accuracy
from experiments.context import Outcome, RecipeContext
from experiments.results import Row, interval

SEEDS = (3, 3)
"""Initialisations at either scale."""


def run(context: RecipeContext) -> Outcome:
    """Decompose the logits of one model; measure several."""
    data, seeds = context.mnist, context.seed_range(SEEDS)
    models = case_models(context, seeds)
    with_relu = 100 * fmean(relu_accuracy(context, seed) for seed in seeds)
    accuracies = [model.accuracy(data.test_images, data.test_labels) for model in models]
    spectrum = class_spectra(models[0], basis="pixels")
    ends = spectrum.outermost(ENDS)
    right = ends(data.test_images).argmax(-1) == data.test_labels
    numbers: dict[str, Any] = {
        "accuracy": interval(accuracies),
        "first_model": {
            "accuracy": accuracies[0],
            "accuracy_of_shown": float(right.double().mean()),
            "effective_rank": float(spectrum.effective_rank().mean()),
            "eigenvalues": {
                name: {"positive": values[:ENDS], "negative": values[ENDS:]}
                for name, values in zip(data.class_names, ends.values.tolist(), strict=True)
            },
        },
        "source": {"accuracy": 0.978},
    }
    title = "Eigenvectors of each digit's logit: the largest and the most negative eigenvalues"
    figure = eigenvector_figure(spectrum, data.class_names, data, title=title)
    six = 100 * numbers["first_model"]["accuracy_of_shown"]
    rows = [
        Row.of_shares(
            "accuracy",
            accuracies,
            scale=100,
            unit="%",
            baselines={"a ReLU, equal size": with_relu},
            source=97.8,
            held=round(100 * fmean(accuracies), 1) >= 97.8,
        ),
        Row(
            f"accuracy with the {2 * ENDS} outermost eigenvectors of each digit", six, n=1, unit="%"
        ),
    ]
    settings = {"eigenvectors": 2 * ENDS, "d_model": context.choose(300, 1000)}
    return Outcome(numbers, {"digits": figure}, rows=rows, settings=settings)
