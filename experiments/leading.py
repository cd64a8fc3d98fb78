"""Leading eigenvectors of image classifiers: what the papers expect of them and do not measure.

Of Pearce et al. 2024, with models of their Table 2:

- The most negative eigenvector looks like its digit too (section 5.3). The explanation there is
  that images which only resemble the digit activate it, and not the most positive one, so that it
  takes them away. Measured on the images of other digits that are nearest to the mean of a digit.
- On digits of half the size in a random quarter of the picture, eigenvectors divide among the
  quarters, or are of all (section 5.4). The number of quarters that the three most positive
  eigenvectors of a digit fill is a participation ratio of their squares, from 1 to 4.
- Eigenvectors that are active on the same images belong together (section 5.4). Measured are
  correlations over test images of the activations of the ten strongest of a digit, and of as many
  random directions in their span.
- How the number of paths that matter grows with depth (section 4.2), beside what bonds need.
- Noise in directions that no logit reads is left of the initial weights, and weight decay removes
  it (Pearce & Dooms 2024, appendix). Measured is how much of the output's size the logits read.

Small: 3 initialisations of 5 epochs, 8 minutes on one core. Paper: 10 of 20 epochs.
"""

from collections.abc import Iterable
from dataclasses import replace
from statistics import median

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn import functional

from bilens.data import ImageData
from bilens.images import accurate_ranks, class_spectra, classifier_bonds
from bilens.nn import ImageClassifier
from bilens.tensor import Spectrum, decompile
from bilens.train import ClassifierTraining
from experiments.certify import SETTINGS
from experiments.context import Outcome, RecipeContext
from experiments.results import Row

SEEDS = (3, 10)
"""Initialisations at either scale."""
NEAREST, STRONGEST, WIDTH = 50, 10, 64
DIGIT = 3
"""Whose paths are counted."""
SHARE, LEVEL = 0.9, 0.1
"""Of all squares of effective eigenvalues; of the largest one."""


def run(context: RecipeContext) -> Outcome:
    """Measure models of one layer, and count the paths of deeper ones."""
    data, seeds = context.mnist, context.seed_range(SEEDS)
    training = ClassifierTraining(epochs=context.choose(5, 20))
    models = context.classifiers(data, training, seeds)
    rows = [
        *negative_rows(models, data),
        quadrant_row(context, training),
        together_row(models, data),
    ]
    for layers in (1, 2, 3):
        of_depth = context.classifiers(data, training, seeds, d_model=WIDTH, layers=layers)
        rows += path_rows(of_depth, data, layers)
    for name, changes in SETTINGS.items():
        trained = context.classifiers(data, replace(training, **changes), seeds)
        rows.append(read_row(trained, data, name))
    settings = {
        "epochs": training.epochs,
        "nearest images": NEAREST,
        "eigenvectors": STRONGEST,
        "width of models whose paths are counted": WIDTH,
        "digit": DIGIT,
        "share of squares": SHARE,
        "share of the largest": LEVEL,
        "low and high": "range over seeds",
    }
    return Outcome({}, rows=rows, settings=settings)


def by_digit(model: ImageClassifier) -> list[Spectrum]:
    """Return the spectrum of each logit."""
    spectra = class_spectra(model)
    return [spectra[label] for label in range(len(spectra.values))]


def ends(spectrum: Spectrum, x: Tensor) -> tuple[Tensor, Tensor]:
    """Return the sizes of the activations of the most positive and most negative eigenvector."""
    values = spectrum.values
    activations = spectrum.activations(x)
    return activations[:, int(values.argmax())], -activations[:, int(values.argmin())]


def negative_rows(models: Iterable[ImageClassifier], data: ImageData) -> list[Row]:
    """Return what P1 and N1 do on images that resemble a digit, beside what they do on it."""
    first, negative, away, own = (list[float]() for _ in range(4))
    for model in models:
        of_seed: list[list[float]] = []
        for label, spectrum in enumerate(by_digit(model)):
            positive, taken = ends(spectrum, data.test_images)
            true = data.test_labels == label
            centre = data.train_images[data.train_labels == label].mean(0)
            distance = (data.test_images - centre).norm(dim=1).masked_fill(true, torch.inf)
            alike = distance.topk(NEAREST, largest=False).indices
            of_seed.append(
                [
                    float(positive[alike].mean() / positive[true].mean()),
                    float(taken[alike].mean() / taken[true].mean()),
                    float(taken[alike].mean() / positive[alike].mean()),
                    float(taken[true].mean() / positive[true].mean()),
                ]
            )
        # Of ten digits the median: N1 of a true 1 is nearly 0, and ratios to it are large.
        middle = torch.tensor(of_seed).median(0).values.tolist()
        for values, value in zip((first, negative, away, own), middle, strict=True):
            values.append(value)
    claim = "images nearest to a digit's mean that are another: "
    return [
        Row.of_range(
            claim + "activation of N1 over that on the digit itself",
            negative,
            baselines={"of P1": median(first)},
        ),
        Row.of_range(
            claim + "share of P1 that N1 takes away",
            away,
            baselines={"on the digit itself": median(own)},
        ),
    ]


def quadrant_row(context: RecipeContext, training: ClassifierTraining) -> Row:
    """Return the number of quarters of the picture that eigenvectors of small digits fill."""
    data = in_quadrants(context.mnist)
    filled = list[float]()
    random = list[float]()
    generator = torch.Generator().manual_seed(0)
    for model in context.classifiers(data, training, context.seed_range(SEEDS)):
        spectra = by_digit(model)
        leading = torch.stack([s.vectors[s.values.topk(3).indices] for s in spectra])
        vectors = torch.stack([s.vectors for s in spectra])
        filled.append(float(quarters(leading, data).mean()))
        # Random sums of eigenvectors have no reason to prefer a quarter.
        weights = torch.randn(len(spectra), 3, vectors.shape[1], generator=generator)
        random.append(float(quarters(weights @ vectors, data).mean()))
    return Row.of_range(
        "digits in quarters: quarters that each of the first three positive eigenvectors fills",
        filled,
        baselines={"random sums of eigenvectors": median(random)},
    )


def quarters(pictures: Float[Tensor, "*batch pixels"], data: ImageData) -> Float[Tensor, "*batch"]:
    """Return the participation ratio of the squares of four quarters, from 1 to 4."""
    height, width = data.shape
    squares = pictures.square().unflatten(-1, (2, height // 2, 2, width // 2)).sum((-1, -3))
    squares = squares.flatten(-2)
    ratio: Tensor = squares.sum(-1) ** 2 / squares.square().sum(-1)
    return ratio


def in_quadrants(data: ImageData) -> ImageData:
    """Return images of half the size, each in a random quarter of the picture."""
    generator = torch.Generator().manual_seed(0)

    def moved(x: Float[Tensor, "images pixels"]) -> Float[Tensor, "images pixels"]:
        height, width = data.shape
        small = functional.avg_pool2d(x.view(-1, 1, height, width), 2)[:, 0]
        places: Int[Tensor, " images"] = torch.randint(4, (len(x),), generator=generator)
        pages = x.new_zeros(len(x), 2, height // 2, 2, width // 2)
        numbers = torch.arange(len(x))
        pages[numbers, places // 2, :, places % 2] = small
        return pages.flatten(1)

    return replace(
        data,
        name="mnist-quarters",
        train_images=moved(data.train_images),
        test_images=moved(data.test_images),
    )


def together_row(models: Iterable[ImageClassifier], data: ImageData) -> Row:
    """Return the largest correlation of activations of the strongest eigenvectors of a digit."""
    found, random = list[float](), list[float]()
    generator = torch.Generator().manual_seed(0)
    for model in models:
        of_digits = list[float]()
        of_random = list[float]()
        for spectrum in by_digit(model):
            strongest = spectrum.truncate(STRONGEST)
            turn = torch.linalg.qr(torch.randn(STRONGEST, STRONGEST, generator=generator))[0]
            overlaps = strongest.overlaps(data.test_images)
            of_digits.append(largest_correlation(overlaps**2))
            of_random.append(largest_correlation((overlaps @ turn) ** 2))
        found.append(median(of_digits))
        random.append(median(of_random))
    return Row.of_range(
        f"largest correlation of activations among the {STRONGEST} strongest eigenvectors",
        found,
        baselines={"random directions in their span": median(random)},
    )


def largest_correlation(columns: Float[Tensor, "samples columns"]) -> float:
    """Return the largest size of a correlation of two columns."""
    correlations = torch.corrcoef(columns.T).fill_diagonal_(0)
    return float(correlations.abs().max())


def path_rows(models: Iterable[ImageClassifier], data: ImageData, layers: int) -> list[Row]:
    """Return how many paths to a logit matter, by two measures, and what bonds need."""
    above, squares, bonds = (list[float]() for _ in range(3))
    for model in models:
        direction = functional.one_hot(torch.tensor(DIGIT), data.n_classes).double()
        tensors = [tensor.to(torch.float64) for tensor in model.layer_tensors()]
        sizes = decompile(tensors, direction, max_leaves=WIDTH**layers * 2).effective.abs()
        above.append(float((sizes > LEVEL * sizes[0]).sum()))
        part = sizes.square().cumsum(0) / sizes.square().sum()
        squares.append(float((part < SHARE).sum() + 1))
        total = len(sizes)
        bonds.append(float(sum(accurate_ranks(classifier_bonds(model, data), data))))
    depth = {1: "one layer", 2: "two layers", 3: "three layers"}[layers]
    return [
        Row.of_range(
            f"{depth}: paths above {LEVEL:g} of the largest effective eigenvalue",
            above,
            baselines={"of all": total},
        ),
        Row.of_range(
            f"{depth}: paths with {SHARE:g} of the squares",
            squares,
            baselines={"of all": total, "directions that bonds need, all bonds": median(bonds)},
        ),
    ]


def read_row(models: Iterable[ImageClassifier], data: ImageData, name: str) -> Row:
    """Return how much of the squares of a layer's output is in the directions that logits read."""
    found, weights = list[float](), list[float]()
    for model in models:
        read = torch.linalg.qr(model.unembed.weight.T)[0]
        (tensor,) = [layer.tensor() for layer in model.layers]  # type: ignore[operator]
        out = tensor(model.embed(data.test_images))
        found.append(float((out @ read).square().sum() / out.square().sum()))
        # The Gram matrix of the symmetric tensor's outputs has its squares on the diagonal.
        gram = tensor.output_gram()
        weights.append(float(((gram @ read.double()) * read).sum() / gram.trace()))
    return Row.of_range(
        f"trained with {name}: share of a layer's output that the logits read",
        found,
        baselines={"of the weights' squares": median(weights)},
    )
