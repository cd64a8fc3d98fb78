"""Bonds: deep image models on the few directions between their layers, beside baselines.

Even thousands of the best eigenvector paths of a three-layer model lose more than a point of
accuracy (recipe search). This recipe counts the directions that each bond needs
instead. Models have two to five layers on MNIST, and three on Fashion-MNIST. The number is the same
at every bond. It is the smallest that loses less than a point of test accuracy, as do all larger
ones, and the smallest that reaches 95.2 %, where models are compared that differ in accuracy.
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
of at most a point, and tested on the test images. For 100 cuts the error of the logits is bounded
on half of the test images, and compared with the error on the other half.

The inside of a cut is measured for three-layer models: its eigenvector paths, and its products of
two coordinates. Coordinates are those of the singular values, of a sparse basis, or of a random
one.

Exactness is measured on small random models against the tree unfolded at each bond. No cut may lose
more of the tree than its certificate, which is tested on 100 random models and cuts.

The similarity of the first two three-layer models is compared with 10^6 samples. Each is cut to 14
directions at each bond. Inputs are standard normal, or a Gaussian with the mean and covariance of
the training images.

The tree's method is that of Dooms et al. 2025 (arXiv 2504.02667, appendix G) without its dense
cores; the numbers there are of other models.

Small: 2 initialisations of each model. Paper: 5. Numbers of each model are saved beside the models,
so a stopped recipe resumes.
"""

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from bilens.data import ImageData
from bilens.nn import ClassifierConfig, ImageClassifier
from bilens.options import Metric
from bilens.read import (
    accurate_ranks,
    classifier_bonds,
    classifier_function_bonds,
    product_accuracies,
    read_bonds,
)
from bilens.read.bonds import sample_inputs
from bilens.read.fidelity import full_cut, held_out
from bilens.report import network_figure
from bilens.tensor import (
    BilinearTensor,
    Bonds,
    Cut,
    TreeBonds,
    affine,
    bonds,
    decompile,
    expected_cosine,
    expected_inner,
    sparse_basis,
    with_constant,
)
from bilens.tensor.chain import joined
from bilens.tensor.jacobian_bonds import Moments, balanced_bonds
from bilens.train import ClassifierTraining
from experiments.context import Outcome, RecipeContext, interval
from experiments.curves import Line, line_figure, spread_line
from experiments.fig6 import TRAINING

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
DROP, REACHED, MOST, STEP, INSIDE, PER_DECADE = 0.01, 0.952, 60, 4, 22, 40
CUTS, FEWEST = 3, 8
ALIKE, WIDE, SAMPLES, BATCH = 14, 20, 1_000_000, 20_000
SMALL_WIDTH, NETS, TIMED, TRIES = 3, 100, 300, 5


def run(context: RecipeContext) -> Outcome:
    """Cut models of two to five layers."""
    seeds = context.choose(2, 5)
    numbers: dict[str, Any] = {}
    lines: list[Line] = []
    pairs: list[list[float]] = []
    for name in MODELS:
        models, data = _models(context, name, seeds)
        rows = [
            context.measured(f"bonds-{name}-{seed}", partial(_of_model, model, data))
            for seed, model in enumerate(models)
        ]
        numbers[name] = {
            "accuracy": interval([row["accuracy"] for row in rows]),
            "uniform": {key: [row["uniform"][key] for row in rows] for key in METHODS},
            "reach": {key: [row["reach"][key] for row in rows] for key in METHODS},
            "cut": {key: [row["cut"][key] for row in rows] for key in CHOSEN},
        }
        pairs += [pair for row in rows for pair in row["bounds"]]
        drops = [[100 * drop for drop in row["curve"]] for row in rows]
        lines.append(spread_line(name, range(1, MOST + 1, STEP), drops))
    three, mnist = _models(context, "three layers", seeds)
    numbers["inside a cut"] = [
        context.measured(f"bonds-inside-{seed}", partial(_inside, model, mnist))
        for seed, model in enumerate(three)
    ]
    ratios = sorted(bound / error for bound, error in pairs)
    numbers["bounds of errors"] = {
        "cuts": len(ratios),
        "below": sum(ratio < 1 for ratio in ratios),
        "least": ratios[0],
        "median": ratios[len(ratios) // 2],
        "most": ratios[-1],
    }
    numbers["similarity"] = context.measured(
        f"bonds-similarity-{seeds}", lambda: similarity(three[:2], mnist)
    )
    numbers["exactness"] = {"largest_error": unfolding_error(), "certificates": certificates()}
    numbers["seconds_of_all_bonds"] = _seconds(mnist)
    figures = {
        "directions": line_figure(
            lines,
            title="Accuracy lost by keeping few directions at each bond",
            x_title="directions at each bond",
            y_title="accuracy drop (points)",
        ),
        "network": network_figure(read_bonds(three[0], mnist).cut_reading, 3, mnist.shape),
    }
    return Outcome(numbers, figures)


def _models(
    context: RecipeContext, name: str, seeds: int
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
        "bounds": [pair for name in CHOSEN[:2] for pair in _bounds(bonds_of[name], data)],
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
    logits = full_cut(directions)(data.test_images)
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


def _bounds(directions: Bonds, data: ImageData) -> list[list[float]]:
    """Return the bound on the error from half of the test images, and the other half's error."""
    logits, pairs = full_cut(directions)(data.test_images), []
    for k in range(FEWEST, FEWEST + 8 * CUTS, 8):
        outputs = directions.cut(k)(data.test_images)
        halves = [
            held_out(logits[half::2], outputs[half::2], data.test_labels[half::2])
            for half in (0, 1)
        ]
        if halves[1].error > 1e-9:
            pairs.append([halves[0].error_bound, halves[1].error])
    return pairs


def _baseline(name: str) -> Callable[[ImageClassifier, ImageData], Bonds]:
    """Return the function that computes the directions of a baseline, as bonds."""

    def compute(model: ImageClassifier, data: ImageData) -> Bonds:
        tensors, W = centred_chain(model, data)
        E = model.embedding().double()
        x = sample_inputs(data, "images")
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
    return joined([*lower, last.change_basis(outputs=W - 1 / n)], W), W


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
CHOSEN = ("function, images", "tree, images", "function, Gaussian", "function, standard normal")


def _inside(model: ImageClassifier, data: ImageData) -> dict[str, Any]:
    """Measure paths and products of a cut to a few directions more than needed."""
    cut = classifier_bonds(model, data).cut(INSIDE)
    full = model.accuracy(data.test_images, data.test_labels)
    generator = torch.Generator().manual_seed(0)
    turns = [
        torch.linalg.qr(torch.randn(k, k, generator=generator, dtype=torch.float64)).Q
        for k in cut.ranks
    ]
    return {
        "ranks": list(cut.ranks),
        "accuracy": full,
        "cut_accuracy": product_accuracies(cut, data)[-1][1],
        "products": len(cut.products()),
        "needed_by_singular_values": needed_products(cut, data, full),
        "needed_in_a_sparse_basis": needed_products(sparse_basis(cut), data, full),
        "needed_in_a_random_basis": needed_products(cut.rotate(turns), data, full),
        "paths": _paths(cut, data),
    }


def needed_products(cut: Cut, data: ImageData, full: float) -> int | None:
    """Return the fewest measured products that lose less than a point, as do all more."""
    most, needed = len(cut.products()), None
    steps = range(1 + int(PER_DECADE * math.log10(most)))
    for k in sorted({round(10 ** (step / PER_DECADE)) for step in steps} | {most}, reverse=True):
        if full - _accuracy(cut.keep_products(k), data) > DROP + 1e-9:
            break
        needed = k
    return needed


def _accuracy(chain: Sequence[BilinearTensor], data: ImageData) -> float:
    outputs = _outputs(chain, data.test_images.double())
    return float((outputs.argmax(-1) == data.test_labels).double().mean())


def _paths(cut: Cut, data: ImageData) -> dict[str, Any]:
    """Count eigenvector paths of the cut model in its own coordinates, on 2,000 test images."""
    z = cut.coordinates(data.test_images[:2000])[0]
    tree = decompile(cut.cores, torch.eye(data.n_classes, dtype=z.dtype), max_leaves=10**6)
    labels, counts = data.test_labels[:2000], (100, 1000, 3000, 10_000, 30_000, len(tree))
    curve = tuple(
        (k, float((tree.truncate(k)(z).argmax(-1) == labels).double().mean()))
        for k in counts
        if k <= len(tree)
    )
    all_paths = curve[-1][1]
    return {
        "all": len(tree),
        "by_paths": [list(p) for p in curve],
        "needed": within(curve, all_paths, DROP),
    }


def within(curve: Sequence[tuple[int, float]], full: float, drop: float) -> int | None:
    """Return the smallest measured k that loses less than `drop`, as do all larger, or None."""
    enough = None
    for k, accuracy in reversed(curve):
        # Accuracies are shares of whole images; their difference is so only up to rounding.
        if full - accuracy > drop - 1e-9:
            break
        enough = k
    return enough


def similarity(models: Sequence[ImageClassifier], data: ImageData) -> dict[str, Any]:
    """Return the exact similarity of two cut models, and samples of it."""
    numbers = {}
    x = data.train_images.double()
    centred = x - x.mean(0)
    gaussians: dict[str, dict[str, Any]] = {
        "standard normal": {},
        "of the images": {"mean": x.mean(0), "covariance": centred.T @ centred / len(x)},
    }
    for name, gaussian in gaussians.items():
        metric: Metric = "images" if gaussian else "weights"
        of_models = [classifier_bonds(model, data, metric) for model in models]
        a, b = (tree.cut(ALIKE).tensors() for tree in of_models)
        start = time.perf_counter()
        inner = float(expected_inner(a, b, **gaussian))
        seconds = time.perf_counter() - start
        products = _sampled(a, b, gaussian)
        mean, error = float(products.mean()), float(products.std()) / len(products) ** 0.5
        wide = [tree.cut(WIDE).tensors() for tree in of_models]
        start = time.perf_counter()
        cosine = float(expected_cosine(*wide, **gaussian))
        numbers[name] = {
            "inner": inner,
            "seconds": round(seconds, 2),
            "sampled": mean,
            "standard_error": error,
            "standard_errors_apart": (inner - mean) / error,
            "cosine": float(expected_cosine(a, b, **gaussian)),
            f"cosine_of_{WIDE}": cosine,
            f"seconds_of_{WIDE}": round(time.perf_counter() - start, 1),
            "certified_error": [tree.gaussian_error(ALIKE) for tree in of_models],
            "sampled_error": [
                _lost(tree, ALIKE, model, gaussian)
                for tree, model in zip(of_models, models, strict=True)
            ],
        }
    return numbers


def _sampled(
    a: Sequence[BilinearTensor], b: Sequence[BilinearTensor], gaussian: dict[str, Any]
) -> Tensor:
    """Compute f_a(x) . f_b(x) for random x."""
    chains = [_of_standard(chain, gaussian) for chain in (a, b)]
    products = []
    for y in _normal(chains[0][0].n_in - 1, SAMPLES):
        of_a, of_b = (_outputs(chain, y) for chain in chains)
        products.append((of_a * of_b).sum(-1))
    return torch.cat(products)


def _lost(
    tree: TreeBonds, rank: int, model: ImageClassifier, gaussian: dict[str, Any]
) -> list[float]:
    """Sample sqrt(E |f - f_cut|^2) and sqrt(E |f|^2), with f the logits minus their mean."""
    tensors = [tensor.to(torch.float64) for tensor in model.tensors()]
    full, cut = (_of_standard(chain, gaussian) for chain in (tensors, tree.cut(rank).tensors()))
    squares, samples = torch.zeros(2, dtype=torch.float64), SAMPLES // 10
    for y in _normal(full[0].n_in - 1, samples):
        logits = _outputs(full, y)
        logits = logits - logits.mean(-1, keepdim=True)
        squares[0] += (logits - _outputs(cut, y)).square().sum()
        squares[1] += logits.square().sum()
    return (squares / samples).sqrt().tolist()


def _of_standard(chain: Sequence[BilinearTensor], gaussian: dict[str, Any]) -> list[BilinearTensor]:
    """Express a chain in y ~ N(0, I), with x = mean + root y."""
    first = chain[0].with_bias()
    if gaussian:
        values, vectors = torch.linalg.eigh(gaussian["covariance"])
        root = vectors * values.clamp_min(0).sqrt()
        first = first.change_basis(inputs=affine(root, gaussian["mean"]))
    return [first, *chain[1:]]


def _normal(n: int, samples: int) -> Iterator[Tensor]:
    """Yield samples of N(0, I) in batches."""
    generator = torch.Generator().manual_seed(1)
    for start in range(0, samples, BATCH):
        yield torch.randn(min(BATCH, samples - start), n, generator=generator, dtype=torch.float64)


def _outputs(chain: Sequence[BilinearTensor], z: Tensor) -> Tensor:
    for tensor in chain:
        z = tensor(z)
    return z


def unfolding_error() -> float:
    """Return the largest error of a share against the dense tree, over small random models."""
    worst = 0.0
    for seed in range(NETS // 5):
        chain = _small_chain(seed)
        directions = torch.eye(chain[-1].n_out, dtype=torch.float64)
        T = _tree(chain, directions)
        for number, bond in enumerate(bonds(chain, directions).bonds):
            rows = T.shape[1] ** (2**number)
            matrix = T.reshape(len(T), rows, -1).transpose(0, 1).reshape(rows, -1)
            shares = torch.linalg.svdvals(matrix) ** 2 / T.norm() ** 2
            k = min(bond.k, len(shares))
            missing = torch.cat([bond.shares[k:], shares[k:]])
            error = torch.cat([bond.shares[:k] - shares[:k], missing]).abs().max()
            worst = max(worst, float(error))
    return worst


def certificates() -> dict[str, float]:
    """Return certificates of random cuts of random models over the error of each cut, squared."""
    ratios = []
    for seed in range(NETS):
        chain = _small_chain(seed)
        directions = torch.eye(chain[-1].n_out, dtype=torch.float64)
        of_tree, T = bonds(chain, directions), _tree(chain, directions)
        generator = torch.Generator().manual_seed(seed)
        ranks = [
            int(torch.randint(1, max(2, bond.k), (), generator=generator)) for bond in of_tree.bonds
        ]
        cut = of_tree.cut(ranks)
        lost = (T - _tree(cut.tensors(), directions)).norm() / T.norm()
        ratios.append(float(of_tree.certificate(ranks) ** 2 / lost**2))
    return {"least": min(ratios), "median": sorted(ratios)[len(ratios) // 2], "most": max(ratios)}


def _small_chain(seed: int) -> list[BilinearTensor]:
    """Build three layers on three pixels, with biases, residuals, both or none of them in turn."""
    torch.manual_seed(seed)
    config = ClassifierConfig(
        2, 3, SMALL_WIDTH, 3, bias=seed % 4 in (1, 3), residual=seed % 4 in (2, 3)
    )
    model = ImageClassifier(config).double().requires_grad_(False)
    return [tensor.to(torch.float64) for tensor in model.tensors()]


def _tree(chain: Sequence[BilinearTensor], directions: Tensor) -> Tensor:
    """Build the dense tree, one axis for the directions and one for each leaf."""
    arrays = [tensor.dense() for tensor in joined(chain, directions)]
    T: Tensor = torch.tensordot(directions, arrays[-1], dims=1)
    for array in reversed(arrays[:-1]):
        for _ in range(T.ndim - 1):
            T = torch.tensordot(T, array, dims=([1], [0]))
    return T


def _seconds(data: ImageData) -> float:
    """Return the time of all bonds of three layers of d = 300, the fastest of some tries."""
    torch.manual_seed(0)
    config = ClassifierConfig(data.n_inputs, data.n_classes, TIMED, 3)
    model = ImageClassifier(config).requires_grad_(False)
    layers, directions = model.layer_tensors(), torch.eye(data.n_classes)
    seconds = []
    for _ in range(TRIES):
        start = time.perf_counter()
        bonds(layers, directions, embedding=model.embedding())
        seconds.append(time.perf_counter() - start)
    return round(min(seconds), 3)
