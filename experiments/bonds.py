"""Bonds: deep MNIST models on the few directions between their layers.

The best eigenvector paths of a three-layer model lose more than a point of accuracy even when there
are thousands of them (recipe search). Measured here is how many directions each bond needs instead,
for models of three layers, d = 100, without and with biases and residuals, and of two layers,
d = 300: the same number at every bond, on the test images; and chosen greedily on 10,000 training
images, tested on the test images. Singular values are over the training images, or from weights
alone. Of the three-layer models also what is left inside a cut: its eigenvector paths, and its
products of two coordinates, in the coordinates of the singular values, in a sparse basis and in a
random one.

That it is exact is measured on small random models against the whole tree, unfolded at each bond;
that no cut loses more than its certificate says, on 100 random models and cuts. The similarity of
the first two three-layer models, cut to 14 directions at each bond, is compared with 10^6 samples,
for standard normal inputs and for a Gaussian with the mean and covariance of the training images.

The method is that of Dooms et al. 2025 (arXiv 2504.02667, appendix G) without its dense cores; the
numbers there are of other models.

Small: 2 initialisations of each model, 10 minutes on one core. Paper: 5, half an hour.
"""

import math
import time
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from bilens.data import ImageData
from bilens.nn import ClassifierConfig, ImageClassifier
from bilens.read import (
    Metric,
    accurate_ranks,
    classifier_bonds,
    product_accuracies,
    rank_accuracies,
    read_bonds,
)
from bilens.report import network_figure
from bilens.tensor import (
    BilinearTensor,
    Cut,
    TreeBonds,
    affine,
    bonds,
    decompile,
    expected_cosine,
    expected_inner,
    sparse_basis,
)
from bilens.tensor.chain import joined
from experiments.context import Outcome, RecipeContext, interval
from experiments.curves import Line, line_figure, spread_line
from experiments.search import MODELS as SEARCHED
from experiments.search import within

__all__ = ["certificates", "needed_products", "run", "similarity", "unfolding_error"]

MODELS = {
    "three layers": (*SEARCHED["three layers"], False),
    "three layers, biases and residuals": (*SEARCHED["three layers"], True),
    "two layers": (*SEARCHED["two layers"], False),
}
DROP, MOST, INSIDE, PER_DECADE = 0.01, 40, 22, 40
ALIKE, WIDE, SAMPLES, BATCH = 14, 20, 1_000_000, 20_000
SMALL_WIDTH, NETS, TIMED, TRIES = 3, 100, 300, 5


def run(context: RecipeContext) -> Outcome:
    """Cut models of two and of three layers."""
    data, seeds = context.mnist, context.choose(2, 5)
    numbers: dict[str, Any] = {}
    lines: list[Line] = []
    for name, (layers, d_model, training, extended) in MODELS.items():
        models = context.classifiers(
            data, training, seeds, d_model=d_model, layers=layers, affine=extended
        )
        found, curves = zip(*(_of_model(model, data) for model in models), strict=True)
        numbers[name] = {
            "d_model": d_model,
            "accuracy": interval([m.accuracy(data.test_images, data.test_labels) for m in models]),
            **{key: [one[key] for one in found] for key in found[0]},
        }
        drops = [[100 * drop for _, drop in curve] for curve in curves]
        lines.append(spread_line(name, [k for k, _ in curves[0]], drops))
        if name == "three layers":
            three = models
            numbers["inside a cut"] = [_inside(model, data) for model in models]
    numbers["similarity"] = similarity(three[:2], data)
    numbers["exactness"] = {"largest_error": unfolding_error(), "certificates": certificates()}
    numbers["seconds_of_all_bonds"] = _seconds(data)
    figures = {
        "directions": line_figure(
            lines,
            title="Accuracy lost by keeping few directions at each bond",
            x_title="directions at each bond",
            y_title="accuracy drop (points)",
        ),
        "network": network_figure(read_bonds(three[0], data).cut_reading, 3, data.shape),
    }
    return Outcome(numbers, figures)


def _of_model(
    model: ImageClassifier, data: ImageData
) -> tuple[dict[str, Any], list[tuple[int, float]]]:
    """How many directions a model needs, and the drop of its uniform cuts over the images."""
    full = model.accuracy(data.test_images, data.test_labels)
    numbers: dict[str, Any] = {}
    curve: list[tuple[int, float]] = []
    for metric in ("weights", "images"):
        found = classifier_bonds(model, data, metric)
        curve = [(k, a) for k, a, _ in rank_accuracies(found, data, range(1, MOST + 1))]
        ranks = accurate_ranks(found, data, DROP)
        cut = ImageClassifier.from_cut(found.cut(ranks), model.config)
        numbers |= {
            f"uniform_{metric}": within(tuple(curve), full, DROP),
            f"greedy_{metric}": list(ranks),
            f"greedy_total_{metric}": sum(ranks),
            f"greedy_test_drop_{metric}": full - cut.accuracy(data.test_images, data.test_labels),
            f"greedy_certificate_{metric}": found.certificate(ranks),
            f"greedy_error_{metric}": found.error(ranks),
        }
    return numbers, [(k, full - accuracy) for k, accuracy in curve]


def _inside(model: ImageClassifier, data: ImageData) -> dict[str, Any]:
    """What a cut to a few directions, a little more than needed, is made of."""
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
    """The fewest measured products from which on less than a point is lost."""
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
    """Eigenvector paths of the cut model in its own coordinates, on 2,000 test images."""
    z = cut.coordinates(data.test_images[:2000])[0]
    tree = decompile(cut.cores, torch.eye(data.n_classes, dtype=z.dtype), max_leaves=10**6)
    labels, counts = data.test_labels[:2000], (100, 1000, 3000, 10_000, 30_000, len(tree))
    curve = tuple(
        (k, float((tree.truncate(k)(z).argmax(-1) == labels).double().mean()))
        for k in counts
        if k <= len(tree)
    )
    whole = curve[-1][1]
    return {
        "all": len(tree),
        "by_paths": [list(p) for p in curve],
        "needed": within(curve, whole, DROP),
    }


def similarity(models: Sequence[ImageClassifier], data: ImageData) -> dict[str, Any]:
    """Exact similarity of two cut models, and samples of it."""
    found = {}
    x = data.train_images.double()
    centred = x - x.mean(0)
    gaussians: dict[str, dict[str, Any]] = {
        "standard normal": {},
        "of the images": {"mean": x.mean(0), "covariance": centred.T @ centred / len(x)},
    }
    for name, gaussian in gaussians.items():
        metric: Metric = "images" if gaussian else "weights"
        of_models = [classifier_bonds(model, data, metric) for model in models]
        a, b = (one.cut(ALIKE).tensors() for one in of_models)
        start = time.perf_counter()
        inner = float(expected_inner(a, b, **gaussian))
        seconds = time.perf_counter() - start
        products = _sampled(a, b, gaussian)
        mean, error = float(products.mean()), float(products.std()) / len(products) ** 0.5
        wide = [one.cut(WIDE).tensors() for one in of_models]
        start = time.perf_counter()
        cosine = float(expected_cosine(*wide, **gaussian))
        found[name] = {
            "inner": inner,
            "seconds": round(seconds, 2),
            "sampled": mean,
            "standard_error": error,
            "standard_errors_apart": (inner - mean) / error,
            "cosine": float(expected_cosine(a, b, **gaussian)),
            f"cosine_of_{WIDE}": cosine,
            f"seconds_of_{WIDE}": round(time.perf_counter() - start, 1),
            "certified_error": [one.gaussian_error(ALIKE) for one in of_models],
            "sampled_error": [
                _lost(one, ALIKE, model, gaussian)
                for one, model in zip(of_models, models, strict=True)
            ],
        }
    return found


def _sampled(
    a: Sequence[BilinearTensor], b: Sequence[BilinearTensor], gaussian: dict[str, Any]
) -> Tensor:
    """f_a(x) . f_b(x) for random x."""
    chains = [_of_standard(chain, gaussian) for chain in (a, b)]
    products = []
    for y in _normal(chains[0][0].n_in - 1, SAMPLES):
        of_a, of_b = (_outputs(chain, y) for chain in chains)
        products.append((of_a * of_b).sum(-1))
    return torch.cat(products)


def _lost(
    found: TreeBonds, rank: int, model: ImageClassifier, gaussian: dict[str, Any]
) -> list[float]:
    """sqrt(E |f - f_cut|^2) and sqrt(E |f|^2), f being the logits less their mean, from samples."""
    whole = [tensor.to(torch.float64) for tensor in model.tensors()]
    whole, cut = (_of_standard(chain, gaussian) for chain in (whole, found.cut(rank).tensors()))
    squares, samples = torch.zeros(2, dtype=torch.float64), SAMPLES // 10
    for y in _normal(whole[0].n_in - 1, samples):
        logits = _outputs(whole, y)
        logits = logits - logits.mean(-1, keepdim=True)
        squares[0] += (logits - _outputs(cut, y)).square().sum()
        squares[1] += logits.square().sum()
    return (squares / samples).sqrt().tolist()


def _of_standard(chain: Sequence[BilinearTensor], gaussian: dict[str, Any]) -> list[BilinearTensor]:
    """The chain of y ~ N(0, I) that x = mean + root y gives."""
    first = chain[0].with_bias()
    if gaussian:
        values, vectors = torch.linalg.eigh(gaussian["covariance"])
        root = vectors * values.clamp_min(0).sqrt()
        first = first.change_basis(inputs=affine(root, gaussian["mean"]))
    return [first, *chain[1:]]


def _normal(n: int, samples: int) -> Iterator[Tensor]:
    """Samples of N(0, I) in batches."""
    generator = torch.Generator().manual_seed(1)
    for start in range(0, samples, BATCH):
        yield torch.randn(min(BATCH, samples - start), n, generator=generator, dtype=torch.float64)


def _outputs(chain: Sequence[BilinearTensor], z: Tensor) -> Tensor:
    for tensor in chain:
        z = tensor(z)
    return z


def unfolding_error() -> float:
    """Largest error of a share against the dense tree unfolded there, over small random models."""
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
            rest = torch.cat([bond.shares[k:], shares[k:]])
            error = torch.cat([bond.shares[:k] - shares[:k], rest]).abs().max()
            worst = max(worst, float(error))
    return worst


def certificates() -> dict[str, float]:
    """The certificate of random cuts of random models over what each cut really loses, squared."""
    ratios = []
    for seed in range(NETS):
        chain = _small_chain(seed)
        directions = torch.eye(chain[-1].n_out, dtype=torch.float64)
        found, T = bonds(chain, directions), _tree(chain, directions)
        generator = torch.Generator().manual_seed(seed)
        ranks = [
            int(torch.randint(1, max(2, bond.k), (), generator=generator)) for bond in found.bonds
        ]
        cut = found.cut(ranks)
        lost = (T - _tree(cut.tensors(), directions)).norm() / T.norm()
        ratios.append(float(found.certificate(ranks) ** 2 / lost**2))
    return {"least": min(ratios), "median": sorted(ratios)[len(ratios) // 2], "most": max(ratios)}


def _small_chain(seed: int) -> list[BilinearTensor]:
    """Three layers on three pixels, every fourth with biases, residuals, both or none of them."""
    torch.manual_seed(seed)
    config = ClassifierConfig(
        2, 3, SMALL_WIDTH, 3, bias=seed % 4 in (1, 3), residual=seed % 4 in (2, 3)
    )
    model = ImageClassifier(config).double().requires_grad_(False)
    return [tensor.to(torch.float64) for tensor in model.tensors()]


def _tree(chain: Sequence[BilinearTensor], directions: Tensor) -> Tensor:
    """The whole tree, one axis for the directions and one for each leaf."""
    arrays = [tensor.dense() for tensor in joined(chain, directions)]
    T: Tensor = torch.tensordot(directions, arrays[-1], dims=1)
    for array in reversed(arrays[:-1]):
        for _ in range(T.ndim - 1):
            T = torch.tensordot(T, array, dims=([1], [0]))
    return T


def _seconds(data: ImageData) -> float:
    """All bonds of three layers of d = 300, the fastest of some tries."""
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
