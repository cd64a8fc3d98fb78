"""Classifiers that are certified: no change shorter than a radius changes their answer."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from jaxtyping import Float, Float64, Int
from torch import Tensor

from bilens.analysis import Reading
from bilens.checks import check_finite, check_labels, detached
from bilens.data import ImageData
from bilens.data.pictures import read_picture
from bilens.errors import BilensError
from bilens.images import chain
from bilens.images.bounds import layered_radii
from bilens.images.fidelity import clopper_pearson
from bilens.images.nearest import forms_of, nearest_changes
from bilens.sections import Columns, Fact, Percent
from bilens.settings import Count
from bilens.tensor import TensorChain
from bilens.tensor.factors import fit_input

RADII = (0.1, 0.2, 0.3, 0.5, 0.7, 1.0, 1.5, 2.0)
"""Radii of the table of certified accuracy, in units of a pixel's range."""


@dataclass(frozen=True, eq=False, repr=False)
class CertifiedRadii(Reading):
    """The distance of each picture from the nearest picture with another answer.

    Attributes:
        x: the pictures, flattened.
        labels: their classes.
        predicted: the model's answers.
        radius: Euclidean length of the smallest change that changes the answer: exact for a model
            of one layer, a lower bound for several. 0 for wrong answers, infinite if no change of
            any size does it.
        other: the class that the answer changes to, or the class of the bound.
        change: the smallest change, in pixels, which may leave the range from 0 to 1; infinite
            where there is none. None for a bound.
        shape: height and width of a picture; None if they are not pictures.
        class_names: names of the classes.
    """

    x: Float[Tensor, "images n_pixels"]
    labels: Int[Tensor, " images"]
    predicted: Int[Tensor, " images"]
    radius: Float64[Tensor, " images"]
    other: Int[Tensor, " images"]
    change: Float64[Tensor, "images n_pixels"] | None
    shape: tuple[int, int] | None = None
    class_names: tuple[str, ...] = ()

    title: ClassVar[str] = "How far is the nearest picture of another answer?"
    axes: ClassVar[dict[str, str]] = {"x": "radius", "y": "certified"}
    formats: ClassVar[dict[str, str]] = dict.fromkeys(("certified", "low", "high"), ".1%")

    @property
    def right(self) -> Int[Tensor, " right"]:
        """The numbers of the pictures with a right answer."""
        return (self.predicted == self.labels).nonzero().flatten()

    def certified(self, radius: float) -> tuple[float, float, float]:
        """Return the share of pictures that are right within a radius, with its 95 % interval."""
        count = int((self.radius[self.right] > radius).sum())
        return count / len(self.labels), *clopper_pearson(count, len(self.labels))

    def facts(self) -> list[Fact]:
        radii = self.radius[self.right]
        facts: list[Fact] = [
            ("pictures", len(self.labels)),
            ("right", Percent(len(radii) / len(self.labels))),
            ("radius", "exact" if self.change is not None else "a lower bound"),
        ]
        if len(radii):
            facts.append(("median radius of right answers", float(radii.median())))
        if without := int(radii.isinf().sum()):
            facts.append(("right answers that no change of any size changes", without))
        return facts

    def columns(self) -> Columns:
        """Return the certified accuracy by radius, with its 95 % interval."""
        rows = [(radius, *self.certified(radius)) for radius in RADII]
        return dict(
            zip(("radius", "certified", "low", "high"), zip(*rows, strict=True), strict=True)
        )

    def answer(self) -> str:
        """Return the median radius and the share that stays right within a half."""
        radii = self.radius[self.right]
        if not len(radii):
            return "The model has no picture right, so that there is no answer to certify."
        share, low, high = self.certified(0.5)
        bound = "This is exact: a change of the radius's length gives another answer."
        if self.change is None:
            bound = "This is a lower bound, since the model has several layers."
        if len(self.labels) == 1 and self.class_names:
            name, other = (self.class_names[int(i)] for i in (self.labels, self.other))
            return (
                f"The answer {name} holds for every change of the picture that is shorter than "
                f"{float(radii):.2f}. {bound} The nearest other class is {other}."
            )
        return (
            f"Half of the {len(radii):,} right answers hold for every change of the picture that "
            f"is shorter than {float(radii.median()):.2f}. {bound} Within 0.5, {share:.1%} of all "
            f"pictures stay right whatever the change (95 % interval {low:.1%} to {high:.1%})."
        )


@detached
def certify(
    model: TensorChain, x: Float[Tensor, "images n_pixels"], labels: Int[Tensor, " images"]
) -> CertifiedRadii:
    """Find the nearest picture of another answer for every picture that the model has right.

    One layer is solved exactly: every change shorter than the radius keeps the answer, and the
    change that is returned reaches the boundary. Of several layers the radius is a lower bound; see
    `bilens.images.bounds`. What is not certified: changes other than additions to pixels, and the
    range of pixels, from which the nearest picture may depart (`box_bounds`).

    Raises:
        BilensError: the model differs from its tensors, or the labels are not its classes.
    """
    check_finite(x=x)
    tensors = chain.input_tensors(model)
    check_labels(labels, tensors[-1].n_out)
    chain.check_outputs(model, tensors, x)
    device = tensors[0].left.device
    x, labels = x.to(device), labels.to(device)
    answers = chain.predict(model, x).argmax(-1).to(device)
    rows = (answers == labels).nonzero().flatten()
    radius = torch.zeros(len(x), dtype=torch.float64, device=device)
    other = answers.clone()
    if len(tensors) > 1:
        radius[rows], other[rows] = layered_radii(tensors, x[rows], labels[rows])
        return CertifiedRadii(x, labels, answers, radius, other, None)
    forms = forms_of(*chain.open_layer(model))
    radius[rows], other[rows], changes = nearest_changes(forms, x[rows], labels[rows])
    change = torch.zeros_like(x, dtype=torch.float64)
    is_finite = changes.isfinite().all(-1)
    change[rows[is_finite]] = changes[is_finite] @ forms.basis.T
    change[rows[~is_finite]] = torch.inf
    return CertifiedRadii(x, labels, answers, radius, other, change)


@detached
def read_certificates(
    model: TensorChain, data: ImageData, images: Count, image: str | None = None
) -> CertifiedRadii:
    """Certify the first test images, or the answer to the picture of a file; see `certify`."""
    chain.check_reproduces(model, chain.input_tensors(model), data)
    x, labels = data.test_images[:images], data.test_labels[:images]
    if image is not None:
        x = read_picture(image, data)[None]
        labels = chain.predict(model, x).argmax(-1)
    reading = certify(model, x, labels)
    return replace(reading, shape=data.shape, class_names=data.class_names)


@detached
def proved_agreement(
    model: TensorChain,
    smaller: TensorChain | int,
    x: Float[Tensor, "images n_pixels"],
    radii: Sequence[float] = (0.0, 0.1, 0.3, 0.5),
) -> dict[float, float]:
    """Return the share of pictures for which every picture within r has the same answer twice.

    Both models have one layer; `smaller` may be a number k, for the model's own k eigenvectors of
    largest eigenvalue of each class. Both answer the same within the smaller of their two radii.
    """
    check_finite(x=x)
    forms = forms_of(*chain.open_layer(model))
    if isinstance(smaller, int):
        others = forms_of(*chain.open_layer(model), smaller)
    else:
        others = forms_of(*chain.open_layer(smaller))
    x = fit_input(x, forms.basis.T, constant=False)
    if not len(x):
        raise BilensError("x is empty, expected at least one picture")
    answers = forms.outputs(x).argmax(-1)
    rows = (answers == others.outputs(x).argmax(-1)).nonzero().flatten()
    lengths = [nearest_changes(each, x[rows], answers[rows])[0] for each in (forms, others)]
    nearer = torch.minimum(*lengths)
    return {r: float((nearer > r).sum() if r else len(rows)) / len(x) for r in radii}
