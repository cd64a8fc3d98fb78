"""Feature vectors: dictionaries of features of a layer's output, and clusters of vectors."""

from dataclasses import dataclass
from typing import Annotated, Any

import torch
from jaxtyping import Float, Float64, Int64
from torch import Tensor

from bilens.checks import check_finite, checked
from bilens.errors import BilensError
from bilens.settings import Between
from bilens.tensor.bilinear import BilinearTensor
from bilens.tensor.factors import check_last_axis, in_range, wrong_shape


@checked
@dataclass(frozen=True, eq=False)
class Dictionary:
    """Output features F as columns, read off by a = F^+ y and written back by y = F a.

    F^+ y are the activations of least squares, of least length if several fit equally well. If
    the features span all outputs (`complete`), F F^+ = 1; otherwise F F^+ y is the part of y that
    they span. A dead feature, a column of zeros, has activation 0. Made by `Dictionary.of` or, from
    a trained autoencoder of SAELens, by `Dictionary.from_saelens`.

    Attributes:
        features: F, one column for each feature.
        inverse: F^+, one row for each feature, of the dtype of F.
        singular_values: of F, the largest first, in float64.
        rank: how many of them count; the rest was taken for zero.

    Source: Pearce & Dooms 2024, "The pseudoinverse trick for feature dictionaries"; their D is F
    here.
        Pearce et al. 2024, appendix B.1.
    """

    features: Float[Tensor, "n_out m"]
    inverse: Float[Tensor, "m n_out"]
    singular_values: Float64[Tensor, " s"]
    rank: int

    @classmethod
    def of(cls, features: Float[Tensor, "n_out m"]) -> "Dictionary":
        """Return the dictionary of the columns of F, its pseudoinverse computed in float64.

        Singular values up to max(n_out, m) eps sigma_1 count as zero, with eps that of the dtype of
        F. Differentiable as long as the rank does not change.
        """
        if features.numel() == 0:
            expected = "(n_out, m), with at least one row and column"
            raise wrong_shape("features", features, expected)
        check_finite(features=features)
        exact = features.double()
        # By the stored dtype: singular values below its rounding are noise, whatever they are
        # computed in.
        relative = max(features.shape) * torch.finfo(features.dtype).eps
        singular_values = torch.linalg.svdvals(exact.detach())
        rank = int((singular_values > relative * singular_values[0]).sum())
        # The pseudoinverse of a matrix of any size is that of one of size 1, divided by the size.
        size = singular_values[0].clamp_min(torch.finfo(torch.float64).tiny)
        inverse = (torch.linalg.pinv(exact / size, rtol=relative) / size).to(features.dtype)
        return cls(features, in_range(inverse=inverse), singular_values, rank)

    @classmethod
    def from_saelens(cls, sae: Any) -> "Dictionary":
        """Return the features of a sparse autoencoder of SAELens, the rows of its `W_dec`.

        Everything else of the autoencoder is ignored. The pseudoinverse replaces the encoder.
        Activations are those of y itself, not of y - b_dec. `cfg.normalize_activations` and
        `cfg.reshape_activations` are not undone. SAELens need not be installed.
        """
        decoder = getattr(sae, "W_dec", None)
        if not isinstance(decoder, Tensor) or decoder.ndim != 2:
            shape = f" of shape {tuple(decoder.shape)}" if isinstance(decoder, Tensor) else ""
            raise BilensError(
                f"sae is a {type(sae).__name__} with W_dec a {type(decoder).__name__}{shape}; "
                "expected a sparse autoencoder of SAELens, with a tensor W_dec of shape "
                "(d_sae, d_in). Any other matrix of features goes into Dictionary.of()."
            )
        return cls.of(decoder.detach().T)

    @property
    def n_out(self) -> int:
        """Number of outputs, the length of a feature."""
        return self.features.shape[0]

    @property
    def n_features(self) -> int:
        """Number of features, dead ones among them."""
        return self.features.shape[1]

    @property
    def complete(self) -> bool:
        """True if the features span all outputs, so that F F^+ = 1."""
        return self.rank == self.n_out

    def activations(self, y: Float[Tensor, "*batch n_out"]) -> Float[Tensor, "*batch m"]:
        """Return the activations a = F^+ y for each row of `y`, in the dtype of `y`."""
        check_last_axis("y", y, self.n_out, "output")
        return y @ self.inverse.T.to(y)

    def reconstruct(self, a: Float[Tensor, "*batch m"]) -> Float[Tensor, "*batch n_out"]:
        """Return the outputs y = F a for each row of `a`, in the dtype of `a`."""
        check_last_axis("a", a, self.n_features, "feature")
        return a @ self.features.T.to(a)

    def features_tensor(self, tensor: BilinearTensor) -> BilinearTensor:
        """Return the tensor of x -> F^+ B(x), with an output for each feature: D becomes F^+ D."""
        if tensor.n_out != self.n_out:
            raise BilensError(
                f"tensor has {tensor.n_out} outputs; the dictionary's features are vectors of "
                f"{self.n_out} numbers"
            )
        return tensor.change_basis(outputs=self.inverse)


Cosine = Annotated[float, Between(0, 1, above=True)]


def unit_rows(rows: Float[Tensor, "*batch n"]) -> Float[Tensor, "*batch n"]:
    """Return each vector at unit length, however small or large it is; zero stays zero."""
    # Squares of very small or large entries leave the range of the dtype.
    largest = rows.abs().amax(-1, keepdim=True)
    quotients = rows / torch.where(largest > 0, largest, torch.ones_like(largest))
    length: Tensor = torch.linalg.vector_norm(quotients, dim=-1, keepdim=True)
    return quotients / length.clamp_min(0.5)


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
    w = w / w.max()  # their sum may leave float64
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
    return [(labels == i).nonzero()[:, 0] for i in numbers]


def _principal(units: Tensor, weights: Tensor, rows: Tensor) -> Tensor:
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
