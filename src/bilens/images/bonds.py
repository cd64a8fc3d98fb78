"""The few directions between the layers of a deep classifier, and the effect of each of them."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch
from jaxtyping import Float, Float64
from torch import Tensor

from bilens.analysis import Reading
from bilens.checks import check_sum, detached
from bilens.data import ImageData
from bilens.files import read_json_object
from bilens.images import chain
from bilens.images.cuts import CutReading
from bilens.images.fidelity import (
    HeldOut,
    accurate_ranks,
    can_promise,
    full_cut,
    held_out,
    product_accuracies,
    rank_accuracies,
)
from bilens.nn import ClassifierConfig, ImageClassifier
from bilens.options import Metric
from bilens.sections import Columns, Fact, Percent
from bilens.settings import Share
from bilens.tensor import (
    BilinearTensor,
    Bonds,
    Cut,
    TensorChain,
    bonds,
    function_bonds,
    with_constant,
)
from bilens.tensor.jacobian_bonds import Measure, gaussian_samples

BONDS_NAME = "bonds.json"
"""File in a run with the record of its cut."""

BondKind = Literal["tree", "function"]
"""Bonds of the tree (`bilens.tensor.bonds`) or of the function (`function_bonds`)."""


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

    model: TensorChain = field(repr=False)
    data: ImageData = field(repr=False)
    metric: Metric
    drop: float
    ranks: dict[BondKind, tuple[int, ...]]
    kind: BondKind
    bonds: Bonds = field(repr=False)
    accuracy: float
    by_rank: tuple[tuple[int, float, float], ...]
    cut_reading: CutReading = field(repr=False)
    held_out: HeldOut
    by_products: tuple[tuple[int, float], ...]

    has_plain_fields: ClassVar[bool] = True
    axes: ClassVar[dict[str, str]] = Bonds.axes
    title: ClassVar[str] = "How few directions does the model need?"

    def facts(self) -> list[Fact]:
        return [
            ("data", self.data.name),
            ("test accuracy", Percent(self.accuracy)),
            ("directions", as_sum(self.cut.ranks)),
            ("test accuracy with these", Percent(self.held_out.accuracy)),
            ("95 % interval", "{:.2%} to {:.2%}".format(*self.held_out.interval)),
            ("predictions changed", Percent(self.held_out.changed)),
            ("error of the logits", self.held_out.error),
            ("bonds of the", self.kind),
            ("metric", self.metric),
            ("drop", self.drop),
        ]

    def columns(self) -> Columns:
        """Return a row for each direction of each bond."""
        return self.bonds.columns()

    @property
    def cut(self) -> Cut:
        """The smallest cut."""
        return self.cut_reading.cut

    def cut_model(self) -> ImageClassifier:
        """Return the cut as an ordinary classifier."""
        data = self.data
        # The architecture follows from the cut; only sizes and names are the data's.
        sizes, names = (data.n_inputs, data.n_classes), data.class_names
        config = ClassifierConfig(*sizes, image_shape=data.shape, class_names=names)
        return ImageClassifier.from_cut(self.cut, config)

    def accuracies(self) -> Columns:
        """Return the accuracy of uniform cuts, and of the smallest cut unless it is one of them."""
        rows: list[tuple[int | str, float]] = [(k, share) for k, share, _ in self.by_rank]
        errors = [error for _, _, error in self.by_rank]
        widths = [bond.k for bond in self.bonds.bonds]
        uniform = [tuple(min(k, width) for width in widths) for k, _, _ in self.by_rank]
        if self.cut.ranks not in uniform:
            # Measured on the same images.
            rows.append((as_sum(self.cut.ranks), self.held_out.accuracy))
            errors.append(self.held_out.error)
        columns = chain.accuracy_columns("directions at each bond", rows, self.accuracy)
        return {**columns, "error of the logits": errors}

    @property
    def few(self) -> int:
        """A fifth of all directions: a rule, and not a choice by the images that measure it."""
        most = self.by_rank[-1][0]
        return max(k for k, _, _ in self.by_rank if k == 1 or 5 * k <= most)

    def answer(self) -> str:
        """Return the accuracy with few directions, in one sentence."""
        if self.data.is_chance(self.accuracy):
            return chain.chance_sentence(self.accuracy, self.data)
        accuracy = {k: share for k, share, _ in self.by_rank}[self.few]
        return (
            f"Of the {self.by_rank[-1][0]} directions between layers, {self.few} keep "
            f"{accuracy:.1%} of test images right, and {as_sum(self.cut.ranks)}, chosen on "
            f"training images, {self.held_out.accuracy:.1%}; all of them {self.accuracy:.1%}."
        )


@detached
def classifier_bonds(model: TensorChain, data: ImageData, metric: Metric = "images") -> Bonds:
    """Compute the bonds of a classifier as a tree, from pixels to logits minus their mean.

    A constant added to all logits changes no prediction, so it does not count.

    Raises:
        NotBilinearError: a gate is not linear, or a norm divides by the input's length.
    """
    layers, E, classes = _centred(model, data)
    moment = None
    if metric != "weights":
        x = data.train_images.to("cpu", torch.float64)
        x = with_constant(x) if layers[-1].constant else x
        # With the constant coordinate it holds the mean beside the covariance.
        moment = x.T @ x / len(x)
    result = bonds(layers, classes, moment, E)
    _check_full_width(model, result, data.train_images[: chain.COMPARED])
    return result


@detached
def classifier_function_bonds(
    model: TensorChain,
    data: ImageData,
    metric: Metric = "images",
    measure: Measure = "probabilities",
) -> Bonds:
    """Compute the bonds of a classifier as a function of its input, on 4,096 inputs.

    Outputs are logits minus their mean.

    Raises:
        NotBilinearError: a gate is not linear, or a norm divides by the input's length.
    """
    layers, E, classes = _centred(model, data)
    result = function_bonds(layers, classes, sample_inputs(data, metric), E, measure=measure)
    _check_full_width(model, result, data.train_images[: chain.COMPARED])
    return result


def _centred(model: TensorChain, data: ImageData) -> tuple[list[BilinearTensor], Tensor, Tensor]:
    """Return the tensors of the centred logits, the embedding, and a direction for each class."""
    tensors, embedding = chain.open_chain(model)
    # Rounding of float32 here would be larger than all that follows.
    *lower, last = (tensor.to("cpu").to(torch.float64) for tensor in tensors)
    classes = torch.eye(data.n_classes, dtype=torch.float64, device="cpu")
    # A number added to all logits changes no prediction, and directions would be spent on it.
    centred = last.change_basis(outputs=classes - 1 / data.n_classes)
    return [*lower, centred], embedding.to("cpu", torch.float64), classes


def sample_inputs(data: ImageData, metric: Metric) -> Float64[Tensor, "samples n_in"]:
    """Return inputs for the bonds of the function."""
    n = 4096
    x = data.train_images.to("cpu", torch.float64)
    if metric == "images":
        # Evenly spaced, since images may be sorted by class.
        return x[:: max(1, len(x) // n)][:n]
    mean, covariance = torch.zeros_like(x[0]), torch.eye(x.shape[1]).to(x)
    if metric == "gaussian":
        mean = x.mean(0)
        covariance = (x - mean).T @ (x - mean) / len(x)
    # Inputs from mean and covariance only, for a reading without images.
    return gaussian_samples(n, mean, covariance)


def _check_full_width(model: TensorChain, result: Bonds, images: Float[Tensor, "n n_in"]) -> None:
    """Check the cut of all directions against the model's own logits, minus their mean."""
    logits = chain.predict(model, images)
    check_sum(
        "The model on all directions of its bonds",
        result.cut([bond.k for bond in result.bonds])(images.to("cpu", torch.float64)),
        logits - logits.mean(-1, keepdim=True),
        size=chain.UNITS * float(logits.abs().max()),
        dtype=logits.dtype,
    )


@detached
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
        metric: inputs of the bonds.

    Raises:
        NotBilinearError: a gate is not linear, or a norm divides by the input's length.
        BilensError: the model differs from its tensors.
    """
    data = data.to("cpu")
    chain.check_reproduces(model, chain.input_tensors(model), data)
    bonds_of: dict[BondKind, Bonds] = {
        "tree": classifier_bonds(model, data, metric),
        "function": classifier_function_bonds(model, data, metric),
    }
    ranks = {kind: tuple(bond.k for bond in each.bonds) for kind, each in bonds_of.items()}
    if can_promise(data, drop):  # of both kinds or of none
        ranks = {kind: accurate_ranks(each, data, drop) for kind, each in bonds_of.items()}
    # Neither needs fewer on every model: the tree is exact, but its leaves are independent inputs.
    kind = min(bonds_of, key=lambda name: sum(ranks[name]))
    cut_reading = CutReading.of(bonds_of[kind].cut(ranks[kind]), data)
    # All directions of the tree are the model itself, centred and in float64.
    logits = full_cut(bonds_of["tree"])(data.test_images)
    return BondReading(
        model=model,
        data=data,
        metric=metric,
        drop=drop,
        ranks=ranks,
        kind=kind,
        bonds=bonds_of[kind],
        accuracy=chain.accuracy(model, data.test_images, data.test_labels),
        by_rank=rank_accuracies(bonds_of[kind], data),
        cut_reading=cut_reading,
        held_out=held_out(logits, cut_reading.coordinates[-1], data.test_labels),
        by_products=product_accuracies(cut_reading.cut, data),
    )


def recorded_settings(run: str | Path) -> dict[str, Any]:
    """Return `drop` and `metric` of the cut that is saved in a run; empty if there is none.

    Raises:
        CheckpointError: the record is damaged.
    """
    path = Path(run) / BONDS_NAME
    record = read_json_object(path) if path.is_file() else {}
    # Whatever reads the run next then shows the cut that is saved in it.
    return {name: record[name] for name in ("drop", "metric") if name in record}


def as_sum(ranks: Sequence[int]) -> str:
    """Return the directions of each bond as a sum."""
    return " + ".join(map(str, ranks))
