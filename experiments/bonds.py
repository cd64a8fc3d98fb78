"""Bonds: deep image models on the few directions between their layers, beside baselines.

Even thousands of the best eigenvector paths of a three-layer model lose more than a point of
accuracy. This recipe counts the directions that each bond needs instead. Models have three layers
on MNIST and Fashion-MNIST, at the paper's scale two to five. The number is the same at every bond.
It is the smallest that loses less than a point of test accuracy, as do all larger ones, and the
smallest that reaches 95.2 %, where models are compared that differ in accuracy.
Directions are

- those of the tree, over the training images or from the weights;
- those of the function, for the change of the probabilities of the classes. Inputs are training
  images, a Gaussian with their mean and covariance, or standard normal;
- those of the function for the change of the logits, on training images;
- principal components on training images (PCA), a baseline;
- PCA in the metric of the gradients of the cross-entropy with the labels, a baseline;
- principal directions of the weights on both sides of a bond, D D' in the metric of L'L + R'R, a
  baseline;
- random ones.

Then both kinds of bonds are cut to few directions. These are chosen on training images for a loss
of at most a point, and tested on the test images.

The inside of a cut is measured for three-layer models: how many of its products of two coordinates
lose less than a point of the cut's accuracy. Coordinates are those of the singular values, or of a
random basis.

The tree's method is that of Dooms et al. 2025 (arXiv 2504.02667, appendix G) without its dense
cores; the numbers there are of other models.

Small: 5 initialisations of both models of three layers. Paper: 5 of seven models. Numbers of each
model are saved beside the models, so a stopped recipe resumes.
"""

import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from bilens.data import ImageData
from bilens.images import (
    accurate_ranks,
    classifier_bonds,
    classifier_function_bonds,
    held_out,
    read_bonds,
)
from bilens.nn import ImageClassifier
from bilens.pages import network_figure
from bilens.tensor import BilinearTensor, Bonds, Cut, Moments, balanced_bonds, with_constant
from bilens.train import ClassifierTraining
from experiments.context import Outcome, RecipeContext
from experiments.curves import Line, line_figure, spread_line
from experiments.fig6 import TRAINING
from experiments.results import Row, interval

SEEDS = (5, 5)
"""Initialisations at either scale."""
THREE = (3, 100, ClassifierTraining(epochs=8, decay=0.7, weight_decay=0.1, input_noise=0.5))
MODELS = {
    "three layers": ("mnist", *THREE, False),
    "three layers, Fashion-MNIST": ("fashion", *THREE, False),
    "three layers, biases and residuals": ("mnist", *THREE, True),
    "three layers, d = 128": ("mnist", 3, 128, THREE[2], False),
    "four layers, biases and residuals": ("mnist", 4, 100, THREE[2], True),
    "five layers, biases and residuals": ("mnist", 5, 100, THREE[2], True),
    "two layers": ("mnist", 2, 300, TRAINING, False),
}
DROP, REACHED, MOST, STEP, INSIDE, PER_DECADE = 0.01, 0.952, 60, 4, 30, 40


def run(context: RecipeContext) -> Outcome:
    """Cut models of several layers."""
    seeds = context.seed_range(SEEDS)
    numbers: dict[str, Any] = {}
    lines: list[Line] = []
    stated: list[Row] = []
    for name in context.choose(tuple(MODELS)[:2], MODELS):
        models, data = _models(context, name, seeds)
        rows = [
            context.measured(f"bonds-{name}-{seed}", partial(_of_model, model, data))
            for seed, model in enumerate(models, start=context.seed)
        ]
        numbers[name] = {
            "accuracy": interval([row["accuracy"] for row in rows]),
            "uniform": {key: [row["uniform"][key] for row in rows] for key in METHODS},
            "reach": {key: [row["reach"][key] for row in rows] for key in METHODS},
            "cut": {key: [row["cut"][key] for row in rows] for key in CHOSEN},
        }
        stated += _rows(name, rows)
        drops = [[100 * drop for drop in row["curve"]] for row in rows]
        lines.append(spread_line(name, range(1, MOST + 1, STEP), drops))
    three, mnist = _models(context, "three layers", seeds)
    inside = numbers["inside a cut"] = [
        context.measured(f"bonds-inside-{INSIDE}-{seed}", partial(_inside, model, mnist))
        for seed, model in enumerate(three, start=context.seed)
    ]
    stated += _rows_inside(inside)
    figures = {
        "directions": line_figure(
            lines,
            title="Accuracy lost by keeping few directions at each bond",
            x_title="directions at each bond",
            y_title="accuracy drop (points)",
        ),
        "network": network_figure(read_bonds(three[0], mnist).cut_reading, 3, mnist.shape),
    }
    settings = {
        "d_model": [100, 128, 300],
        "directions of a cut whose products are counted": INSIDE,
        "most directions": MOST,
        "low and high": f"range over seeds, in which {MOST + 1} are more than {MOST}",
    }
    return Outcome(numbers, figures, rows=stated, settings=settings)


def _rows(name: str, measured: Sequence[dict[str, Any]]) -> list[Row]:
    """Return the rows of a model from several seeds; what is never enough counts as MOST + 1."""
    needed = {
        method: [row["uniform"][method] or MOST + 1 for row in measured] for method in METHODS
    }
    middles = {method: statistics.median(counts) for method, counts in needed.items()}
    # More than MOST are no number of directions.
    others = {method: None if k > MOST else k for method, k in middles.items()}
    cuts = [row["cut"][CHOSEN[0]] for row in measured]
    between = [rank for cut in cuts for rank in cut["ranks"][1:]]
    accuracies = [100 * row["accuracy"] for row in measured]
    return [
        Row.of_range(f"{name}: accuracy", accuracies, unit="%"),
        Row.of_range(
            f"{name}: directions at every bond that lose less than a point",
            needed[CHOSEN[0]],
            baselines={method: others[method] for method in BESIDE},
        ),
        Row.of_range(
            f"{name}: from weights alone",
            needed["function, standard normal"],
            baselines={"singular vectors of neighbouring weights": others["weights"]},
        ),
        Row.of_range(f"{name}: directions between two layers, of training images", between),
        Row.of_range(
            f"{name}: points that this cut loses on test images",
            [100 * cut["drop"] for cut in cuts],
        ),
    ]


def _rows_inside(inside: Sequence[dict[str, Any]]) -> list[Row]:
    """Return what cuts lose, and how many of their products keep their accuracy within a point."""
    in_random = statistics.median(cut["needed_in_a_random_basis"] for cut in inside)
    cut_to = f"three layers, cut to {INSIDE}"
    return [
        Row.of_range(
            f"{cut_to}: points that all products lose", [100 * cut["drop"] for cut in inside]
        ),
        Row.of_range(
            f"{cut_to}: products by singular values that lose less than a point more",
            [cut["needed_by_singular_values"] for cut in inside],
            baselines={"random basis": in_random, "all products": inside[0]["products"]},
        ),
    ]


def _models(
    context: RecipeContext, name: str, seeds: range
) -> tuple[list[ImageClassifier], ImageData]:
    """Return the models of a name, trained as one if they do not exist, and their data."""
    source, layers, d_model, training, extended = MODELS[name]
    data: ImageData = getattr(context, source)
    models = context.classifiers(
        data, training, seeds, d_model=d_model, layers=layers, affine=extended
    )
    return models, data


def _of_model(model: ImageClassifier, data: ImageData) -> dict[str, Any]:
    """Measure the directions that a model needs, and its cuts."""
    bonds_of = {name: method(model, data) for name, method in METHODS.items()}
    full = model.accuracy(data.test_images, data.test_labels)
    curve_of = _uniform_accuracies(bonds_of[CHOSEN[0]], data)
    return {
        "accuracy": full,
        "uniform": {name: _needed(method, data, full - DROP) for name, method in bonds_of.items()},
        "reach": {name: _needed(method, data, REACHED) for name, method in bonds_of.items()},
        "cut": {name: _chosen_cut(bonds_of[name], data, full) for name in CHOSEN},
        "curve": [full - curve_of(k) for k in range(1, MOST + 1, STEP)],
    }


def _needed(directions: Bonds, data: ImageData, least: float) -> int | None:
    """Return the fewest directions at each bond that keep this accuracy, as do all more.

    From the most down in steps, and one by one in the last step.
    """
    accuracy, needed = _uniform_accuracies(directions, data), None
    for step in (STEP, 1):
        for k in range(needed - step if needed else MOST, 0, -step):
            if accuracy(k) < least - 1e-9:
                break
            needed = k
    return needed


def _uniform_accuracies(directions: Bonds, data: ImageData) -> Callable[[int], float]:
    """Return the function from a number of directions at each bond to test accuracy."""
    # Smaller cuts have the first coordinates of the input that larger ones have.
    z = directions.cut(MOST).coordinates(data.test_images)[0].float()

    def accuracy(k: int) -> float:
        cut = directions.cut(k)
        outputs = z[:, : cut.ranks[0]]
        for core in cut.cores:
            outputs = core.to(torch.float32)(outputs)
        return float((outputs.argmax(-1) == data.test_labels).double().mean())

    return accuracy


def _chosen_cut(directions: Bonds, data: ImageData, full: float) -> dict[str, Any]:
    """Choose directions on training images, and test the cut."""
    # Time of the processor, which other work beside this does not change.
    start = time.process_time()
    ranks = accurate_ranks(directions, data, DROP)
    seconds = time.process_time() - start
    logits = directions.cut(max(bond.k for bond in directions.bonds))(data.test_images)
    tested = held_out(logits, directions.cut(ranks)(data.test_images), data.test_labels)
    return {
        "ranks": list(ranks),
        "total": sum(ranks),
        "drop": full - tested.accuracy,
        "interval": list(tested.interval),
        "error": tested.error,
        "error_bound": tested.error_bound,
        "certificate": directions.certificate(ranks),
        "seconds": round(seconds, 1),
    }


def _baseline(name: str) -> Callable[[ImageClassifier, ImageData], Bonds]:
    """Return the function that computes the directions of a baseline, as bonds."""

    def compute(model: ImageClassifier, data: ImageData) -> Bonds:
        tensors, W = centred_chain(model, data)
        E = model.embedding().double()
        # Evenly spaced, since images may be sorted by class.
        x = data.train_images.double()[:: max(1, len(data.train_images) // 4096)][:4096]
        x = with_constant(x) if tensors[0].constant else x
        step = max(1, len(data.train_images) // len(x))
        labels = data.train_labels[::step][: len(x)]
        moments = loss_moments(tensors, E, x, labels)
        if name == "PCA":
            moments = replace(moments, gradients=tuple(map(_identity, moments.vectors)))
        if name == "weights":
            moments = weight_moments(tensors, E, moments)
        if name == "random":
            random = tuple(_random_order(P) for P in moments.vectors)
            moments = replace(
                moments, vectors=tuple(map(_identity, moments.vectors)), gradients=random
            )
        return balanced_bonds(tensors, W, moments, E)

    return compute


def centred_chain(model: ImageClassifier, data: ImageData) -> tuple[list[BilinearTensor], Tensor]:
    """Return the joined layers of the logits minus their mean in float64, and their directions."""
    n = data.n_classes
    *lower, last = (tensor.to(torch.float64) for tensor in model.layer_tensors())
    W = torch.eye(n, dtype=torch.float64)
    tensors = [*lower, last.change_basis(outputs=W - 1 / n)]
    # From the top: a layer that passes the constant on has to read it itself.
    for i in range(len(tensors) - 1, 0, -1):
        if tensors[i].n_in == tensors[i - 1].n_out + 1:
            tensors[i - 1] = tensors[i - 1].with_constant_output()
    return tensors, W


def loss_moments(
    tensors: Sequence[BilinearTensor], E: Tensor, x: Tensor, labels: Tensor
) -> Moments:
    """Return second moments of vectors and of gradients of the cross-entropy with the labels."""
    vectors = [(x @ E.T).requires_grad_()]
    with torch.enable_grad():
        for tensor in tensors:
            vectors.append(tensor(vectors[-1]))
        loss = torch.nn.functional.cross_entropy(vectors[-1], labels, reduction="sum")
        gradients = torch.autograd.grad(loss, vectors[:-1])
    plain = [h.detach() for h in vectors]
    return Moments(
        vectors=tuple(h.T @ h / len(x) for h in plain[:-1]),
        gradients=tuple(g.T @ g / len(x) for g in gradients),
        cross=x.T @ plain[0] / len(x),
        square=float(plain[-1].square().sum(-1).mean()),
        n_samples=len(x),
    )


def weight_moments(tensors: Sequence[BilinearTensor], E: Tensor, moments: Moments) -> Moments:
    """Return D D' of the layer below each bond, and L'L + R'R of the layer above."""
    writes = [E, *(tensor.out for tensor in tensors[:-1])]
    return replace(
        moments,
        vectors=tuple(D @ D.T for D in writes),
        gradients=tuple(t.left.T @ t.left + t.right.T @ t.right for t in tensors),
    )


def _identity(P: Tensor) -> Tensor:
    return torch.eye(len(P)).to(P)


def _random_order(P: Tensor) -> Tensor:
    """Return a matrix whose eigenvectors are a random orthonormal basis."""
    generator = torch.Generator().manual_seed(0)
    Q, _ = torch.linalg.qr(torch.randn(P.shape, generator=generator, dtype=P.dtype))
    return Q @ torch.linspace(1, 2, len(P), dtype=P.dtype).diag() @ Q.T


METHODS: dict[str, Callable[[ImageClassifier, ImageData], Bonds]] = {
    "function, images": classifier_function_bonds,
    "tree, images": classifier_bonds,
    "function, Gaussian": partial(classifier_function_bonds, metric="gaussian"),
    "function, standard normal": partial(classifier_function_bonds, metric="weights"),
    "tree, weights": partial(classifier_bonds, metric="weights"),
    "function of logits, images": partial(classifier_function_bonds, measure="outputs"),
    **{
        name: _baseline(name)
        for name in ("PCA", "PCA with gradients of the loss", "weights", "random")
    },
}
BESIDE = (
    *("tree, images", "function of logits, images"),
    *("PCA", "PCA with gradients of the loss", "random"),
)
CHOSEN = ("function, images", "tree, images", "function, Gaussian", "function, standard normal")


def _inside(model: ImageClassifier, data: ImageData) -> dict[str, Any]:
    """Measure products of a cut to a few directions more than needed."""
    cut = classifier_bonds(model, data).cut(INSIDE)
    generator = torch.Generator().manual_seed(0)
    turns = [
        torch.linalg.qr(torch.randn(k, k, generator=generator, dtype=torch.float64)).Q
        for k in cut.ranks
    ]
    return {
        "ranks": list(cut.ranks),
        "drop": model.accuracy(data.test_images, data.test_labels) - _accuracy(cut.tensors(), data),
        "products": len(cut.products()),
        "needed_by_singular_values": needed_products(cut, data),
        "needed_in_a_random_basis": needed_products(cut.rotate(turns), data),
    }


def needed_products(cut: Cut, data: ImageData) -> int:
    """Return the fewest products that lose less than a point of all products, as do all more."""
    needed = len(cut.products())
    full = _accuracy(cut.keep_products(needed), data)
    for k in reversed(product_counts(needed)):
        if full - _accuracy(cut.keep_products(k), data) > DROP + 1e-9:
            break
        needed = k
    return needed


def product_counts(most: int) -> list[int]:
    """Return the numbers of products that are measured, evenly spaced on a logarithmic scale."""
    steps = range(1 + int(PER_DECADE * math.log10(most)))
    return sorted({round(10 ** (step / PER_DECADE)) for step in steps})


def _accuracy(chain: Sequence[BilinearTensor], data: ImageData) -> float:
    outputs = data.test_images.double()
    for tensor in chain:
        outputs = tensor(outputs)
    return float((outputs.argmax(-1) == data.test_labels).double().mean())
