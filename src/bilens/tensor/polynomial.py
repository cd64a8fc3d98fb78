"""Deep models written out as polynomials of few variables, and their Hermite coefficients.

A polynomial is a table of coefficients for each degree, one column for each monomial y^alpha of k
variables, in lexicographic order. With suffix sums s_j = alpha_j + ... + alpha_(k-1), and
N(v, d) = C(v - 1 + d, d) monomials of degree d in v variables,

    number(alpha) = N(k, d) - 1 - sum_(j=1)^(k-1) N(k - j + 1, s_j - 1)

so that the number of a product is a sum over suffix sums, which add up.
"""

from collections.abc import Sequence
from functools import lru_cache
from math import comb

import torch
from jaxtyping import Float64, Int
from torch import Tensor

from bilens.tensor.bilinear import BilinearTensor

__all__ = ["Polynomials", "hermite", "monomials", "n_monomials", "product_cost", "written_out"]

Polynomials = dict[int, Float64[Tensor, "_ _"]]
"""Coefficients of some polynomials of the same variables, by degree."""


def n_monomials(k: int, degree: int) -> int:
    """N(k, d): monomials of a degree in k variables."""
    return comb(k - 1 + degree, degree) if degree >= 0 else 0


@lru_cache(maxsize=64)
def monomials(k: int, degree: int) -> Int[Tensor, "monomials k"]:
    """The exponents of each monomial, in order."""
    if k == 1:
        return torch.tensor([[degree]], dtype=torch.int8)
    blocks = []
    for first in range(degree + 1):
        rest = monomials(k - 1, degree - first)
        blocks.append(torch.cat([torch.full((len(rest), 1), first, dtype=torch.int8), rest], 1))
    return torch.cat(blocks)


def product_cost(k: int, degrees: Sequence[int], n_in: int, n_out: int) -> int:
    """Operations that one layer takes on polynomials of these degrees."""
    terms = sum(n_monomials(k, degree) for degree in degrees)
    return terms**2 * n_out * (n_in + 4)


def written_out(chain: Sequence[BilinearTensor], k: int, *, constant: bool) -> Polynomials:
    """The outputs of a chain as polynomials of its k inputs, besides the constant.

    Args:
        chain: in float64, each tensor reading all that the one before gives.
        k: number of variables.
        constant: the first tensor reads a 1 after them.
    """
    like = chain[0].left
    one = torch.eye(k + constant, dtype=like.dtype, device=like.device)
    # Variable number i is monomial number k - 1 - i of degree 1.
    parts: Polynomials = {1: one[:, :k].flip(1)}
    if constant:
        parts[0] = one[:, k:]
    for tensor in chain:
        parts = _layer(tensor, parts, k)
    return parts


def hermite(parts: Polynomials, k: int) -> Polynomials:
    """The coefficients c of sum_alpha c_alpha He_alpha(y): those of exp(Laplacian / 2) p.

    E[He_alpha(y) He_beta(y)] = alpha! for alpha = beta and else 0, for y ~ N(0, I).
    """
    found = dict(parts)
    for degree, part in parts.items():
        reached = part
        for step in range(1, degree // 2 + 1):
            lower = degree - 2 * step
            reached = _laplacian(reached, k, lower) / (2 * step)
            found[lower] = found[lower] + reached if lower in found else reached
    return found


def _layer(tensor: BilinearTensor, parts: Polynomials, k: int) -> Polynomials:
    """sum_ij B_oij p_i p_j for each output o, one monomial of the first factor at a time."""
    n, m = tensor.n_in, tensor.n_out
    half = torch.einsum("oh,hi,hj->ijo", tensor.out, tensor.left, tensor.right)
    core = (half + half.transpose(0, 1)).reshape(n, n * m) / 2
    made: dict[int, Tensor] = {}
    for low in sorted(parts):
        rows = parts[low].T @ core
        for high in (degree for degree in sorted(parts) if degree >= low):
            others = parts[high].T.contiguous()
            degree = low + high
            if degree not in made:
                made[degree] = core.new_zeros(n_monomials(k, degree), m)
            numbers = _Numbers(k, low, high, core.device)
            for i in torch.nonzero((parts[low] != 0).any(0)).flatten().tolist():
                # Within one degree i * j and j * i are one product, counted twice.
                start = i if low == high else 0
                terms = 2 * (others[start:] @ rows[i].view(n, m))
                if low == high:
                    terms[0] /= 2
                made[degree].index_add_(0, numbers.of(i)[start:], terms)
    return {degree: part.T.contiguous() for degree, part in made.items()}


class _Numbers:
    """Numbers of the products of each monomial of degree `low` with all of degree `high`."""

    def __init__(self, k: int, low: int, high: int, device: torch.device) -> None:
        self.sums, others = (_suffix_sums(k, degree).to(device) for degree in (low, high))
        self.last = n_monomials(k, low + high) - 1
        self.columns = torch.arange(k - 1, device=device)
        # For each variable and each suffix sum of the first factor: what is taken off the number.
        table = _table(k, low + high).to(device)
        shifts = torch.arange(low + 1, device=device)
        self.taken = table[self.columns[:, None, None], others.T[:, None] + shifts[:, None]]

    def of(self, i: int) -> Int[Tensor, " monomials"]:
        """For monomial i."""
        taken: Tensor = self.taken[self.columns, self.sums[i]].sum(0)
        return self.last - taken


def _laplacian(
    part: Float64[Tensor, "n_out higher"], k: int, lower: int
) -> Float64[Tensor, "n_out monomials"]:
    """sum_i (beta_i + 2)(beta_i + 1) c_(beta + 2 e_i) for each beta of degree `lower`."""
    exponents = monomials(k, lower).to(part.device)
    sums = _suffix_sums(k, lower).to(part.device)
    table = _table(k, lower + 2).to(part.device)
    columns = torch.arange(k - 1, device=part.device)
    plain, raised = table[columns, sums], table[columns, sums + 2]
    # Raising variable i raises the suffix sums 1 to i.
    number = n_monomials(k, lower + 2) - 1 - plain.sum(1)
    total = torch.zeros(len(part), len(exponents), dtype=part.dtype, device=part.device)
    for i in range(k):
        if i > 0:
            number = number + plain[:, i - 1] - raised[:, i - 1]
        power = exponents[:, i].to(part)
        total += (power + 2) * (power + 1) * part[:, number]
    return total


def _suffix_sums(k: int, degree: int) -> Int[Tensor, "monomials k_less_1"]:
    return monomials(k, degree).flip(1).long().cumsum(1).flip(1)[:, 1:]


def _table(k: int, degree: int) -> Int[Tensor, "k_less_1 sums"]:
    """N(k - j + 1, s - 1) for j = 1 ... k - 1 and s = 0 ... degree."""
    rows = [[n_monomials(k - j + 1, s - 1) for s in range(degree + 1)] for j in range(1, k)]
    return torch.tensor(rows, dtype=torch.long).reshape(k - 1, degree + 1)
