"""MNIST case study, the digit basis: the eigenvectors of each digit's logit.

Reproduces "The MNIST digit basis" of Pearce & Dooms 2024: the whole model, from pixels to logits,
is one interaction matrix for each digit. The model is theirs: one bilinear layer on the pixels,
with biases, trained with weight decay 1. Shown are the eigenvectors of the three largest and of the
three most negative eigenvalues of each digit, at two widths. Measured are the test accuracy, that
with those six eigenvectors, and the accuracy of a ReLU of equal size at the larger width.

The source has 97.8 % at d = 1000, ReLUs "similar", and cleaner pictures with width. Clean is
measured twice: the share of squares in the outer four pixels of the first eigenvectors, and their
best match in another model.

Pixels that few images light have small gradients, and AdamW divides a gradient by its usual size,
so that their weights grow like all others. With a larger epsilon in that division they do not.

Small: d = 300 and 1000, 10 epochs, 3 initialisations, a quarter of an hour on one core. Paper: 20
epochs.
"""

from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

import torch

from bilens.data import ImageData
from bilens.tensor import Spectrum
from experiments.case import ENDS, SEEDS, PixelModel, eigenvector_figure, pixel_models
from experiments.context import Outcome, RecipeContext
from experiments.fig4 import similarity_curves
from experiments.fig5 import border_share
from experiments.results import Row

__all__ = ["SEEDS", "run"]

LEAST_SEEDS = 2
"""Each model is compared with others."""
WIDTHS = (300, 1000)
RARE = 0.01
"""Share of the training images below which a pixel is rarely lit."""
EPSILON = 1e-3
MATCHED = 20
"""Positive eigenvectors of another model among which the best match is."""


def run(context: RecipeContext) -> Outcome:
    """Decompose the logits of models of each width."""
    data, largest = context.mnist, max(WIDTHS)
    of_relu = pixel_models(context, largest, relu=True)
    beside = {"a ReLU, equal size": 100 * fmean(model.accuracy(data) for model in of_relu)}
    rows, figures = list[Row](), {}
    for width in WIDTHS:
        models = pixel_models(context, width)
        spectra = [model.class_spectra() for model in models]
        rows += rows_of(f"d = {width}", models, spectra, data, beside if width == largest else {})
        title = f"Eigenvectors of each digit's logit, d = {width}"
        names = data.class_names
        figures[f"digits-{width}"] = eigenvector_figure(spectra[0], names, data, title=title)
    models = pixel_models(context, min(WIDTHS), eps=EPSILON)
    name = f"d = {min(WIDTHS)}, epsilon {EPSILON:g}"
    spectra = [model.class_spectra() for model in models]
    rows += rows_of(name, models, spectra, data, {})
    settings = {
        "eigenvectors": [2 * ENDS, ENDS],
        "d_model": WIDTHS,
        "rare": RARE,
        "epsilon": EPSILON,
    }
    return Outcome({}, figures, rows=rows, settings=settings)


def rows_of(
    name: str,
    models: Sequence[PixelModel],
    spectra: Sequence[Spectrum],
    data: ImageData,
    beside: Mapping[str, float],
) -> list[Row]:
    """Return what models of one kind say of the source's claims."""
    percent: dict[str, Any] = {"scale": 100, "unit": "%"}
    accuracies = [model.accuracy(data) for model in models]
    six, other = list[float](), list[float]()
    generator = torch.Generator().manual_seed(0)
    for spectrum in spectra:
        six.append(accuracy_of(spectrum.outermost(ENDS), data))
        at_random = torch.randperm(spectrum.k, generator=generator)[: 2 * ENDS]
        other.append(accuracy_of(spectrum.select(at_random), data))
    positive = [first_positive(spectrum, data) for spectrum in spectra]
    rare = (data.train_images > 0).double().mean(0) < RARE
    on_rare = [float(v[:, 0, rare].square().sum(-1).mean()) for v in positive]
    rims = [border_share(vectors[:, 0], data.shape) for vectors in positive]
    even = torch.ones(1, data.n_inputs)
    matches = similarity_curves(positive, positive, ranks=ENDS)  # type: ignore[arg-type]
    swapped = [vectors.roll(1, 0) for vectors in positive]
    another = fmean(fmean(curve) for curve in similarity_curves(positive, swapped, ranks=ENDS))  # type: ignore[arg-type]
    return [
        Row.of_shares(f"{name}: accuracy", accuracies, baselines=beside, **percent),
        Row.of_shares(
            f"{name}: accuracy with the {2 * ENDS} outermost eigenvectors of each digit",
            six,
            baselines={"with as many random ones": 100 * fmean(other)},
            **percent,
        ),
        Row.of_shares(
            f"{name}: share of the periphery in the first eigenvectors",
            rims,
            baselines={"of all pixels": border_share(even, data.shape)},
        ),
        Row.of_shares(
            f"{name}: share of pixels that fewer than {RARE:g} of the images light",
            on_rare,
            baselines={"of all pixels": float(rare.double().mean())},
        ),
        Row.of_shares(
            f"{name}: best match of the first {ENDS} positive eigenvectors in another model",
            [fmean(curve) for curve in matches],
            baselines={"of another digit": another},
        ),
    ]


def accuracy_of(spectrum: Spectrum, data: ImageData) -> float:
    """Return the accuracy of logits that are made of these eigenvectors alone."""
    right = spectrum(data.test_images).argmax(-1) == data.test_labels
    return float(right.double().mean())


def first_positive(spectrum: Spectrum, data: ImageData) -> torch.Tensor:
    """Return the first positive eigenvectors of each digit, (digits, MATCHED, pixels)."""
    vectors = spectrum.outermost(MATCHED).vectors[:, :MATCHED, : data.n_inputs]
    return vectors / vectors.norm(dim=-1, keepdim=True)
