"""A bound on what any one eigenvector of a form carries, without its eigenvectors."""

import torch
from jaxtyping import Float
from torch import Tensor

from bilens.checks import full_precision
from bilens.tensor.quadratic import apply_factored

__all__ = ["largest_flow"]

STEPS, GRID, SAFETY, DEAD = 12, 64, 2.0, 1e-3
"""Lanczos steps, values tried, a factor for what lies between, and what counts as nothing."""


@full_precision
def largest_flow(
    left: Float[Tensor, "rank n"],
    right: Float[Tensor, "rank n"],
    weights: Float[Tensor, "forms rank"],
    z: Float[Tensor, "forms n"],
) -> Float[Tensor, " forms"]:
    """What no lambda (v.z)^2 of an eigenpair exceeds in magnitude, for each form.

    Lanczos from z gives orthonormal y_j, y_0 = z / |z|, and v.y_j = p_j(lambda) v.y_0 with the
    polynomials p_j of its three-term recurrence. As sum_j (v.y_j)^2 <= 1 for unit v,

        |lambda| (v.z)^2  <=  |lambda| |z|^2 / sum_j p_j(lambda)^2

    for whatever lambda it is; the right side's maximum is taken over the Ritz values, near which
    its peaks are, and a grid, times a factor for what lies between. Beyond the Ritz values and
    |Qz| / |z| it only falls. O(rank n) a form and step.
    """
    size = z.norm(dim=-1)
    alpha, beta = _lanczos(left, right, weights, z / size.clamp_min(1e-30)[:, None])
    values = _candidates(alpha, beta)
    scale = values.abs().amax(-1)
    below, p = torch.zeros_like(values), torch.ones_like(values)
    total, going = p.clone(), torch.ones_like(scale, dtype=torch.bool)
    for j in range(STEPS - 1):
        # Where the next vector is as good as zero, the recurrence says nothing more.
        going = going & (beta[:, j] > DEAD * scale)
        last = beta[:, j - 1, None] * below if j else 0
        below, p = p, ((values - alpha[:, j, None]) * p - last) / beta[:, j, None].clamp_min(1e-30)
        total = total + torch.where(going[:, None], p.square(), 0)
    found = (values.abs() / total).amax(-1)
    return SAFETY * size.square() * found


def _lanczos(
    left: Tensor, right: Tensor, weights: Tensor, y: Tensor
) -> tuple[Float[Tensor, "forms steps"], Float[Tensor, "forms steps"]]:
    """The diagonals of the tridiagonal matrices."""
    basis, alpha, beta = [y], [], []
    for _ in range(STEPS):
        image = apply_factored(left, right, weights, y[:, None])[:, 0]
        alpha.append((image * y).sum(-1))
        seen = torch.stack(basis, 1)
        for _ in range(2):
            image = image - ((seen @ image[..., None]).mT @ seen)[:, 0]
        beta.append(image.norm(dim=-1))
        y = image / beta[-1].clamp_min(1e-30)[:, None]
        basis.append(y)
    return torch.stack(alpha, 1).double(), torch.stack(beta, 1).double()


def _candidates(alpha: Tensor, beta: Tensor) -> Float[Tensor, "forms values"]:
    """Ritz values of all steps and of all but one, and a grid that is fine near 0 too."""
    T = torch.diag_embed(alpha) + torch.diag_embed(beta[:, :-1], 1)
    T = T + torch.diag_embed(beta[:, :-1], -1)
    ritz = torch.cat([torch.linalg.eigvalsh(T), torch.linalg.eigvalsh(T[:, :-1, :-1])], -1)
    most = ritz.abs().amax(-1).maximum((alpha[:, 0].square() + beta[:, 0].square()).sqrt())
    rising = torch.linspace(1 / GRID, 1, GRID, dtype=alpha.dtype, device=alpha.device)
    grid = torch.cat([rising, torch.logspace(-4, 0, GRID).to(rising)])
    grid = most[:, None] * torch.cat([grid, -grid])
    return torch.cat([ritz, grid], -1)
