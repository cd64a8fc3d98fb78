"""The nearest input of another answer, exactly, for outputs that are quadratic functions.

The margin of class c over class j is a quadratic form of the change d of an input x:

    m(d) = d'A d + g'd + m(0),   A = Q_c - Q_j,   g = 2 A x + the linear part

The smallest |d| with m(d) <= 0 has no duality gap, so that it is found exactly:

    d(l) = -(l/2) (I + l A)^-1 g,   where m(d(l)) falls in l, from 0 to -1 / lambda_min(A)

If m is still positive at the end (the hard case: g has no part along the lowest eigenvector), a
step along that eigenvector does the rest. One eigendecomposition of a pair of classes serves all
inputs.

Source: the S-lemma; Polik and Terlaky 2007, A Survey of the S-Lemma, section 2. The trust region
subproblem's hard case is that of Conn, Gould and Toint 2000, section 7.3.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from jaxtyping import Float, Float64, Int
from torch import Tensor

from bilens.progress import progress_bar
from bilens.tensor import BilinearTensor

STEPS = 64
"""Halvings of the interval of l, enough for its last bit."""
NEGLIGIBLE = 1e-12
"""Eigenvalues below this share of the largest are rounding, and count as 0."""


class Forms(NamedTuple):
    """The outputs of a layer as quadratic functions of its inputs, in an orthonormal basis.

    z_c(y) = y'A_c y + b_c'y + k_c for y = P'x. A change orthogonal to the basis P changes nothing.
    """

    basis: Float64[Tensor, "n_pixels n"]
    quadratic: Float64[Tensor, "classes n n"]
    linear: Float64[Tensor, "classes n"]
    constant: Float64[Tensor, " classes"]

    def outputs(self, x: Float[Tensor, "samples n_pixels"]) -> Float64[Tensor, "samples classes"]:
        y = x.to(self.basis) @ self.basis
        squares = torch.einsum("sn,cnm,sm->sc", y, self.quadratic, y)
        return squares + y @ self.linear.T + self.constant


class PairMargins(NamedTuple):
    """The margins of one class over another, d'A d + g'd + m, for some inputs.

    Attributes:
        rows: numbers of the inputs.
        other: the other class.
        quadratic: A, the same for all inputs.
        gradient: g, in the basis of the forms.
        margin: m, at least 0.
    """

    rows: Int[Tensor, " inputs"]
    other: int
    quadratic: Float64[Tensor, "n n"]
    gradient: Float64[Tensor, "inputs n"]
    margin: Float64[Tensor, " inputs"]


def forms_of(
    tensor: BilinearTensor, embedding: Float[Tensor, "n n_in"] | None = None, k: int | None = None
) -> Forms:
    """Return a layer's outputs as forms of its inputs, or those of k eigenvectors an output.

    Eigenvectors are those of the space after the embedding, as in `class_spectra`.
    """
    if embedding is None:
        embedding = torch.eye(tensor.n_in, device=tensor.left.device)
    directions = torch.eye(tensor.n_out, dtype=tensor.out.dtype, device=tensor.out.device)
    interaction = tensor.interaction(directions)
    dense = interaction.dense() if k is None else interaction.eigh().truncate(k).dense()
    dense, embedding = dense.double(), embedding.double()
    n_pixels = embedding.shape[1] - tensor.constant
    weights, bias = embedding[:, :n_pixels], embedding[:, n_pixels:].sum(-1)
    # Only changes within the rows of the embedding change a logit.
    _, sizes, rows = torch.linalg.svd(weights, full_matrices=False)
    basis = rows[sizes > NEGLIGIBLE * sizes[0]].T
    inside = weights @ basis
    return Forms(
        basis,
        inside.T @ dense @ inside,
        2 * torch.einsum("mn,cmk,k->cn", inside, dense, bias),
        torch.einsum("m,cmk,k->c", bias, dense, bias),
    )


def smallest_changes(
    quadratic: Float64[Tensor, "n n"],
    gradient: Float64[Tensor, "samples n"],
    margin: Float64[Tensor, " samples"],
) -> Float64[Tensor, "samples n"]:
    """Return the smallest d with d'A d + g'd + m <= 0 for each sample, infinite if there is none.

    The margins m at d = 0 are not negative. A margin that comes down to 0 in the limit only, or
    touches it without change of sign, has no such d.
    """
    values, vectors = torch.linalg.eigh(quadratic)
    size = float(values.abs().max()) or 1.0
    values = torch.where(values.abs() < NEGLIGIBLE * size, 0, values / size)
    g, m = (gradient @ vectors) / size, margin / size
    lowest = float(values[0])

    def change(s: Float64[Tensor, " samples"]) -> Float64[Tensor, "samples n"]:
        # s falls from 1 at l = 0 to 0 at the end of the interval. Written in s, no digits of
        # 1 + l A are lost where the lowest eigenvalue's is nearly 0.
        s = s[:, None]
        if lowest < 0:
            ratio = values / -lowest
            return -(1 - s) / (-2 * lowest) * g / (1 + ratio - s * ratio)
        return -(1 - s) / 2 * g / (s + (1 - s) * values)

    def margins(d: Float64[Tensor, "samples n"]) -> Float64[Tensor, " samples"]:
        return (d * (d * values + g)).sum(-1) + m

    # Halved on the scale of the logarithm, since the root may lie anywhere near 0.
    low, high = (torch.full_like(m, bound) for bound in (1e-24, 1.0))
    for _ in range(STEPS):
        middle = (low * high).sqrt()
        above = margins(change(middle)) > 0
        low, high = torch.where(above, low, middle), torch.where(above, middle, high)
    d = change(high)
    rest = margins(d)
    is_open = rest > 1e-9 * m + 1e-300
    if lowest < 0:
        # The hard case: along the lowest eigenvector, which g has no part of, the margin falls as
        # lowest * step^2 + slope * step.
        slope = g[:, 0] + 2 * lowest * d[:, 0]
        step = (slope.abs() + (slope**2 - 4 * lowest * rest.clamp_min(0)).sqrt()) / (-2 * lowest)
        step = torch.where(slope > 0, -step, step)
        d[:, 0] += torch.where(is_open, step, 0)
    else:
        d[is_open] = torch.inf
    d[m <= 0] = 0
    is_finite = d.isfinite().all(-1)
    d[is_finite] = d[is_finite] @ vectors.T
    return d


def nearest_changes(
    forms: Forms, x: Float[Tensor, "samples n_pixels"], classes: Int[Tensor, " samples"]
) -> tuple[Float64[Tensor, " samples"], Int[Tensor, " samples"], Float64[Tensor, "samples n"]]:
    """Return the radius, the nearest other class and the change, in the basis, of each picture.

    The radius is that of the answer `classes`: 0 where another logit is larger, and infinite, with
    the class itself, where no change of any size changes the answer.
    """
    radius = forms.basis.new_full((len(x),), torch.inf)
    other, nearest = classes.clone(), radius[:, None].repeat(1, forms.basis.shape[1])
    for rows, j, quadratic, gradient, margin in margins_of(forms, x, classes):
        changes = smallest_changes(quadratic, gradient, margin)
        lengths = changes.norm(dim=-1)
        closer = lengths < radius[rows]
        radius[rows] = torch.where(closer, lengths, radius[rows])
        other[rows] = torch.where(closer, j, other[rows])
        nearest[rows] = torch.where(closer[:, None], changes, nearest[rows])
    return radius, other, nearest


def margins_of(
    forms: Forms, x: Float[Tensor, "samples n_pixels"], classes: Int[Tensor, " samples"]
) -> Iterator[PairMargins]:
    """Yield the margins of each class over each other one, for the inputs of the class."""
    y, logits = x.to(forms.basis) @ forms.basis, forms.outputs(x)
    for c in progress_bar("nearest pictures, by class", classes.unique().tolist()):
        rows = (classes == c).nonzero().flatten()
        for j in range(logits.shape[1]):
            if j == c:
                continue
            quadratic = forms.quadratic[c] - forms.quadratic[j]
            gradient = 2 * y[rows] @ quadratic + forms.linear[c] - forms.linear[j]
            margin = (logits[rows, c] - logits[rows, j]).clamp_min(0)
            yield PairMargins(rows, j, quadratic, gradient, margin)
