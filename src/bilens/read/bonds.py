"""The few directions between the layers of a deep classifier, and what each of them does."""

import math
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar, Literal

import torch
from jaxtyping import Float64
from torch import Tensor

from bilens.checks import full_precision
from bilens.data import ImageData
from bilens.lazy_imports import pd
from bilens.nn import ImageClassifier
from bilens.progress import progress_bar
from bilens.reading import Fact, Percent, Reading
from bilens.settings import Share
from bilens.tensor import Bonds, Cut, Products, bonds, sparse_basis, with_constant

__all__ = [
    "BondDirection",
    "BondReading",
    "CutReading",
    "End",
    "Metric",
    "accurate_ranks",
    "classifier_bonds",
    "product_accuracies",
    "rank_accuracies",
    "read_bonds",
]

Metric = Literal["images", "weights"]
"""What the inputs are taken to be: the training images, or anything (weights alone)."""

UNIFORM = (1, 2, 3, 4, 5, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30, 35, 40, 50, 60, 80, 100)
CHOOSING = 10_000
"""Training images that ranks are chosen on."""
PER_DECADE, SHOWN, END = 10, 4, 0.02


@dataclass(frozen=True, eq=False)
class End:
    """What a direction does where its coordinate is largest, or smallest.

    Attributes:
        images: the test images at the very end.
        effects: what each logit, less the mean of all, loses where the coordinate is set to zero;
            the mean over the 2 % of the test images nearest to the end.
    """

    images: tuple[int, ...]
    effects: tuple[float, ...]


@dataclass(frozen=True, eq=False)
class BondDirection:
    """A coordinate of a cut model.

    Attributes:
        bond: number of the bond, the input's being 0.
        number: its own, of those of the bond.
        share: U_kk, what the model would lose of its squared norm with one use of it.
        ends: where it is largest, and where it is smallest.
    """

    bond: int
    number: int
    share: float
    ends: tuple[End, End]


@dataclass(frozen=True, eq=False)
class CutReading:
    """A cut model, and what each of its coordinates does on test images.

    Attributes:
        cut: the model, in a sparse basis.
        data: the data it is looked at on.
        coordinates: of the test images at each bond, the input's first, and then the logits.
    """

    cut: Cut
    data: ImageData
    coordinates: tuple[Float64[Tensor, "images _"], ...]

    @classmethod
    def of(cls, cut: Cut, data: ImageData) -> "CutReading":
        """Look at test images through a cut, in the coordinates of its sparse basis."""
        cut = sparse_basis(cut)
        return cls(cut, data, tuple(cut.coordinates(data.test_images)))

    @cached_property
    def products(self) -> Products:
        """What the layers of the cut add up, the largest share first."""
        return self.cut.products()

    @torch.no_grad()
    def direction(self, bond: int, number: int) -> BondDirection:
        """One coordinate: where it is largest and smallest, and what it does there."""
        z = self.coordinates[bond]
        near = max(1, round(END * len(z)))
        order = z[:, number].argsort(descending=True)
        ends = [
            End(
                images=tuple(some[:SHOWN].tolist()),
                effects=tuple(_effects(self.cut, bond, z[some[:near]], number).tolist()),
            )
            for some in (order, order.flip(0))
        ]
        share = float(self.cut.environments[bond][number, number])
        return BondDirection(bond, number, share, (ends[0], ends[1]))

    def pixels(self, bond: int, number: int) -> list[Float64[Tensor, " n_in"]]:
        """A coordinate, or a logit, pulled back to the input.

        One of the input is a picture. Any other is a sum of squares over the coordinates below it:
        of its strongest eigenvector of either sign, the positive one first, and of the strongest
        ones below that down to the input, two pictures.
        """
        cut = self.cut
        if bond == 0:
            return [cut.write[:, number]]
        _, vectors = torch.linalg.eigh(cut.cores[bond - 1].interaction(output=number).dense())
        found = []
        for end in (-1, 0):
            v = vectors[:, end]
            for core in reversed(cut.cores[: bond - 1]):
                values, below = torch.linalg.eigh(core.interaction(v).dense())
                v = below[:, values.abs().argmax()]
            picture = cut.write @ v
            # Of a square either sign is the same.
            found.append(picture if picture.sum() >= 0 else -picture)
        return found


@dataclass(frozen=True, eq=False, repr=False)
class BondReading(Reading):
    """A deep classifier on few directions.

    Attributes:
        drop: accuracy that the cut may lose on training images.
        bonds: all singular values and directions, for logits less their mean.
        accuracy: of the model on the test images.
        by_rank: (directions at each bond, test accuracy, certificate) of uniform cuts.
        kept: the smallest cut found that loses at most `drop`.
        cut_accuracy: its test accuracy.
        by_products: (products kept, test accuracy) in that basis.
    """

    model: ImageClassifier
    data: ImageData
    metric: Metric
    drop: float
    bonds: Bonds
    accuracy: float
    by_rank: tuple[tuple[int, float, float], ...]
    kept: CutReading
    cut_accuracy: float
    by_products: tuple[tuple[int, float], ...]

    axes: ClassVar[dict[str, str]] = Bonds.axes

    def facts(self) -> list[Fact]:
        """Return the data, and the accuracy with all directions and with few."""
        return [
            ("data", self.data.name),
            ("test accuracy", Percent(self.accuracy)),
            ("directions", " + ".join(map(str, self.cut.ranks))),
            ("test accuracy with these", Percent(self.cut_accuracy)),
            ("certificate", self.cut.certificate),
        ]

    def frame(self) -> "pd.DataFrame":
        """A row for each direction of each bond."""
        return self.bonds.frame()

    @property
    def cut(self) -> Cut:
        """The smallest cut found."""
        return self.kept.cut

    def cut_model(self) -> ImageClassifier:
        """The cut as an ordinary classifier."""
        return ImageClassifier.from_cut(self.cut, self.model.config)

    def record(self) -> dict[str, Any]:
        """The numbers, for JSON."""
        return {
            "data": self.data.name,
            "metric": self.metric,
            "accuracy": self.accuracy,
            "shares": [bond.shares.tolist() for bond in self.bonds.bonds],
            "by_rank": [list(row) for row in self.by_rank],
            "drop": self.drop,
            "ranks": list(self.cut.ranks),
            "certificate": self.cut.certificate,
            "error": self.bonds.error(self.cut.ranks),
            "cut_accuracy": self.cut_accuracy,
            "by_products": [list(row) for row in self.by_products],
        }


@torch.no_grad()
@full_precision
def classifier_bonds(model: ImageClassifier, data: ImageData, metric: Metric = "images") -> Bonds:
    """The bonds of a classifier, from pixels to its logits less their mean.

    What is added to all logits alike decides nothing, so it does not count. The metric is the
    second moment of the training images, or for "weights" the identity.

    Raises:
        NotBilinearError: a gate is not linear, or there is a norm.
        BilensError: the metric has another name.
    """
    *lower, last = model.layer_tensors()
    n = data.n_classes
    centred = last.change_basis(outputs=torch.eye(n).to(last.out) - 1 / n)
    moment = None
    if metric == "images":
        x = data.train_images.double()
        x = with_constant(x) if centred.constant else x
        moment = x.T @ x / len(x)
    return bonds([*lower, centred], torch.eye(n), moment, model.embedding())


@torch.no_grad()
@full_precision
def read_bonds(
    model: ImageClassifier, data: ImageData, *, drop: Share = 0.01, metric: Metric = "images"
) -> BondReading:
    """Cut a classifier to the directions that its accuracy needs, and look at each of them.

    Directions are chosen greedily on training images, where they may lose accuracy up to `drop`,
    and measured on test images. All of it is in float64 and on the CPU, wherever the model is.

    Raises:
        NotBilinearError: a gate is not linear, or there is a norm.
        BilensError: drop is negative, or the metric has another name.
    """
    model, data = deepcopy(model).to("cpu"), data.to("cpu")
    found = classifier_bonds(model, data, metric)
    kept = CutReading.of(found.cut(accurate_ranks(found, model, data, drop)), data)
    tested = data.test_images, data.test_labels
    return BondReading(
        model=model,
        data=data,
        metric=metric,
        drop=drop,
        bonds=found,
        accuracy=model.accuracy(*tested),
        by_rank=rank_accuracies(found, model, data),
        kept=kept,
        cut_accuracy=ImageClassifier.from_cut(kept.cut, model.config).accuracy(*tested),
        by_products=product_accuracies(kept.cut, data),
    )


@full_precision
def accurate_ranks(
    found: Bonds, model: ImageClassifier, data: ImageData, drop: Share = 0.01
) -> tuple[int, ...]:
    """Few directions, found greedily, that lose accuracy up to `drop` on 10,000 training images.

    Raises:
        BilensError: drop is negative.
    """
    x, labels = data.train_images[:CHOOSING], data.train_labels[:CHOOSING]
    whole = found.cut(max(bond.k for bond in found.bonds))
    # Every cut reads some of these.
    z = whole.coordinates(x)[0]
    with progress_bar() as bar:
        task = bar.add_task("choosing directions", total=None, note="")

        def score(cut: Cut) -> float:
            outputs = z[:, : cut.ranks[0]]
            for core in cut.cores:
                outputs = core(outputs)
            accuracy = float((outputs.argmax(-1) == labels).double().mean())
            ranks = " + ".join(map(str, cut.ranks))
            bar.update(task, advance=1, note=f"{ranks} directions: {accuracy:.2%}")
            return accuracy

        # Rounding may cost the uncut model an image.
        least = min(model.accuracy(x, labels) - drop, score(whole))
        return found.ranks_scoring(score, least)


@full_precision
def rank_accuracies(
    found: Bonds, model: ImageClassifier, data: ImageData, ranks: Sequence[int] = ()
) -> tuple[tuple[int, float, float], ...]:
    """For each k of `ranks`: k, test accuracy and certificate of the cut to k directions a bond.

    By default for k from 1 to all of them in growing steps.
    """
    most = max(bond.k for bond in found.bonds)

    def row(k: int) -> tuple[int, float, float]:
        cut = found.cut(k)
        whole = ImageClassifier.from_cut(cut, model.config)
        return k, whole.accuracy(data.test_images, data.test_labels), cut.certificate

    return tuple(map(row, ranks or [*(k for k in UNIFORM if k < most), most]))


@full_precision
def product_accuracies(cut: Cut, data: ImageData) -> tuple[tuple[int, float], ...]:
    """Test accuracy with the k products of largest share alone, for k up by a constant factor."""
    most = len(cut.products())
    steps = range(PER_DECADE, 1 + int(PER_DECADE * math.log10(most)))
    counts = sorted({round(10 ** (step / PER_DECADE)) for step in steps} | {most})
    x = data.test_images.to(cut.read)
    found = []
    for k in counts:
        z = x
        for tensor in cut.keep_products(k):
            z = tensor(z)
        found.append((k, float((z.argmax(-1) == data.test_labels).double().mean())))
    return tuple(found)


def _effects(
    cut: Cut, bond: int, z: Float64[Tensor, "images k"], number: int
) -> Float64[Tensor, " n_out"]:
    """What the logits lose on average when a coordinate is set to zero."""
    without = z.clone()
    without[:, number] = 0
    both = torch.cat([z, without])
    for core in cut.cores[bond:]:
        both = core(both)
    whole, rest = both.chunk(2)
    return (whole - rest).mean(0)
