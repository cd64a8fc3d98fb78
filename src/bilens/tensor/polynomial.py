"""Deep models as polynomials of few variables, compared by their Hermite coefficients.

A polynomial is a table of coefficients for each degree, one column for each monomial y^alpha of k
variables, in lexicographic order. With suffix sums s_j = alpha_j + ... + alpha_(k-1), and
N(v, d) = C(v - 1 + d, d) monomials of degree d in v variables,

    number(alpha) = N(k, d) - 1 - sum_(j=1)^(k-1) N(k - j + 1, s_j - 1)

so that the number of a product is a sum over suffix sums, which add up.
"""

from collections.abc import Sequence
from functools import lru_cache
from math import comb, factorial

import torch
from jaxtyping import Float64, Int
from torch import Tensor

from bilens.errors import BilensError
from bilens.tensor.bilinear import BilinearTensor

ADDITION = 600
"""Multiplications in a matrix product that take as long as one addition to a table."""

Polynomials = dict[int, Float64[Tensor, "_ _"]]
"""Coefficients of polynomials of the same variables, by degree."""


def n_monomials(k: int, degree: int) -> int:
    """Return N(k, d), the number of monomials of a degree in k variables."""
    return comb(k - 1 + degree, degree) if degree >= 0 else 0


@lru_cache(maxsize=64)
def monomials(k: int, degree: int) -> Int[Tensor, "monomials k"]:
    """Return the exponents of each monomial, in order."""
    if k == 1:
        return torch.tensor([[degree]], dtype=torch.int8)
    blocks = []
    for first in range(degree + 1):
        others = monomials(k - 1, degree - first)
        firsts = torch.full((len(others), 1), first, dtype=torch.int8)
        blocks.append(torch.cat([firsts, others], 1))
    return torch.cat(blocks)


@torch.no_grad()
def deep_inner(
    a: Sequence[BilinearTensor],
    b: Sequence[BilinearTensor],
    spans: tuple[Float64[Tensor, "n k_a"], Float64[Tensor, "n k_b"]],
    *,
    max_operations: float,
) -> Float64[Tensor, ""]:
    """Return E[f_a(x) . f_b(x)], x ~ N(0, I), of models of any depth that read few directions.

    Let y = A'x and z = B'x be orthonormal coordinates of the two spans, with A'B diagonal. Its
    entries are the cosines c of the angles between the spans. Then

        f_a = sum_alpha a_alpha He_alpha(y),  f_b = sum_alpha b_alpha He_alpha(z),
        E[f_a . f_b] = sum_alpha alpha! c^alpha a_alpha . b_alpha

    The layers are in float64, and each has all outputs that the next reads. The orthonormal columns
    of `spans` span the part of x that each model reads.
    """
    _check_cost(a, b, spans, max_operations)
    # Principal angles: in these bases each variable of one model meets one of the other.
    turn_a, cosines, turn_b = torch.linalg.svd(spans[0].T @ spans[1])
    of_a = _expanded(a, spans[0] @ turn_a)
    of_b = of_a if a is b else _expanded(b, spans[1] @ turn_b.T)
    total: Tensor = cosines.new_zeros(())
    k = len(cosines)
    for degree in of_a.keys() & of_b.keys():
        exponents = monomials(k, degree).to(cosines.device)
        # Monomials of matched variables are orthogonal, so a sum over products replaces a matrix.
        weights = torch.ones(len(exponents)).to(cosines)
        for i, cosine in enumerate(cosines):
            powers = [factorial(power) * cosine**power for power in range(degree + 1)]
            weights *= torch.stack(powers)[exponents[:, i].long()]
        shared = [_first_variables(parts[degree], degree, k) for parts in (of_a, of_b)]
        total += (shared[0] * shared[1] * weights).sum()
    return total


def _expanded(
    chain: Sequence[BilinearTensor], span: Float64[Tensor, "n k"]
) -> dict[int, Float64[Tensor, "_ _"]]:
    """Return the Hermite coefficients in coordinates of the span."""
    constant, k = chain[0].constant, span.shape[1]
    inside = [chain[0].change_basis(inputs=span), *chain[1:]]
    return hermite(written_out(inside, k, constant=constant), k)


def _first_variables(
    part: Float64[Tensor, "n_out monomials"], degree: int, k: int
) -> Float64[Tensor, "n_out fewer"]:
    """Return the columns of the monomials of the first k variables; the others are orthogonal."""
    n = next(n for n in range(k, part.shape[1] + k) if n_monomials(n, degree) == part.shape[1])
    if n == k:
        return part
    return part[:, (monomials(n, degree)[:, k:] == 0).all(1).to(part.device)]


def _check_cost(
    a: Sequence[BilinearTensor],
    b: Sequence[BilinearTensor],
    spans: tuple[Tensor, Tensor],
    max_operations: float,
) -> None:
    costs, terms = zip(*(_cost(*pair) for pair in zip((a, b), spans, strict=True)), strict=True)
    if sum(costs) > max_operations:
        read = " and ".join(str(span.shape[1]) for span in spans)
        raise BilensError(
            f"{sum(costs):.1e} operations and {8e-9 * a[-1].n_out * max(terms):.1f} GB needed "
            f"(models of {len(a)} and {len(b)} layers that read {read} directions are polynomials "
            f"of up to {max(terms):.1e} terms), above max_operations={max_operations:.1e}. Cut the "
            "models to some 20 directions with bonds(...).cut(20), raise it, or sample x"
        )


def _cost(chain: Sequence[BilinearTensor], span: Tensor) -> tuple[float, int]:
    """Return the number of operations for a model, and the number of its terms."""
    variables = span.shape[1] + chain[0].constant
    cost = 0.0
    for i, tensor in enumerate(chain):
        terms = n_monomials(variables, 2**i)
        cost += terms**2 / 2 * tensor.n_out * (2 * tensor.n_in + ADDITION)
    return cost, n_monomials(variables, 2 ** len(chain))


def written_out(chain: Sequence[BilinearTensor], k: int, *, constant: bool) -> Polynomials:
    """Return the outputs of a chain in float64 as polynomials of k inputs and the constant."""
    like = chain[0].left
    eye = torch.eye(k + constant, dtype=like.dtype, device=like.device)
    # Variable number i is monomial number k - 1 - i of degree 1.
    parts: Polynomials = {1: eye[:, :k].flip(1)}
    if constant:
        parts[0] = eye[:, k:]
    for tensor in chain:
        parts = _layer(tensor, parts, k)
    return parts


def hermite(parts: Polynomials, k: int) -> Polynomials:
    """Return the coefficients c of sum_alpha c_alpha He_alpha(y): those of exp(Laplacian / 2) p.

    E[He_alpha(y) He_beta(y)] = alpha! for alpha = beta and otherwise 0, for y ~ N(0, I).
    """
    coefficients = dict(parts)
    for degree, part in parts.items():
        reached = part
        # A Laplacian lowers the degree by two; 1 / (2 step) makes the series the exponential.
        for step in range(1, degree // 2 + 1):
            lower = degree - 2 * step
            reached = _laplacian(reached, k, lower) / (2 * step)
            coefficients[lower] = coefficients.get(lower, 0) + reached
    return coefficients


def _layer(tensor: BilinearTensor, parts: Polynomials, k: int) -> Polynomials:
    """Return sum_ij B_oij p_i p_j for each output o, one monomial of the first factor at a time."""
    n, m = tensor.n_in, tensor.n_out
    half = torch.einsum("oh,hi,hj->ijo", tensor.out, tensor.left, tensor.right)
    core = (half + half.transpose(0, 1)).reshape(n, n * m) / 2
    made: dict[int, Tensor] = {}
    for low in sorted(parts):
        # One factor is contracted with the layer first, so that products are sums of rows.
        rows = parts[low].T @ core
        for high in (degree for degree in sorted(parts) if degree >= low):
            others = parts[high].T.contiguous()
            degree = low + high
            if degree not in made:
                made[degree] = core.new_zeros(n_monomials(k, degree), m)
            # Scattering by number needs no table of all pairs of monomials, which would not fit.
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
        # For each variable and suffix sum of the first factor: its summand of the number.
        table = _table(k, low + high).to(device)
        shifts = torch.arange(low + 1, device=device)
        self.summands = table[self.columns[:, None, None], others.T[:, None] + shifts[:, None]]

    def of(self, i: int) -> Int[Tensor, " monomials"]:
        """Return the numbers of the products with monomial i."""
        return self.last - self.summands[self.columns, self.sums[i]].sum(0)


def _laplacian(
    part: Float64[Tensor, "n_out higher"], k: int, lower: int
) -> Float64[Tensor, "n_out monomials"]:
    """Return sum_i (beta_i + 2)(beta_i + 1) c_(beta + 2 e_i) for each beta of degree `lower`."""
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
    """Return N(k - j + 1, s - 1) for j = 1 ... k - 1 and s = 0 ... degree."""
    rows = [[n_monomials(k - j + 1, s - 1) for s in range(degree + 1)] for j in range(1, k)]
    return torch.tensor(rows, dtype=torch.long).reshape(k - 1, degree + 1)
