"""A few directions of a quadratic form that carry it exactly at a vector: Gauss quadrature."""

from collections.abc import Callable

import torch
from jaxtyping import Float
from torch import Tensor

GONE = {torch.float64: 1e-9, torch.float32: 1e-4}
"""A vector that orthogonalisation leaves this share of its length lies in the space already."""


def ritz_pairs(
    apply: Callable[[Float[Tensor, "forms k n"]], Float[Tensor, "forms k n"]],
    starts: Float[Tensor, "forms s n"],
    m: int,
) -> tuple[Float[Tensor, "forms m"], Float[Tensor, "forms m n"]]:
    """Return Ritz values and vectors of symmetric forms in Krylov spaces of m dimensions.

    The space of each form Q is spanned by the starts x, y, then Qx, Qy, Q^2 x and so on, m vectors
    in all. The Ritz vectors are an orthonormal basis of it. A vector in the span of the starts is
    the sum of its parts along them. For starts z and Qz this is m-point Gauss
    quadrature of z'Qz. If a space has fewer dimensions, the remaining vectors are zero. Costs
    m products with each form.

    Args:
        apply: the product of each form with k vectors.
        starts: vectors that the space holds.
        m: number of dimensions, at least the number of starts.

    Source:
        Golub and Meurant 2010, "Matrices, Moments and Quadrature with Applications".
    """
    basis: list[Tensor] = []
    images: list[Tensor] = []
    for number in range(m):
        # The first vectors are the starts; each later one is the image of an earlier one.
        behind = number - starts.shape[1]
        candidate = starts[:, number] if behind < 0 else images[behind]
        basis.append(_orthogonalised(candidate, basis))
        images.append(apply(basis[-1][:, None])[:, 0])
    space, applied = torch.stack(basis, 1), torch.stack(images, 1)
    small = (space @ applied.mT).double()
    small = (small + small.mT) / 2
    # A zero vector gets a value beyond all others, so that it does not mix with the rest.
    absent = (space == 0).all(-1)
    beyond = 2 * small.abs().sum((-1, -2)) + 1
    values, rotation = torch.linalg.eigh(small + torch.diag_embed(absent * beyond[:, None]))
    vectors = rotation.mT.to(space) @ space
    return values.to(space), vectors


def _orthogonalised(x: Float[Tensor, "forms n"], basis: list[Tensor]) -> Float[Tensor, "forms n"]:
    """Return unit vectors orthogonal to a basis; zero where it spans x already."""
    length = x.norm(dim=-1, keepdim=True)
    y = x / length.clamp_min(torch.finfo(x.dtype).tiny)
    if not basis:
        return y
    space = torch.stack(basis, 1)
    left = torch.ones_like(length)
    # Twice is enough to be orthogonal at rounding accuracy, once the first remainder has length 1
    # again (Kahan and Parlett).
    for _ in range(2):
        y = y - ((space @ y[..., None]).mT @ space)[:, 0]
        size = y.norm(dim=-1, keepdim=True)
        left, y = left * size, y / size.clamp_min(torch.finfo(x.dtype).tiny)
    return torch.where((left > GONE[x.dtype]) & (length > 0), y, 0)
