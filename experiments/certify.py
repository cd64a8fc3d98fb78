"""Certified radii: the nearest picture of another answer, for every test picture.

Of one bilinear layer the radius is exact (`bilens.certify`). Measured: whether answers change at
1.001 of it and not at 0.999, whether attacks inside it ever succeed, what training does to it, for
how many pictures a cut model answers as the model within a radius, how far the range of pixels
moves the nearest picture, and from which depth on the layer-wise bound says nothing. Of texts, how
little a list of skip-trigrams proves (`experiments.every_text`). PNVerification
(arXiv 2209.07235) needs 5.6 s for a picture and a pair of classes, by branch and bound, on other
networks and another machine; its README has the number.

Small: 3 initialisations of 5 epochs, 20 minutes on one core. Paper: 20 epochs.
"""

import time
from copy import deepcopy
from statistics import fmean
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from bilens.data import ImageData
from bilens.images import CertifiedRadii, box_bounds, certify, proved_agreement
from bilens.nn import ImageClassifier
from bilens.train import ClassifierTraining
from experiments import every_text
from experiments.context import Outcome, RecipeContext
from experiments.results import Row

SEEDS = (3, 3)
"""Initialisations at either scale."""
SETTINGS: dict[str, dict[str, Any]] = {
    "noise and decay": {},
    "decay alone": {"input_noise": 0.0},
    "noise alone": {"weight_decay": 0.0},
    "neither": {"input_noise": 0.0, "weight_decay": 0.0},
}
RANKS, RADII = (10, 20), (0.1, 0.3, 0.5)
ATTACKED, RESTARTS, STEPS = 1000, 20, 50
NOISE = 0.3
"""Standard deviation of noise on each pixel; training has as much on digits."""


def run(context: RecipeContext) -> Outcome:
    """Certify classifiers of both data sets, of each training, and of two and three layers."""
    epochs = context.choose(5, 20)
    seeds = context.seed_range(SEEDS)
    rows: list[Row] = []
    numbers: dict[str, Any] = {}
    for data in (context.mnist, context.fashion):
        training = ClassifierTraining(epochs=epochs)
        models = context.classifiers(data, training, seeds)
        rows += exact_rows(models, data)
        rows += agreement_rows(models, data)
        rows += box_rows(models[0], data)
        for layers in (2, 3):
            deep = context.classifiers(data, training, seeds, layers=layers)
            rows.append(deep_row(deep, data, layers))
    data, medians = context.mnist, {}
    for name, changes in SETTINGS.items():
        training = ClassifierTraining(epochs=epochs, **changes)
        models = context.classifiers(data, training, seeds)
        radii = [certify(m, data.test_images, data.test_labels) for m in models]
        medians[name] = [median_radius(reading) for reading in radii]
        accuracy = fmean(len(reading.right) / len(reading.labels) for reading in radii)
        why = [why_of(m, x, data) for m, x in zip(models, radii, strict=True)]
        beside = {key: fmean(row[key] for row in why) for key in why[0]}
        rows.append(Row.of(f"median radius, trained with {name}", medians[name], baselines=beside))
        numbers[name] = {"median radii": medians[name], "accuracy": accuracy}
    rows += every_text.text_rows(context)
    settings = {
        "epochs": epochs,
        "pictures attacked": ATTACKED,
        "restarts of an attack": RESTARTS,
        "steps of an attack": STEPS,
        "shares of the radius": [0.999, 1.001],
        "eigenvectors": list(RANKS),
        "radii": list(RADII),
        "noise on each pixel": NOISE,
        "words, places, width and heads of the model of texts": every_text.SIZES,
        "skip-trigrams": list(every_text.LISTED),
    }
    return Outcome(numbers, rows=rows, settings=settings)


def median_radius(reading: CertifiedRadii) -> float:
    """Return the median radius of right answers."""
    return float(reading.radius[reading.right].median())


def why_of(model: ImageClassifier, reading: CertifiedRadii, data: ImageData) -> dict[str, float]:
    """Return the parts of a median radius: margin and slope to the nearest other answer.

    Beside them is how many answers change under noise, which training with noise is for.
    """
    wide, right = deepcopy(model).double(), reading.right
    x = reading.x[right].double().requires_grad_()
    ends = torch.stack([reading.labels[right], reading.other[right]], 1)
    with torch.enable_grad():
        logits = wide(x).gather(1, ends)
        margins = logits[:, 0] - logits[:, 1]
        (slopes,) = torch.autograd.grad(margins.sum(), x)
    noise = torch.randn(data.test_images.shape, generator=torch.Generator().manual_seed(0))
    noisy = data.test_images[right] + NOISE * noise[right]
    changed = model(noisy).argmax(-1) != reading.labels[right]
    lengths = slopes.norm(dim=1)
    return {
        "right": len(right) / len(reading.labels),
        "margin": float(margins.detach().median()),
        "slope": float(lengths.median()),
        "margin over slope": float((margins.detach() / lengths).median()),
        "answers that noise changes": float(changed.double().mean()),
    }


def exact_rows(models: list[ImageClassifier], data: ImageData) -> list[Row]:
    """Return whether radii are exact: answers beyond and within them, and attacks."""
    beyond, within, seconds, medians = (list[float]() for _ in range(4))
    broken: list[bool] = []
    for seed, model in enumerate(models):
        start = time.process_time()
        reading = certify(model, data.test_images, data.test_labels)
        seconds.append(time.process_time() - start)
        medians.append(median_radius(reading))
        wide, right = deepcopy(model).double(), reading.right
        assert reading.change is not None
        x, labels = reading.x[right].double(), reading.labels[right]
        for scale, shares in ((1.001, beyond), (0.999, within)):
            answers = wide(x + scale * reading.change[right]).argmax(-1)
            shares.append(float((answers != labels).double().mean()))
        if not seed:  # an hour of a core for all of them
            # In float64: of single precision rounding decides where a radius is below 0.001.
            inside = 0.999 * reading.radius[right][:ATTACKED]
            broken = attacked(wide, x[:ATTACKED], labels[:ATTACKED], inside)
    about = f"{data.name}: "
    pairs = len(data.class_names) - 1
    per_pair = [s / len(reading.right) / pairs for s in seconds]
    return [
        Row.of(about + "median radius of right answers", medians),
        Row.of(about + "answers that change at 1.001 of the radius", beyond),
        Row.of(about + "answers that change at 0.999 of the radius", within),
        Row.of_share(about + "attacks inside the radius that succeed", broken),
        Row.of(about + "seconds for all right test pictures", seconds, unit="s"),
        Row.of(
            about + "milliseconds a picture and pair of classes",
            per_pair,
            scale=1000,
            unit="ms",
            baselines={"PNVerification, by its README": 5600.0},
        ),
    ]


def attacked(
    model: ImageClassifier,
    x: Float[Tensor, "samples n_pixels"],
    labels: Int[Tensor, " samples"],
    radius: Float[Tensor, " samples"],
) -> list[bool]:
    """Return which pictures an attack of steps along the margin's gradient changes."""
    generator = torch.Generator().manual_seed(0)
    changed: Bool[Tensor, " samples"] = torch.zeros(len(x), dtype=torch.bool)
    own = labels[:, None]
    for restart in range(RESTARTS):
        d = torch.randn(x.shape, generator=generator, dtype=x.dtype) * bool(restart)
        d = within_ball(d, radius)
        for _ in range(STEPS):
            picture = (x + d).requires_grad_()
            logits = model(picture)
            margin = logits.gather(1, own)[:, 0] - logits.scatter(1, own, -torch.inf).amax(1)
            changed |= margin < 0
            (slope,) = torch.autograd.grad(margin.sum(), picture)
            step = radius[:, None] / 8 * slope / slope.norm(dim=-1, keepdim=True)
            d = within_ball(d - step, radius)
        changed |= model(x + d).argmax(-1) != labels
    result: list[bool] = changed.tolist()
    return result


def within_ball(
    d: Float[Tensor, "samples n_pixels"], radius: Float[Tensor, " samples"]
) -> Float[Tensor, "samples n_pixels"]:
    """Return changes that are as long as a radius, or as they are if they are shorter."""
    scale: Tensor = (radius / d.norm(dim=-1).clamp_min(1e-12)).clamp_max(1)
    return d * scale[:, None]


def agreement_rows(models: list[ImageClassifier], data: ImageData) -> list[Row]:
    """Return for how many pictures a few eigenvectors answer as the model within a radius."""
    rows = []
    for k in RANKS:
        shares = [proved_agreement(model, k, data.test_images, (0.0, *RADII)) for model in models]
        equal = fmean(share[0.0] for share in shares)
        for radius in RADII:
            claim = f"{data.name}: {k} eigenvectors a class answer as the model within {radius:g}"
            values = [share[radius] for share in shares]
            rows.append(Row.of(claim, values, baselines={"on the picture itself": equal}))
    return rows


def box_rows(model: ImageClassifier, data: ImageData) -> list[Row]:
    """Return the gap between both bounds where pixels stay within their range."""
    reading = certify(model, data.test_images[:ATTACKED], data.test_labels[:ATTACKED])
    right = reading.right
    bounds = box_bounds(model, reading.x[right], reading.labels[right])
    rows = []
    for name, (low, high) in (
        ("Euclidean", bounds.euclidean),
        ("of the largest pixel", bounds.largest),
    ):
        claim = f"{data.name}: pixels in range, length {name}, upper bound"
        # Within the range of pixels no attack may succeed, whatever its length.
        found = high.isfinite()
        without = float((~found).double().mean())
        baselines = {"lower bound": float(low.median()), "share without upper bound": without}
        rows.append(Row.of_range(claim, high[found].tolist(), baselines=baselines))
    return rows


def deep_row(models: list[ImageClassifier], data: ImageData, layers: int) -> Row:
    """Return the share that the layer-wise bound certifies within 0.1."""
    count = {2: "two", 3: "three"}[layers]
    shares, accuracies = [], []
    for model in models:
        x, labels = data.test_images[:ATTACKED], data.test_labels[:ATTACKED]
        reading = certify(model, x, labels)
        shares.append(reading.certified(0.1)[0])
        accuracies.append(len(reading.right) / len(labels))
    claim = f"{data.name}: certified within 0.1, {count} layers"
    return Row.of(claim, shares, baselines={"right": fmean(accuracies)})
