"""Eigenpairs of many quadratic forms that share their factors: whole, or the top k by iteration."""

from typing import NamedTuple

import torch
from jaxtyping import Float, Float64
from torch import Tensor

from bilens.tensor.lanczos import MISS, Search, basis_size

__all__ = ["Eigenpairs", "apply_factored", "dense_eigenpairs", "top_eigenpairs"]

WORKING_BYTES = 512 * 1024**2
"""Bytes of working memory that a batch may take; more forms are done in turns."""

SMALL = 128
"""Forms of at most this many inputs are decomposed whole: iteration would save nothing."""


class Eigenpairs(NamedTuple):
    """What a `Spectrum` holds, eigenvectors as rows."""

    values: Float[Tensor, "batch k"]
    vectors: Float[Tensor, "batch k n_in"]
    residuals: Float[Tensor, "batch k"]
    miss_chance: Float64[Tensor, " batch"]


def apply_factored(
    left: Float[Tensor, "rank n_in"],
    right: Float[Tensor, "rank n_in"],
    weights: Float[Tensor, "*batch rank"],
    vectors: Float[Tensor, "*batch k n_in"],
) -> Float[Tensor, "*batch k n_in"]:
    """Q v = 1/2 [L'(w * R v) + R'(w * L v)]: four products with L and R serve the whole batch."""
    w = weights[..., None, :]
    return ((w * (vectors @ right.T)) @ left + (w * (vectors @ left.T)) @ right) / 2


def dense_eigenpairs(
    left: Float[Tensor, "rank n_in"],
    right: Float[Tensor, "rank n_in"],
    weights: Float[Tensor, "batch rank"],
    k: int,
) -> Eigenpairs:
    """The k eigenpairs of largest magnitude of each form, from the whole matrix."""
    n = left.shape[1]
    batch_size = max(1, WORKING_BYTES // (3 * n * n * left.element_size()))
    parts = []
    for some in torch.split(weights, batch_size):
        half = (left * some[..., None]).mT @ right
        Q = (half + half.mT) / 2
        values, columns = torch.linalg.eigh(Q)
        order = values.detach().abs().argsort(dim=-1, descending=True, stable=True)[:, :k]
        values = values.gather(-1, order)
        vectors = columns.mT.gather(-2, order[..., None].expand(*order.shape, n))
        with torch.no_grad():
            errors = (vectors @ Q - values[..., None] * vectors).norm(dim=-1)
            top = values.abs().amax(-1, keepdim=True)
            # A form that is zero has no errors to divide.
            residuals = torch.where(top > 0, errors / top, errors)
        parts.append((values, vectors, residuals))
    values, vectors, residuals = (torch.cat(part) for part in zip(*parts, strict=True))
    nothing = torch.zeros(len(weights), dtype=torch.float64, device=weights.device)
    return Eigenpairs(values, vectors, residuals, miss_chance=nothing)


@torch.no_grad()
def top_eigenpairs(
    left: Float[Tensor, "rank n_in"],
    right: Float[Tensor, "rank n_in"],
    weights: Float[Tensor, "batch rank"],
    k: int,
    tolerance: float,
    seed: int,
) -> Eigenpairs:
    """The k eigenpairs of largest magnitude of each form, iterated where that is cheaper.

    A form that does not reach `tolerance`, or does not pass the test of completeness, is decomposed
    whole.
    """
    n, size = left.shape[1], basis_size(k)
    if n <= SMALL or 2 * size > n:
        return dense_eigenpairs(left, right, weights, k)
    slots = WORKING_BYTES // ((2 * n + size) * size * left.element_size())
    search = Search(
        left, right, weights, k, tolerance, seed, slots=min(max(1, slots), len(weights))
    )
    search.run()
    whole = ~search.passed
    pairs = Eigenpairs(
        search.values, search.vectors, search.residuals, search.passed.double() * MISS
    )
    if whole.any():
        exact = dense_eigenpairs(left, right, weights[whole], k)
        for iterated, part in zip(pairs, exact, strict=True):
            iterated[whole] = part
    return pairs
