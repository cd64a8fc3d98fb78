"""Coordinates in which a cut model is made of fewer products."""

import torch
from jaxtyping import Float64
from torch import Tensor

from bilens.checks import check_count
from bilens.tensor.cut import Cut

__all__ = ["product_weight", "sparse_basis"]

LEARNING_RATE = 0.03


def product_weight(cut: Cut) -> float:
    """sum sqrt(share) over all products of a cut model, which `sparse_basis` makes small."""
    return float(cut.products().share.sqrt().sum())


def sparse_basis(cut: Cut, *, steps: int = 600) -> Cut:
    """The same model in rotated coordinates, with few large products in place of many.

    Minimises sum_l sum_oij sqrt(U_oo) |C_oij| over a rotation O = exp(A - A') of each bond, by Adam
    from the coordinates that the cut has: a local minimum. Rotations keep the coordinates
    uncorrelated and of unit size. Costs O(n_out r^3) a layer and step.

    Args:
        cut: in any coordinates.
        steps: of Adam, whose learning rate falls to zero.

    Raises:
        BilensError: steps is below 1.

    Source:
        The objective is that of sparse coding on the entries of the interaction matrices; our own.
    """
    check_count("steps", steps)
    cores = [core.dense() for core in cut.cores]
    angles = [torch.zeros(k, k).to(cut.read).requires_grad_() for k in cut.ranks]
    optimizer = torch.optim.Adam(angles, lr=LEARNING_RATE)
    with torch.enable_grad():
        for step in range(steps):
            optimizer.param_groups[0]["lr"] = LEARNING_RATE * (1 - step / steps)
            loss = _weight(cores, cut, _rotations(angles))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    with torch.no_grad():
        return cut.rotate(_rotations(angles))


def _rotations(angles: list[Tensor]) -> list[Float64[Tensor, "k k"]]:
    return [torch.matrix_exp(A - A.T) for A in angles]


def _weight(cores: list[Tensor], cut: Cut, rotations: list[Tensor]) -> Float64[Tensor, ""]:
    total = cores[0].new_zeros(())
    for i, (core, O) in enumerate(zip(cores, rotations, strict=True)):
        entries, U = O.T @ core @ O, cut.environments[i]
        if i + 1 < len(cores):
            up = rotations[i + 1]
            entries = torch.einsum("op,oij->pij", up, entries)
            U = up.T @ U @ up
        total = total + (U.diagonal().clamp_min(0).sqrt()[:, None, None] * entries.abs()).sum()
    return total
