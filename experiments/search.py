"""Search: the strongest eigenvector paths of deep models, without making their trees.

Pearce et al. 2024 call their method limited to shallow models, since a tree grows exponentially
with depth. How many of its paths matter is left open (section 4.2). Models are of MNIST, two layers
of d = 300 and three layers of d = 100. This recipe counts the nodes that `top_paths` decomposes to
find the best 100 paths over all classes, and the seconds. It also measures the test accuracy of the
tree cut to its best k paths, and the k that keeps it within 1 point (0.01) of the model's.

Exactness is measured on three-layer models of d = 8 with random weights, in float64, with and
without biases and residuals. The complete tree is compared with the forward pass on 100 test images
(largest error over largest logit). The best 20 paths are compared with those of the complete tree.

The source has none of these numbers. The two-layer models are those of figure 6. With its weight
decay of 0.5 and input noise of 1.0 three layers may not learn at all. One initialisation of two
ended at a loss of log(10). They have 0.1 and 0.5 instead.

Small: 2 initialisations of each model, some 5 minutes of training on one core (figure 6 shares 1.5
of them), and 3 minutes of search. Paper: 5 initialisations, 20 minutes.
"""

import time
from collections.abc import Sequence
from typing import Any

import torch

from bilens.data import ImageData
from bilens.nn import ClassifierConfig, ImageClassifier
from bilens.read import path_accuracies
from bilens.tensor import decompile, top_paths
from bilens.tensor.chain import make_chain
from bilens.train import ClassifierTraining
from experiments.context import Outcome, RecipeContext, interval
from experiments.curves import Line, line_figure, spread_line
from experiments.fig6 import TRAINING

__all__ = ["exactness", "run", "within"]

MODELS = {
    "two layers": (2, 300, TRAINING),
    "three layers": (
        3,
        100,
        ClassifierTraining(epochs=8, decay=0.7, weight_decay=0.1, input_noise=0.5),
    ),
}
BEST, MOST, FEW = 100, 3000, 20
PER_DECADE = 10
ROUNDING = 1e-9
SMALL_WIDTH, SMALL_SEEDS, IMAGES = 8, 3, 100
Curve = tuple[tuple[int, float], ...]


def run(context: RecipeContext) -> Outcome:
    """Search models of two and of three layers."""
    data = context.mnist
    seeds = context.choose(2, 5)
    numbers: dict[str, Any] = {}
    lines = []
    for name, (layers, d_model, training) in MODELS.items():
        models = context.classifiers(data, training, seeds, d_model=d_model, layers=layers)
        curves = [_curve(model, data) for model in models]
        full = [model.accuracy(data.test_images, data.test_labels) for model in models]
        enough = [within(curve, best, 0.01) for curve, best in zip(curves, full, strict=True)]
        numbers[name] = {
            "d_model": d_model,
            "accuracy": interval(full),
            "accuracy_by_paths": [[list(pair) for pair in curve] for curve in curves],
            "paths_within_1_point": enough,
            f"best_{BEST}": [_effort(model, data.n_classes) for model in models],
        }
        lines.append(_line(f"{name}, d = {d_model}", curves, full))
    numbers["small three-layer models"] = exactness(data)
    figure = line_figure(
        lines,
        title="Accuracy lost by cutting the tree to its best paths",
        x_title="paths kept over all classes",
        y_title="accuracy drop (points)",
    )
    figure.update_xaxes(type="log", dtick=1)
    return Outcome(numbers, {"paths": figure})


def within(curve: Curve, full: float, drop: float) -> int | None:
    """Return the smallest measured k that loses less than `drop`, as do all larger, or None."""
    enough = None
    for k, accuracy in reversed(curve):
        # Accuracies are shares of whole images; their difference is so only up to rounding.
        if full - accuracy > drop - ROUNDING:
            break
        enough = k
    return enough


def exactness(data: ImageData) -> dict[str, dict[str, Any]]:
    """Compare trees with forward passes, and the best paths with those of the trees."""
    x = data.test_images[:IMAGES].double()
    checks = {}
    for bias, residual in ((False, False), (True, False), (False, True), (True, True)):
        tries = []
        for seed in range(SMALL_SEEDS):
            model = _small_model(data, bias, residual, seed)
            tensors, directions = model.tensors(), torch.eye(data.n_classes, dtype=x.dtype)
            tree = decompile(tensors, directions)
            search = top_paths(tensors, directions, FEW)
            with torch.no_grad():
                logits = model(x)
            best = tree.truncate(FEW)
            same = set(_names(best)) == set(_names(search.paths))
            error = (tree(x) - logits).abs().max() / logits.abs().max()
            tries.append((float(error), same, search.expanded, search.total, len(tree)))
        errors, same_sets, expanded, totals, leaves = zip(*tries, strict=True)
        name = " and ".join(
            name for name, there in (("biases", bias), ("residuals", residual)) if there
        )
        checks[name or "plain"] = {
            "leaves": leaves[0],
            "largest_relative_error": max(errors),
            f"best_{FEW}_as_in_whole_tree": all(same_sets),
            "nodes_expanded": list(expanded),
            "nodes_total": totals[0],
        }
    return checks


def _small_model(data: ImageData, bias: bool, residual: bool, seed: int) -> ImageClassifier:
    torch.manual_seed(seed)
    config = ClassifierConfig(
        data.n_inputs, data.n_classes, SMALL_WIDTH, 3, bias=bias, residual=residual
    )
    return ImageClassifier(config).double()


def _names(paths: Any) -> list[tuple[int, ...]]:
    """Return the paths as tuples: the direction, then the number of each eigenvector."""
    return [tuple(n) for n in torch.cat([paths.roots[:, None], paths.indices], 1).tolist()]


def _effort(model: ImageClassifier, n_classes: int) -> dict[str, Any]:
    """Measure the search for the best paths."""
    tensors, directions = model.tensors(), torch.eye(n_classes)
    start = time.perf_counter()
    search = top_paths(tensors, directions, _at_most(model, n_classes, BEST))
    return {
        "nodes_expanded": search.expanded,
        "nodes_total": search.total,
        "share": search.expanded / search.total,
        "seconds": round(time.perf_counter() - start, 2),
    }


def _curve(model: ImageClassifier, data: ImageData) -> Curve:
    """Return the accuracy by the number of paths, at numbers that grow by a constant factor."""
    most = _at_most(model, data.n_classes, MOST)
    search = top_paths(model.tensors(), torch.eye(data.n_classes), most)
    steps = range(1 + int(PER_DECADE * torch.tensor(float(most)).log10()))
    counts = sorted({round(10 ** (step / PER_DECADE)) for step in steps} | {most})
    return path_accuracies(search.paths, data, counts)


def _at_most(model: ImageClassifier, n_classes: int, k: int) -> int:
    return min(k, make_chain(model.tensors(), torch.eye(n_classes)).n_leaves)


def _line(name: str, curves: Sequence[Curve], full: Sequence[float]) -> Line:
    """Return the drop in points."""
    drops = [
        [100 * (best - accuracy) for _, accuracy in curve]
        for curve, best in zip(curves, full, strict=True)
    ]
    return spread_line(name, [k for k, _ in curves[0]], drops)
