"""Masks: pictures from one digit's eigenvectors that turn other digits into it.

A mask is added to every test image of another digit, and the sum clipped to the range of an image.
Measured, against its length, is the share of images that the model then assigns to the digit of the
mask (targeted), or to any digit but their own (fooled), both as means over the ten digits. For
comparison each digit has five Gaussian masks of equal length, and five with the mask's own pixels
in random places.

The masks come from the weights only: `bilens.images.class_mask`. The models are the single-layer
ones of Pearce et al. 2024, d = 300 and 20 epochs, with the regularisation of their Table 2 (weight
decay 0.5, input noise 1.0) and with none. The source proposes no such attack and has no numbers.

Small: 3 initialisations of either kind on 1,000 test images, 12 minutes on one core. Paper: 10
initialisations on all 10,000, about an hour.
"""

from statistics import fmean
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from bilens.images import attack, class_mask
from bilens.nn import ImageClassifier
from bilens.train import ClassifierTraining
from experiments.context import Outcome, RecipeContext
from experiments.curves import Line, line_figure, picture_figure, spread_line
from experiments.results import Row, interval

SEEDS = (3, 10)
"""Initialisations at either scale."""
NORMS = (1.0, 2.0, 3.0, 4.0, 6.0, 8.0)
DRAWS, COLUMNS = 5, 5
SETTINGS = {
    "regularised": ClassifierTraining(),
    "unregularised": ClassifierTraining(weight_decay=0.0, input_noise=0.0),
}
MEASURES = ("targeted", "fooled")
KINDS = ("mask", "its pixels scattered", "Gaussian")
Curves = dict[tuple[str, str], list[float]]
"""By the kind of mask and the measure: a share for each norm."""


def run(context: RecipeContext) -> Outcome:
    """Attack models with and without regularisation."""
    data = context.mnist
    images = context.choose(1000, 10_000)
    x, labels = data.test_images[:images], data.test_labels[:images]
    by_name: dict[str, Any] = {}
    lines: dict[str, list[Line]] = {measure: [] for measure in MEASURES}
    stated: list[Row] = []
    rows = {}
    for name, training in SETTINGS.items():
        models = context.classifiers(data, training, context.seed_range(SEEDS))
        curves = [success(model, x, labels, seed) for seed, model in enumerate(models)]
        accuracies = [model.accuracy(data.test_images, data.test_labels) for model in models]
        by_name[name] = {"accuracy": interval(accuracies)}
        last = {kind: [curve[kind, "targeted"][-1] for curve in curves] for kind in KINDS}
        stated.append(
            Row.of_shares(
                f"{name}: images of other digits taken for the mask's, length {NORMS[-1]:g}",
                last[KINDS[0]],
                scale=100,
                unit="%",
                baselines={kind: 100 * fmean(last[kind]) for kind in KINDS[1:]},
            )
        )
        for kind, measure in curves[0]:
            samples = [curve[kind, measure] for curve in curves]
            shares = [interval(values) for values in zip(*samples, strict=True)]
            by_name[name][f"{measure}, {kind}"] = dict(zip(map(str, NORMS), shares, strict=True))
            lines[measure].append(spread_line(f"{kind}, {name}", NORMS, samples))
        masks = _masks(models[0])
        pairs = list(zip(masks, data.class_names, strict=True))
        for start in range(0, len(pairs), COLUMNS):
            row = pairs[start : start + COLUMNS]
            rows[f"{name}, {row[0][1]}-{row[-1][1]}"] = row
    numbers = {"length_of_a_test_image": float(x.norm(dim=1).mean()), "models": by_name}
    figures = {
        measure: line_figure(
            lines[measure],
            title=f"Images of other digits {text}",
            x_title="length of the mask",
            y_title="share of them",
        )
        for measure, text in zip(
            MEASURES, ("taken for the mask's digit", "taken for another digit"), strict=True
        )
    }
    pictures = picture_figure(rows, data.shape, title="Masks")
    settings = {"images": images, "length": NORMS[-1]}
    return Outcome(numbers, {**figures, "masks": pictures}, rows=stated, settings=settings)


def success(
    model: ImageClassifier,
    x: Float[Tensor, "samples n_pixels"],
    labels: Int[Tensor, " samples"],
    seed: int,
) -> Curves:
    """Measure masks from the weights and random ones, by norm; a mean over classes and draws."""
    masks = _masks(model)
    generator = torch.Generator().manual_seed(seed)
    n_classes, n_pixels = masks.shape
    order = torch.rand(DRAWS, n_classes, n_pixels, generator=generator).argsort(-1)
    kinds = {
        "mask": masks[None],
        "its pixels scattered": masks.expand(DRAWS, -1, -1).gather(-1, order),
        "Gaussian": torch.randn(DRAWS, n_classes, n_pixels, generator=generator),
    }
    curves: Curves = {}
    for kind, drawn in kinds.items():
        attacks = [
            [
                attack(model, x, labels, mask, label=label, norm=norm)
                for draw in drawn
                for label, mask in enumerate(draw)
            ]
            for norm in NORMS
        ]
        curves[kind, "targeted"] = [fmean(a.targeted for a in group) for group in attacks]
        curves[kind, "fooled"] = [fmean(a.fooled for a in group) for group in attacks]
    return curves


def _masks(model: ImageClassifier) -> Float[Tensor, "classes n_pixels"]:
    return class_mask(model.tensor().interaction(output=range(model.config.n_classes)).eigh())
