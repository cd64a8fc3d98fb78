"""Logits of one input split by eigenvectors, and features that several classes share."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from jaxtyping import Float
from torch import Tensor

from bilens.analysis import Reading
from bilens.checks import check_finite, checked, detached
from bilens.errors import BilensError
from bilens.sections import Columns, Fact, Percent, by_column
from bilens.settings import Count
from bilens.tensor import Paths, Spectrum, cluster


@dataclass(frozen=True)
class ClassUse:
    """Use of a feature by one class."""

    label: int  # number of the class
    # Numbers of the eigenvectors that lead to it, from the last layer down; 0 has the largest
    # |eigenvalue|.
    place: tuple[int, ...]
    # True if its branch raises the logit: the sign of the eigenvalue in the last layer.
    raises: bool
    weight: float  # its share of all weight


@dataclass(frozen=True, eq=False)
class SharedFeature:
    """Input direction that represents eigenvectors of several classes."""

    # The direction, of unit length, with the sign of the heaviest of them.
    vector: Float[Tensor, " n_in"]
    uses: tuple[ClassUse, ...]  # all uses, the heaviest first
    agreement: float  # smallest |cosine| between the direction and one of its eigenvectors

    @property
    def weight(self) -> float:
        """Share of all weight that its uses have."""
        return sum(use.weight for use in self.uses)

    def labels(self, *, raises: bool) -> list[int]:
        """Return the classes that it raises, or lowers, each once by its heaviest use."""
        return list(dict.fromkeys(use.label for use in self.uses if use.raises == raises))


@dataclass(frozen=True, eq=False, repr=False)
class SharedFeatures(Reading):
    """Features used by several classes, those of largest weight first.

    The number of eigenvectors `compared` form `groups`, those of a single class included.
    """

    features: tuple[SharedFeature, ...]
    compared: int
    groups: int

    title: ClassVar[str] = "Features shared by classes"
    axes: ClassVar[dict[str, str]] = {"x": "feature", "y": "weight"}

    @property
    def weight(self) -> float:
        """Share of all weight that shared features have."""
        return sum(feature.weight for feature in self.features)

    def facts(self) -> list[Fact]:
        return [
            ("shared features", len(self.features)),
            ("share of all weight", Percent(self.weight)),
            ("eigenvectors compared", self.compared),
            ("groups", self.groups),
        ]

    def columns(self) -> Columns:
        """Return a row for each feature: its weight, agreement, and the classes of either sign."""
        rows = []
        for i, feature in enumerate(self.features):
            sides = (map(str, feature.labels(raises=raises)) for raises in (True, False))
            rows.append((i, feature.weight, feature.agreement, *map(", ".join, sides)))
        return by_column(["feature", "weight", "agreement", "raises", "lowers"], rows)


def check_classes(spectrum: Spectrum) -> None:
    """Raise BilensError unless a spectrum is batched over the classes."""
    if len(spectrum.batch_shape) != 1:
        raise BilensError(
            f"spectrum has batch shape {tuple(spectrum.batch_shape)}, expected one axis, the "
            "classes: class_spectra(model)"
        )


@checked
def shared_by_classes(spectrum: Spectrum, k: Count = 20) -> SharedFeatures:
    """Find features shared between classes, among the first k eigenvectors of each.

    An eigenvector weighs |lambda| |v|^2, the largest activation at an input of unit length. The
    spectrum is ordered by |eigenvalue|.
    """
    check_classes(spectrum)
    check_finite(spectrum=spectrum.values)
    first = spectrum.truncate(min(k, spectrum.k))
    weights, device = first.values.abs() * first.vectors.square().sum(-1), first.values.device
    return _shared(
        vectors=first.vectors.flatten(0, 1),
        weights=weights.flatten(),
        signed=first.values.flatten(),
        labels=torch.arange(first.batch_shape[0], device=device).repeat_interleave(first.k),
        places=torch.arange(first.k, device=device).repeat(first.batch_shape[0])[:, None],
    )


@checked
def shared_by_paths(paths: Paths) -> SharedFeatures:
    """Find features shared between classes, among the ends of the strongest paths of a deep model.

    A path weighs |effective eigenvalue|. At most the strongest 1,000 are compared. The paths are of
    one direction for each class.
    """
    # Time grows with the square of the number of paths.
    first = paths.truncate(min(1000, len(paths)))
    return _shared(
        vectors=first.vectors,
        weights=first.effective.abs(),
        signed=first.eigenvalues[:, 0],
        labels=first.roots,
        places=first.indices,
    )


def _shared(
    vectors: Tensor, weights: Tensor, signed: Tensor, labels: Tensor, places: Tensor
) -> SharedFeatures:
    """Cluster the vectors that have weight, and return the groups of several classes."""
    # Vectors without weight are arbitrary, and would be groups of their own.
    heavy = (weights > 0).nonzero()[:, 0]
    if not len(heavy):
        return SharedFeatures((), compared=0, groups=0)
    # A group has the sign of its heaviest vector. Two eigenvectors count as one feature from a
    # |cosine| of 0.7 on. In an MNIST classifier hardly any of different classes reach 0.9. At 0.5
    # nearly all are in groups whose pictures have little in common.
    clusters = cluster(vectors[heavy], weights[heavy], 0.7)
    shares = (weights.double() / weights.double().sum()).tolist()
    features = []
    for i, agreement in enumerate(clusters.agreement.tolist()):
        rows, uses = heavy[clusters.members[i]], []
        for row in rows[weights[rows].argsort(descending=True, stable=True)].tolist():
            place, raises = tuple(places[row].tolist()), bool(signed[row] > 0)
            uses.append(ClassUse(int(labels[row]), place, raises, shares[row]))
        # A class may use a feature twice, which is not sharing.
        if len({use.label for use in uses}) > 1:
            features.append(SharedFeature(clusters.vectors[i], tuple(uses), agreement))
    return SharedFeatures(tuple(features), compared=len(heavy), groups=len(clusters))


@dataclass(frozen=True, eq=False)
class LogitExplanation:
    """One logit as a sum over eigenvectors: their activations lambda (v . x)^2 and a remainder."""

    label: int  # number of the class
    logit: float
    # Numbers of the strongest eigenvectors for this input, by |activation|.
    numbers: tuple[int, ...]
    activations: Float[Tensor, " k"]  # the contribution of each to the logit
    # The eigenvectors, each with a positive overlap with the input.
    vectors: Float[Tensor, "k n_in"] = field(repr=False)
    remainder: float  # sum of the activations of all other eigenvectors


@dataclass(frozen=True, eq=False, repr=False)
class Explanation(Reading):
    """One input with all its logits, and the highest logits split into activations.

    Attributes:
        x: the input.
        logits: all logits.
        parts: the highest logits, the highest first.
        shape: height and width of an image, as which the input is drawn.
        class_names: their names.
    """

    x: Float[Tensor, " n_in"] = field(repr=False)
    logits: Float[Tensor, " classes"]
    parts: tuple[LogitExplanation, ...]
    shape: tuple[int, int] | None = None
    class_names: Sequence[str] = ()

    has_plain_fields: ClassVar[bool] = True
    title: ClassVar[str] = "The eigenvectors that make the highest logits"

    axes: ClassVar[dict[str, str]] = {"x": "term", "y": "activation", "color": "class"}
    explanation: ClassVar[str] = (
        "Each logit is the sum of the activations of its eigenvectors, which are numbered from the "
        "largest absolute eigenvalue."
    )

    def facts(self) -> list[Fact]:
        answer: list[Fact] = [("the model answers", self._name(self.parts[0].label))]
        return [*answer, *((f"logit of class {self._name(x.label)}", x.logit) for x in self.parts)]

    def columns(self) -> Columns:
        """Return a row for each eigenvector of each logit, and for the sum of all others."""
        rows: list[tuple[str, str, float]] = []
        for part in self.parts:
            label, activations = self._name(part.label), part.activations.tolist()
            for i, activation in zip(part.numbers, activations, strict=True):
                rows.append((label, str(i), activation))
            rows.append((label, "all others", part.remainder))
        return by_column(["class", "term", "activation"], rows)

    def _name(self, label: int) -> str:
        return self.class_names[label] if self.class_names else str(label)


@detached
def explain(
    spectrum: Spectrum, x: Float[Tensor, " n_in"], n_classes: Count = 3, k: Count = 5
) -> Explanation:
    """Split the highest logits of one input into the activations of k eigenvectors of each.

    The spectrum has all eigenvectors, batched over the classes.
    """
    check_classes(spectrum)
    check_finite(x=x)
    # The activation squares the overlap, so a vector may be turned towards the input.
    signs = torch.where(spectrum.overlaps(x) < 0, -1, 1).to(spectrum.vectors)
    activations = spectrum.activations(x)
    logits = activations.sum(-1)
    check_finite(logits=logits)
    parts = []
    for label in logits.argsort(descending=True)[:n_classes].tolist():
        values = activations[label]
        strongest = values.abs().topk(min(k, len(values))).indices
        parts.append(
            LogitExplanation(
                label=label,
                logit=float(logits[label]),
                numbers=tuple(strongest.tolist()),
                activations=values[strongest],
                vectors=signs[label, strongest, None] * spectrum.vectors[label, strongest],
                # By difference, so that the parts add up to the logit.
                remainder=float(logits[label] - values[strongest].sum()),
            )
        )
    return Explanation(x, logits, tuple(parts))
