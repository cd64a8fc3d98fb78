"""Matrices without negative eigenvalues: second moments and covariances."""

import torch
from jaxtyping import Float, Float64
from torch import Tensor

from bilens.checks import check_finite
from bilens.errors import BilensError

__all__ = ["checked_positive", "square_root"]


def checked_positive(name: str, matrix: Float[Tensor, "n n"], n: int) -> Float64[Tensor, "n n"]:
    """A second moment or covariance of n inputs in float64, exactly symmetric, or an error."""
    if matrix.shape != (n, n):
        raise BilensError(
            f"{name} has shape {tuple(matrix.shape)}; expected ({n}, {n}), a row and a column for "
            "each input"
        )
    check_finite(**{name: matrix})
    M = matrix.double()
    largest = float(M.abs().max())
    rounding = 8 * n * torch.finfo(matrix.dtype).eps * largest
    if largest == 0 or float((M - M.T).abs().max()) > rounding:
        kind = "zero" if largest == 0 else "not symmetric"
        raise BilensError(f"{name} is {kind}; expected something like x.T @ x / len(x)")
    M = (M + M.T) / 2
    least = float(torch.linalg.eigvalsh(M)[0])
    if least < -rounding:
        raise BilensError(
            f"{name} has the eigenvalue {least:.3g}; expected none below 0, as x.T @ x / len(x) has"
        )
    return M


def square_root(
    P: Float64[Tensor, "n n"],
) -> tuple[Float64[Tensor, "n rank"], Float64[Tensor, "rank n"]]:
    """K with P = K K', one column for each direction that P has, and its pseudoinverse."""
    values, vectors = torch.linalg.eigh(P)
    kept = values > len(P) * torch.finfo(P.dtype).eps * values[-1]
    roots, vectors = values[kept].sqrt(), vectors[:, kept]
    return vectors * roots, (vectors / roots).T
