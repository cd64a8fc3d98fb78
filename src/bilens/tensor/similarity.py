"""Similar vectors and forms: best matches, cosines, and clusters of vectors up to sign."""

from dataclasses import dataclass
from typing import Annotated

import torch
from jaxtyping import Float, Float64, Int64
from torch import Tensor

from bilens.checks import check_finite, checked
from bilens.errors import BilensError
from bilens.settings import Between
from bilens.tensor.factors import hidden_product
from bilens.tensor.quadratic import QuadraticForm

Cosine = Annotated[float, Between(0, 1, above=True)]


@checked
def best_match(
    a: Float[Tensor, "*batch k_a n"], b: Float[Tensor, "*batch k_b n"]
) -> Float[Tensor, "*batch k_a"]:
    """Return the |cosine| of each row of `a` with the best matching row of `b`, (*batch, k_a).

    max_j |a_i . b_j| / (|a_i| |b_j|), and 0 for a row of zeros.

    Source: Pearce et al. 2024, figure 4.
    """
    if b.shape[-2] == 0:
        raise BilensError(f"b has shape {tuple(b.shape)}, expected at least one row to match with")
    check_finite(a=a, b=b)
    cosines = unit_rows(a) @ unit_rows(b).mT.to(a)
    return cosines.abs().amax(-1).clamp_max(1)


@checked
def form_cosines(a: QuadraticForm, b: QuadraticForm) -> Float64[Tensor, "k_a k_b"]:
    """Return the cosines <Q_i, Q'_j> / (|Q_i| |Q'_j|) of two batches of interaction matrices.

    Applied to `svd.components` they compare the components of two layers: take absolute values,
    since signs are arbitrary there. A zero form has cosine 0. Computed from the factors in float64,
    at O(rank_a rank_b n_in).

    Source: Pearce & Dooms 2024, appendix "MNIST training".
    """
    for name, form in (("a", a), ("b", b)):
        if len(form.batch_shape) != 1:
            raise BilensError(
                f"{name} has batch shape {tuple(form.batch_shape)}, expected one axis: the "
                "components of an SVD, or tensor.interaction(...) of several directions"
            )
    if (a.n_in, a.constant) != (b.n_in, b.constant):
        raise BilensError(
            f"a has n_in={a.n_in}, constant={a.constant}; b has n_in={b.n_in}, "
            f"constant={b.constant}; they should be the same"
        )
    a, b = a.without_scale()[0], b.without_scale()[0]
    K = hidden_product(a.left.double(), a.right.double(), b.left.double(), b.right.double())
    inner = a.weights.double() @ K @ b.weights.double().T
    norms = a.norm()[:, None] * b.norm()
    return torch.where(norms > 0, inner / norms, torch.zeros_like(inner))


def unit_rows(rows: Float[Tensor, "*batch n"]) -> Float[Tensor, "*batch n"]:
    """Return each vector at unit length, however small or large it is; zero stays zero."""
    # Squares of very small or large entries leave the range of the dtype.
    largest = rows.abs().amax(-1, keepdim=True)
    scaled = rows / torch.where(largest > 0, largest, torch.ones_like(largest))
    length: Tensor = torch.linalg.vector_norm(scaled, dim=-1, keepdim=True)
    return scaled / length.clamp_min(0.5)


@dataclass(frozen=True, eq=False)
class Features:
    """Representative vectors of clusters, in descending order of weight.

    Attributes:
        vectors: one unit row for each feature: the direction of largest weighted sum of squares
            over its members; signed like its heaviest member.
        members: for each feature, the rows that belong to it, in ascending order.
        coverage: for each feature, its members' share of all weight; together 1.
        agreement: for each feature, the smallest |cosine| with one of its members.
    """

    vectors: Float[Tensor, "f n"]
    members: tuple[Int64[Tensor, " _"], ...]
    coverage: Float[Tensor, " f"]
    agreement: Float[Tensor, " f"]

    def __len__(self) -> int:
        """Return the number of features."""
        return self.vectors.shape[0]


@checked
def cluster(
    vectors: Float[Tensor, "m n"], weights: Float[Tensor, " m"], threshold: Cosine = 0.9
) -> Features:
    """Group rows that point the same way up to sign: |v_i . v_j| / (|v_i| |v_j|) >= threshold.

    The heaviest row leads the first group, and every row that resembles it joins. The heaviest of
    the remaining rows leads the next. A group's representative is its principal direction, the f
    that maximises sum_i w_i (f . v_i / |v_i|)^2. Then every row moves once to the direction that it
    resembles most; its cosine may be a little below `threshold`, see `agreement`. Nothing is
    random. Works in float64, and costs O(m n) for each feature.

    Args:
        vectors: one row each, of any length but zero; their lengths play no part.
        weights: how much each row matters, such as |effective eigenvalue|; not negative.
        threshold: least |cosine| with the leader of a group, above 0 and at most 1.
    """
    _check(vectors, weights)
    units, w = unit_rows(vectors.double()), weights.double()
    order = w.argsort(descending=True, stable=True)
    groups = _groups(leaders(units, order, threshold))
    representatives = torch.stack([_principal(units, w, rows) for rows in groups])
    # Leaders are single rows, found greedily: their groups' principal directions assign better.
    groups = _groups((units @ representatives.T).abs().argmax(-1))
    groups.sort(key=lambda rows: -float(w[rows].sum()))
    features = torch.stack([_principal(units, w, rows) for rows in groups])
    coverage = torch.stack([w[rows].sum() for rows in groups]) / w.sum()
    agreement = [(units[rows] @ f).abs().min() for rows, f in zip(groups, features, strict=True)]
    return Features(
        vectors=features.to(vectors.dtype),
        members=tuple(groups),
        coverage=coverage.to(vectors.dtype),
        agreement=torch.stack(agreement).clamp_max(1).to(vectors.dtype),
    )


def leaders(
    units: Float[Tensor, "m n"], order: Int64[Tensor, " m"], threshold: float
) -> Int64[Tensor, " m"]:
    """Return the group of each unit row, (m,).

    The first row in `order` leads the first group, which all rows that resemble it join, and so on.
    Groups are numbered in the order of their leaders. A zero row is a group by itself.
    """
    labels = torch.full_like(order, -1)
    # A vector's cosine with itself may come out a few roundings below 1.
    least = threshold - 8 * torch.finfo(units.dtype).eps
    count = 0
    for row in order.tolist():
        if labels[row] < 0:
            alike = (units @ units[row]).abs() >= least
            labels[alike & (labels < 0)] = count
            labels[row] = count
            count += 1
    return labels


def _groups(labels: Int64[Tensor, " m"]) -> list[Int64[Tensor, " _"]]:
    """Return the rows of each group that is not empty, in the order of their numbers."""
    numbers = sorted(set(labels.tolist()))
    return [(labels == number).nonzero()[:, 0] for number in numbers]


def _principal(
    units: Float64[Tensor, "m n"], weights: Float64[Tensor, " m"], rows: Int64[Tensor, " _"]
) -> Float64[Tensor, " n"]:
    """Return the direction of largest weighted sum of squares; without any weight all are equal."""
    w = weights[rows]
    heaviest = units[rows[w.argmax()]]
    share = w / w.sum() if w.sum() > 0 else torch.ones_like(w)
    _, _, directions = torch.linalg.svd(share.sqrt()[:, None] * units[rows], full_matrices=False)
    return torch.where(directions[0] @ heaviest < 0, -directions[0], directions[0])


def _check(vectors: Tensor, weights: Tensor) -> None:
    if vectors.numel() == 0:
        raise BilensError(f"vectors has shape {tuple(vectors.shape)}, expected at least one row")
    check_finite(vectors=vectors, weights=weights)
    if (weights < 0).any():
        raise BilensError("weights holds negative values; take magnitudes")
    zero = (vectors == 0).all(-1)
    if zero.any():
        raise BilensError(
            f"vectors[{int(zero.nonzero()[0])}] is zero and points nowhere; leave such rows out"
        )
    if not weights.any():
        raise BilensError("weights are all zero, so no feature has a share of them")
