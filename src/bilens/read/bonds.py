"""The few directions between the layers of a deep classifier, and the effect of each of them."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import torch
from jaxtyping import Bool, Float, Float64
from torch import Tensor

from bilens.checks import check_sum, full_precision
from bilens.data import ImageData
from bilens.lazy_imports import go, lazy_import, pd
from bilens.nn import ClassifierConfig, ImageClassifier
from bilens.progress import progress_bar
from bilens.read.chain import (
    ACCURACY_FORMATS,
    COMPARED,
    UNITS,
    accuracy,
    accuracy_frame,
    check_reproduces,
    input_tensors,
    open_chain,
    predict,
)
from bilens.read.held_out import HeldOut, held_out
from bilens.reading import Fact, Percent, Reading, Section
from bilens.registry import reading
from bilens.settings import Share
from bilens.tensor import (
    BilinearTensor,
    Bonds,
    Cut,
    FunctionBonds,
    Products,
    TensorChain,
    TreeBonds,
    bonds,
    function_bonds,
    gaussian_samples,
    sparse_basis,
    with_constant,
)
from bilens.tensor.jacobian_bonds import Measure

if TYPE_CHECKING:
    from bilens.read.figures import bonds as pages
else:  # plotly takes a second to import, and only pages use it.
    pages = lazy_import("bilens.read.figures.bonds")

Metric = Literal["images", "gaussian", "weights"]
"""Inputs: training images, a Gaussian of their mean and covariance, or standard normal inputs.

The last is a reading of the weights only. The tree has the same bonds for the first two, since it
uses the second moment of the inputs.
"""

Kind = Literal["tree", "function"]
"""Bonds of the tree (`bilens.tensor.bonds`) or of the function (`function_bonds`)."""

SAMPLES = 4096
"""Inputs of the bonds of the function."""
DEVIATIONS = 3.09
"""Standard errors by which the loss of a cut has to stay below its limit."""

RANKS = (1, 2, 3, 4, 5, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30, 35, 40, 50, 60, 80, 100)
"""Ranks of the uniform cuts whose accuracy is measured."""
TRAINING_IMAGES = 30_000
"""Number of training images for the choice of ranks, a third for the search, others for a check."""
PER_DECADE = 10
"""Numbers of products, per factor of 10, at which accuracy is measured."""
SHOWN_IMAGES, END_SHARE = 4, 0.02
"""Images shown at the end of a direction, and the share of images that its effect averages."""


@dataclass(frozen=True, eq=False)
class End:
    """Effect of a direction at one end: at its largest or smallest coordinates.

    Attributes:
        images: numbers of the test images at the very end.
        effects: loss of each logit when the coordinate is set to zero, minus the mean loss of all
            logits. It is averaged over the 2 % of the test images nearest to the end.
    """

    images: tuple[int, ...]
    effects: tuple[float, ...]


@dataclass(frozen=True, eq=False)
class BondDirection:
    """One coordinate of a cut model.

    Attributes:
        bond: number of the bond; the input's is 0.
        number: number of the coordinate at this bond.
        share: U_kk, the share of the model's squared norm lost if one use of it is removed.
        ends: effects where it is largest, and where it is smallest.
    """

    bond: int
    number: int
    share: float
    ends: tuple[End, End]


@dataclass(frozen=True, eq=False)
class CutReading:
    """A cut model, and the effect of each coordinate on test images.

    Attributes:
        cut: the model, in a sparse basis.
        data: the data that it is tested on.
        coordinates: coordinates of the test images at each bond, the input's first, and then the
            logits.
    """

    cut: Cut
    data: ImageData
    coordinates: tuple[Float64[Tensor, "images _"], ...]

    @classmethod
    def of(cls, cut: Cut, data: ImageData) -> "CutReading":
        """Run test images through a cut, in the coordinates of its sparse basis."""
        cut = sparse_basis(cut)
        return cls(cut, data, tuple(cut.coordinates(data.test_images)))

    @cached_property
    def products(self) -> Products:
        """Products of two coordinates that the layers sum, the largest share first."""
        return self.cut.products()

    @torch.no_grad()
    def direction(self, bond: int, number: int) -> BondDirection:
        """Return one coordinate with its effects at both ends."""
        z = self.coordinates[bond]
        near = max(1, round(END_SHARE * len(z)))
        order = z[:, number].argsort(descending=True)
        ends = [
            End(
                images=tuple(images[:SHOWN_IMAGES].tolist()),
                effects=tuple(_effects(self.cut, bond, z[images[:near]], number).tolist()),
            )
            for images in (order, order.flip(0))
        ]
        share = float(self.cut.environments[bond][number, number])
        return BondDirection(bond, number, share, (ends[0], ends[1]))

    def pixels(self, bond: int, number: int) -> list[Float64[Tensor, " n_in"]]:
        """Return a coordinate, or a logit, pulled back to the input as one or two pictures.

        An input coordinate is one picture. Any other is a quadratic form of the coordinates below
        it. The pictures are those of its strongest eigenvector of either sign, the positive one
        first, each followed down to the input along the strongest eigenvectors.
        """
        cut = self.cut
        if bond == 0:
            return [cut.write[:, number]]
        _, vectors = torch.linalg.eigh(cut.cores[bond - 1].interaction(output=number).dense())
        pictures = []
        for end in (-1, 0):
            v = vectors[:, end]
            for core in reversed(cut.cores[: bond - 1]):
                values, below = torch.linalg.eigh(core.interaction(v).dense())
                v = below[:, values.abs().argmax()]
            picture = cut.write @ v
            # The sign of an eigenvector is arbitrary, since the form squares it.
            pictures.append(picture if picture.sum() >= 0 else -picture)
        return pictures


@dataclass(frozen=True, eq=False, repr=False)
class BondReading(Reading):
    """A deep classifier on few directions.

    Attributes:
        model: the classifier.
        data: its images, on the CPU.
        metric: inputs that the bonds are of.
        drop: accuracy that the cut may lose.
        ranks: directions of the cut that either kind of bonds needs, the tree's and the function's.
        kind: the kind of bonds with fewer directions, which are used everywhere else.
        bonds: all directions of these, for logits minus their mean.
        accuracy: accuracy of the model on the test images.
        by_rank: (directions at each bond, test accuracy, error of the logits) of uniform cuts.
        cut_reading: the smallest cut that loses at most `drop`.
        held_out: accuracy and error of this cut on the test images, with confidence.
        by_products: (number of products, test accuracy) in the basis of that cut.
    """

    model: TensorChain
    data: ImageData
    metric: Metric
    drop: float
    ranks: dict[Kind, tuple[int, ...]]
    kind: Kind
    bonds: Bonds
    accuracy: float
    by_rank: tuple[tuple[int, float, float], ...]
    cut_reading: CutReading
    held_out: HeldOut
    by_products: tuple[tuple[int, float], ...]

    axes: ClassVar[dict[str, str]] = Bonds.axes
    formats: ClassVar[dict[str, str]] = ACCURACY_FORMATS

    def facts(self) -> list[Fact]:
        """Return the data, and the accuracy with all directions and with few."""
        return [
            ("data", self.data.name),
            ("test accuracy", Percent(self.accuracy)),
            *((f"directions of the {kind}", _sum(ranks)) for kind, ranks in self.ranks.items()),
            (f"test accuracy with {_sum(self.cut.ranks)} directions", Percent(self.cut_accuracy)),
            ("95 % interval", "{:.2%} to {:.2%}".format(*self.held_out.interval)),
            ("error of the logits", self.held_out.error),
            ("upper bound on it", self.held_out.error_bound),
            *self._tree_certificate(),
        ]

    def _tree_certificate(self) -> list[Fact]:
        """Return the certificate of a cut of the tree, if it is one."""
        bound = self.cut.certificate
        if bound is None:
            return []
        label = "tree certificate" + (" (vacuous above 1)" if bound > 1 else "")
        return [(label, bound)]

    @property
    def cut_accuracy(self) -> float:
        """Test accuracy of the cut."""
        return self.held_out.accuracy

    def frame(self) -> "pd.DataFrame":
        """Return a row for each direction of each bond."""
        return self.bonds.frame()

    @property
    def cut(self) -> Cut:
        """The smallest cut."""
        return self.cut_reading.cut

    def cut_model(self) -> ImageClassifier:
        """Return the cut as an ordinary classifier."""
        data = self.data
        config = ClassifierConfig(
            data.n_inputs,
            data.n_classes,
            image_shape=data.shape,
            class_names=data.class_names,
        )
        return ImageClassifier.from_cut(self.cut, config)

    def tables(self) -> "dict[str, pd.DataFrame]":
        """Return the accuracy of uniform cuts, and of the smallest cut in the last row."""
        rows: list[tuple[int | str, float]] = [(str(k), share) for k, share, _ in self.by_rank]
        rows.append((" + ".join(map(str, self.cut.ranks)), self.cut_accuracy))
        frame = accuracy_frame("directions at each bond", rows, self.accuracy)
        errors = [*(error for _, _, error in self.by_rank), self.held_out.error]
        return {"few directions": frame.assign(**{"error of the logits": errors})}

    def figures(self) -> "dict[str, go.Figure]":
        """Draw every figure of its sections."""
        return pages.bond_figures(self)

    def sections(self) -> list[Section]:
        """Return the sections of a report."""
        return pages.bond_sections(self)

    def record(self) -> dict[str, Any]:
        """Return the numbers for JSON."""
        return {
            "data": self.data.name,
            "metric": self.metric,
            "accuracy": self.accuracy,
            "shares": [bond.shares.tolist() for bond in self.bonds.bonds],
            "by_rank": [list(row) for row in self.by_rank],
            "drop": self.drop,
            "ranks_by_kind": {kind: list(ranks) for kind, ranks in self.ranks.items()},
            "kind": self.kind,
            "ranks": list(self.cut.ranks),
            "tree_certificate": self.cut.certificate,
            "cut_accuracy": self.cut_accuracy,
            "held_out": self.held_out.record(),
            "by_products": [list(row) for row in self.by_products],
        }


@torch.no_grad()
@full_precision
def classifier_bonds(model: TensorChain, data: ImageData, metric: Metric = "images") -> TreeBonds:
    """Compute the bonds of a classifier as a tree, from pixels to logits minus their mean.

    A constant added to all logits changes no prediction, so it does not count.

    Raises:
        NotBilinearError: a gate is not linear, or a norm divides by the input's length.
        BilensError: the model does not fit the data, or the metric is unknown.
    """
    chain, E, classes = _centred(model, data)
    moment = None
    if metric != "weights":
        x = data.train_images.to("cpu", torch.float64)
        x = with_constant(x) if chain[-1].constant else x
        moment = x.T @ x / len(x)
    result = bonds(chain, classes, moment, E)
    _check_full_width(model, result, data.train_images[:COMPARED])
    return result


@torch.no_grad()
@full_precision
def classifier_function_bonds(
    model: TensorChain,
    data: ImageData,
    metric: Metric = "images",
    measure: Measure = "probabilities",
) -> FunctionBonds:
    """Compute the bonds of a classifier as a function of its input, on 4,096 inputs.

    Outputs are logits minus their mean.

    Raises:
        NotBilinearError: a gate is not linear, or a norm divides by the input's length.
        BilensError: the model does not fit the data, or metric or measure are unknown.
    """
    chain, E, classes = _centred(model, data)
    result = function_bonds(chain, classes, sample_inputs(data, metric), E, measure=measure)
    _check_full_width(model, result, data.train_images[:COMPARED])
    return result


def _centred(model: TensorChain, data: ImageData) -> tuple[list[BilinearTensor], Tensor, Tensor]:
    """Return the tensors of the centred logits, the embedding, and a direction for each class."""
    tensors, embedding = open_chain(model)
    *lower, last = (tensor.to("cpu") for tensor in tensors)
    classes = torch.eye(data.n_classes, device="cpu")
    centred = last.change_basis(outputs=(classes - 1 / data.n_classes).to(last.out))
    return [*lower, centred], embedding.to("cpu"), classes


def sample_inputs(data: ImageData, metric: Metric) -> Float64[Tensor, "samples n_in"]:
    """Return inputs for the bonds of the function."""
    x = data.train_images.to("cpu", torch.float64)
    if metric == "images":
        # Evenly spaced, since images may be sorted by class.
        return x[:: max(1, len(x) // SAMPLES)][:SAMPLES]
    mean, covariance = torch.zeros_like(x[0]), torch.eye(x.shape[1]).to(x)
    if metric == "gaussian":
        mean = x.mean(0)
        covariance = (x - mean).T @ (x - mean) / len(x)
    return gaussian_samples(SAMPLES, mean, covariance)


def _check_full_width(model: TensorChain, result: Bonds, images: Float[Tensor, "n n_in"]) -> None:
    """Check the cut of all directions against the model's own logits, minus their mean."""
    logits = predict(model, images)
    check_sum(
        "The model on all directions of its bonds",
        result.cut([bond.k for bond in result.bonds])(images.to("cpu", torch.float64)),
        logits - logits.mean(-1, keepdim=True),
        size=UNITS * float(logits.abs().max()),
        dtype=logits.dtype,
    )


@reading("bonds")
@torch.no_grad()
@full_precision
def read_bonds(
    model: TensorChain, data: ImageData, *, drop: Share = 0.01, metric: Metric = "images"
) -> BondReading:
    """Cut a classifier to the directions that its accuracy needs, and describe each of them.

    Computes the bonds of the tree and of the function, and cuts by the kind that needs fewer
    directions. These are chosen on training images, on which they may lose accuracy up to `drop`,
    and are measured on test images. Bonds are computed in float64 on the CPU.

    Args:
        model: the classifier.
        data: its images.
        drop: accuracy that the cut may lose, as a share of the images.
        metric: second moment of inputs, that of the training images or the identity.

    Raises:
        NotBilinearError: a gate is not linear, or a norm divides by the input's length.
        BilensError: drop is negative, the metric is unknown, or the model differs from its tensors.
    """
    data = data.to("cpu")
    check_reproduces(model, input_tensors(model), data.test_images)
    bonds_of: dict[Kind, Bonds] = {
        "tree": classifier_bonds(model, data, metric),
        "function": classifier_function_bonds(model, data, metric),
    }
    ranks = {kind: accurate_ranks(bonds_of[kind], data, drop) for kind in bonds_of}
    kind = min(bonds_of, key=lambda name: sum(ranks[name]))
    cut_reading = CutReading.of(bonds_of[kind].cut(ranks[kind]), data)
    logits = _full_cut(bonds_of["tree"])(data.test_images)
    return BondReading(
        model=model,
        data=data,
        metric=metric,
        drop=drop,
        ranks=ranks,
        kind=kind,
        bonds=bonds_of[kind],
        accuracy=accuracy(model, data.test_images, data.test_labels),
        by_rank=rank_accuracies(bonds_of[kind], data),
        cut_reading=cut_reading,
        held_out=held_out(logits, cut_reading.coordinates[-1], data.test_labels),
        by_products=product_accuracies(cut_reading.cut, data),
    )


@full_precision
def accurate_ranks(model_bonds: Bonds, data: ImageData, drop: Share = 0.01) -> tuple[int, ...]:
    """Find few directions that lose at most `drop` of the model's accuracy.

    They are searched on 10,000 training images and checked on 20,000 others. There the loss, image
    by image, has to be 3.09 standard errors below `drop`. Otherwise every bond gets one direction
    more. So the loss is within `drop` on images of the same kind with a confidence of 99.9 %.

    Raises:
        BilensError: drop is negative.
    """
    full = tuple(bond.k for bond in model_bonds.bonds)
    # Evenly spaced, since images may be sorted by class.
    spaced = slice(None, None, max(1, len(data.train_images) // TRAINING_IMAGES))
    x, labels = data.train_images[spaced], data.train_labels[spaced]
    # The input coordinates of every cut are the first of these, so they are computed once. Single
    # precision decides the same images within rounding, in half the time.
    z = model_bonds.cut(full).coordinates(x)[0].float()
    searched = torch.arange(len(z)) % 3 == 0
    checks = int((~searched).sum())

    def is_right(cut: Cut, images: Bool[Tensor, " images"]) -> Float64[Tensor, " _"]:
        outputs = z[images, : cut.ranks[0]]
        for core in cut.cores:
            outputs = core.to(torch.float32)(outputs)
        return (outputs.argmax(-1) == labels[images]).double()

    def loss_bound(cut: Cut, images: Bool[Tensor, " images"]) -> float:
        lost = reference[images] - is_right(cut, images)
        return float(lost.mean() + DEVIATIONS * lost.std() / checks**0.5)

    with progress_bar() as bar:
        task = bar.add_task("choosing directions", total=None, note="")
        reference = is_right(model_bonds.cut(full), torch.ones_like(searched))

        def score(cut: Cut) -> float:
            bound = loss_bound(cut, searched)
            bar.update(task, advance=1, note=f"{_sum(cut.ranks)} directions: {bound:.2%} lost")
            return -bound

        ranks = model_bonds.ranks_scoring(score, -drop)
        # The search has seen its images many times, and may have been lucky on them.
        while ranks != full and loss_bound(model_bonds.cut(ranks), ~searched) > drop:
            ranks = tuple(min(rank + 1, k) for rank, k in zip(ranks, full, strict=True))
        return ranks


@full_precision
def rank_accuracies(
    model_bonds: Bonds, data: ImageData, ranks: Sequence[int] = ()
) -> tuple[tuple[int, float, float], ...]:
    """Return (k, test accuracy, error of the logits) of the cut to k directions at each bond.

    The error is the RMS change of the centred logits on the test images, over their RMS. By default
    k runs from 1 to all directions in growing steps.
    """
    most = max(bond.k for bond in model_bonds.bonds)
    logits = _full_cut(model_bonds)(data.test_images)
    rows = []
    for k in ranks or [*(rank for rank in RANKS if rank < most), most]:
        outputs = model_bonds.cut(k)(data.test_images)
        error = float((outputs - logits).norm() / logits.norm())
        rows.append((k, _accuracy(outputs, data.test_labels), error))
    return tuple(rows)


def _full_cut(model_bonds: Bonds) -> Cut:
    """Return the model on all directions."""
    return model_bonds.cut(max(bond.k for bond in model_bonds.bonds))


@full_precision
def product_accuracies(cut: Cut, data: ImageData) -> tuple[tuple[int, float], ...]:
    """Return (k, test accuracy) with only the k products of largest share, for growing k."""
    most = len(cut.products())
    steps = range(PER_DECADE, 1 + int(PER_DECADE * math.log10(most)))
    counts = sorted({round(10 ** (step / PER_DECADE)) for step in steps} | {most})
    x = data.test_images.to(cut.read)
    rows = []
    for k in counts:
        z = x
        for tensor in cut.keep_products(k):
            z = tensor(z)
        rows.append((k, _accuracy(z, data.test_labels)))
    return tuple(rows)


def _sum(ranks: Sequence[int]) -> str:
    return " + ".join(map(str, ranks))


def _accuracy(logits: Float[Tensor, "images classes"], labels: Tensor) -> float:
    return int((logits.argmax(-1) == labels.to(logits.device)).sum()) / len(labels)


def _effects(
    cut: Cut, bond: int, z: Float64[Tensor, "images k"], number: int
) -> Float64[Tensor, " n_out"]:
    """Return the mean loss of each logit when a coordinate is set to zero."""
    without = z.clone()
    without[:, number] = 0
    both = torch.cat([z, without])
    for core in cut.cores[bond:]:
        both = core(both)
    complete, ablated = both.chunk(2)
    return (complete - ablated).mean(0)
