"""Coordinates in which a cut model is made of fewer products."""

import math
from collections.abc import Iterator

import torch
from jaxtyping import Float64
from torch import Tensor

from bilens.settings import Count
from bilens.tensor.cut import Cut
from bilens.tensor.exact import exact

__all__ = ["product_weight", "sparse_basis"]

LEARNING_RATE = 0.03


@exact
def product_weight(cut: Cut) -> float:
    """The sum of sqrt(share) over all products of a cut model, which `sparse_basis` makes small."""
    return float(cut.products().share.sqrt().sum())


@exact
def sparse_basis(cut: Cut, *, steps: Count = 200) -> Cut:
    """The same model in rotated coordinates, with few large products in place of many.

    Minimises `product_weight`, sum_l sum_(o, i <= j) sqrt(U_oo) |c_oij|, over a rotation
    O = exp(A - A') of each bond, by `steps` of Adam from the coordinates that the cut has: a local
    minimum, never above the start. Coordinates stay uncorrelated and of unit size. They come
    ordered by U_kk, with the sign that makes their strongest product positive, or the sum of what
    they write to the input. Costs O(r^4) a layer and step. The objective, of sparse coding on the
    entries of the interaction matrices, is our own.
    """
    cores = [core.dense() for core in cut.cores]
    angles = [torch.zeros(k, k).to(cut.read).requires_grad_() for k in cut.ranks]
    optimizer = torch.optim.Adam(angles, lr=LEARNING_RATE)
    least, best = math.inf, [A.detach() for A in angles]
    with torch.enable_grad():
        for step in range(steps):
            optimizer.param_groups[0]["lr"] = LEARNING_RATE * (1 - step / steps)
            loss = _weight(cores, cut, _rotations(angles))
            if float(loss.detach()) < least:
                least, best = float(loss.detach()), [A.detach().clone() for A in angles]
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    with torch.no_grad():
        turned = cut.rotate(_rotations(best))
        sizes = [U.diagonal() for U in turned.environments[:-1]]
        orders = [torch.eye(len(u)).to(u)[:, u.argsort(descending=True)] for u in sizes]
        ordered = turned.rotate(orders)
        return ordered.rotate([signs.diag() for signs in _signs(ordered)])


def _rotations(angles: list[Tensor]) -> list[Float64[Tensor, "_ _"]]:
    return [torch.matrix_exp(A - A.T) for A in angles]


def _weight(cores: list[Tensor], cut: Cut, rotations: list[Tensor]) -> Float64[Tensor, ""]:
    total = cores[0].new_zeros(())
    for i, (core, turn) in enumerate(zip(cores, rotations, strict=True)):
        entries, U = turn.T @ core @ turn, cut.environments[i + 1]
        if i + 1 < len(cores):
            up = rotations[i + 1]
            entries = torch.einsum("op,oij->pij", up, entries)
            U = up.T @ U @ up
        # An entry off the diagonal and its mirror image are one product: sqrt(2) of its size.
        sizes = entries.abs() * (torch.eye(len(turn)).to(turn) * (1 - 0.5**0.5) + 0.5**0.5)
        total = total + (U.diagonal().clamp_min(0).sqrt()[:, None, None] * sizes).sum()
    return total


def _signs(cut: Cut) -> Iterator[Float64[Tensor, " _"]]:
    """1 or -1 for each coordinate of each bond, the input's first."""
    signs = torch.where(cut.write.sum(0) < 0, -1.0, 1.0).to(cut.read)
    for core in cut.cores:
        yield signs
        entries = core.dense() * signs * signs[:, None]
        # An entry off the diagonal stands for two.
        weights = (entries * (2 - torch.eye(core.n_in)).to(entries).sqrt()).flatten(1)
        strongest = weights.gather(1, weights.abs().argmax(1, keepdim=True))[:, 0]
        signs = torch.where(strongest < 0, -1.0, 1.0).to(cut.read)
