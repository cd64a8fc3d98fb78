"""Features that several classes share: eigenvectors of theirs that are alike up to sign."""

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from bilens.checks import check_finite, full_precision
from bilens.read.classes import check_classes
from bilens.settings import Count
from bilens.tensor import Paths, Spectrum, cluster

__all__ = ["SharedFeature", "SharedFeatures", "Use", "shared_by_classes", "shared_by_paths"]

ALIKE = 0.7
"""|cosine| from which on eigenvectors count as one feature.

In an MNIST classifier nearly no eigenvectors of different classes reach 0.9, and at 0.5 nearly all
are in groups whose pictures have little in common.
"""

MOST = 1000
"""Paths that are compared; time grows with the square of their number."""


@dataclass(frozen=True)
class Use:
    """A place where a feature is used.

    Attributes:
        place: the numbers of the eigenvectors that lead there, from the last layer on; 0 is the
            one of largest |eigenvalue|.
        raises: whether what it is part of raises the logit: the sign of the eigenvalue in the last
            layer.
        weight: its share of all weight.
    """

    label: int
    place: tuple[int, ...]
    raises: bool
    weight: float


@dataclass(frozen=True, eq=False)
class SharedFeature:
    """One direction in the input that stands for eigenvectors of more than one class.

    Attributes:
        vector: the direction, of unit length, signed like the heaviest of them.
        uses: all of them, the heaviest first.
        agreement: the smallest |cosine| with one of them.
    """

    vector: Float[Tensor, " n_in"]
    uses: tuple[Use, ...]
    agreement: float

    @property
    def weight(self) -> float:
        """The share of all weight that its uses have."""
        return sum(use.weight for use in self.uses)


@dataclass(frozen=True, eq=False)
class SharedFeatures:
    """The features that more than one class uses, those of largest weight first.

    The eigenvectors `compared` make so many `groups`, those of a single class among them.
    """

    features: tuple[SharedFeature, ...]
    compared: int
    groups: int

    @property
    def weight(self) -> float:
        """The share of all weight that shared features have."""
        return sum(feature.weight for feature in self.features)


@full_precision
def shared_by_classes(spectrum: Spectrum, k: Count = 20) -> SharedFeatures:
    """Features shared between classes, among the first k eigenvectors of each.

    An eigenvector weighs |lambda| |v|^2, the largest activation that an input of unit length can
    have. The spectrum is ordered by |eigenvalue|.

    Raises:
        BilensError: the spectrum is not a batch over classes or not finite, or k not positive.
    """
    check_classes(spectrum)
    check_finite(spectrum=spectrum.values)
    first = spectrum.truncate(min(k, spectrum.k))
    weights, device = first.values.abs() * first.vectors.square().sum(-1), first.values.device
    return _shared(
        vectors=first.vectors.flatten(0, 1),
        weights=weights.flatten(),
        signed=first.values.flatten(),
        classes=torch.arange(first.batch_shape[0], device=device).repeat_interleave(first.k),
        places=torch.arange(first.k, device=device).repeat(first.batch_shape[0])[:, None],
    )


@full_precision
def shared_by_paths(paths: Paths) -> SharedFeatures:
    """Features shared between classes, among the ends of the strongest paths of a deep model.

    A path weighs |effective eigenvalue|; of more than 1,000 the strongest 1,000 are compared. The
    paths are of one direction for each class.
    """
    first = paths.truncate(min(MOST, len(paths)))
    return _shared(
        vectors=first.vectors,
        weights=first.effective.abs(),
        signed=first.eigenvalues[:, 0],
        classes=first.roots,
        places=first.indices,
    )


def _shared(
    vectors: Float[Tensor, "m n_in"],
    weights: Float[Tensor, " m"],
    signed: Float[Tensor, " m"],
    classes: Int64[Tensor, " m"],
    places: Int64[Tensor, "m depth"],
) -> SharedFeatures:
    """Cluster what has a weight, and keep the groups of more than one class."""
    heavy = (weights > 0).nonzero()[:, 0]
    if not len(heavy):
        return SharedFeatures((), compared=0, groups=0)
    found = cluster(vectors[heavy], weights[heavy], ALIKE)
    shares = (weights.double() / weights.double().sum()).tolist()
    features = []
    for vector, members, agreement in zip(
        found.vectors, found.members, found.agreement.tolist(), strict=True
    ):
        rows = heavy[members]
        uses = [
            Use(
                label=int(classes[row]),
                place=tuple(places[row].tolist()),
                raises=bool(signed[row] > 0),
                weight=shares[row],
            )
            for row in rows[weights[rows].argsort(descending=True, stable=True)].tolist()
        ]
        if len({use.label for use in uses}) > 1:
            features.append(SharedFeature(vector, tuple(uses), agreement))
    return SharedFeatures(tuple(features), compared=len(heavy), groups=len(found))
