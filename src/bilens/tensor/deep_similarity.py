"""Exact inner products of deep models under Gaussian inputs, from their Hermite coefficients."""

from collections.abc import Sequence
from math import factorial

import torch
from jaxtyping import Float64
from torch import Tensor

from bilens.errors import BilensError
from bilens.tensor.bilinear import BilinearTensor
from bilens.tensor.polynomial import hermite, monomials, n_monomials, written_out

__all__ = ["deep_inner"]

ADDITION = 600
"""Multiplications in a product of matrices that take as long as adding a number to a table."""


@torch.no_grad()
def deep_inner(
    a: Sequence[BilinearTensor],
    b: Sequence[BilinearTensor],
    spans: tuple[Float64[Tensor, "n k_a"], Float64[Tensor, "n k_b"]],
    *,
    max_operations: float,
) -> Float64[Tensor, ""]:
    """E[f_a(x) . f_b(x)] for x ~ N(0, I) of models of any depth that read few directions of x.

    In coordinates y = A'x and z = B'x that are orthonormal, with A'B diagonal and holding the
    cosines c of the angles between what the two read,

        f_a = sum_alpha a_alpha He_alpha(y),  f_b = sum_alpha b_alpha He_alpha(z),
        E[f_a . f_b] = sum_alpha alpha! c^alpha a_alpha . b_alpha

    Args:
        a: the layers of one model in float64, each giving all that the next reads.
        b: those of the other.
        spans: orthonormal columns that span what each reads of x.
        max_operations: refuse what would cost more.

    Raises:
        BilensError: the cost is above `max_operations`.
    """
    _check_cost(a, b, spans, max_operations)
    turn_a, cosines, turn_b = torch.linalg.svd(spans[0].T @ spans[1])
    of_a = _expanded(a, spans[0] @ turn_a)
    of_b = of_a if a is b else _expanded(b, spans[1] @ turn_b.T)
    total: Tensor = cosines.new_zeros(())
    k = len(cosines)
    for degree in of_a.keys() & of_b.keys():
        exponents = monomials(k, degree).to(cosines.device)
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
    """Hermite coefficients in coordinates of the span."""
    constant, k = chain[0].constant, span.shape[1]
    inside = [chain[0].change_basis(inputs=span), *chain[1:]]
    return hermite(written_out(inside, k, constant=constant), k)


def _first_variables(
    part: Float64[Tensor, "n_out monomials"], degree: int, k: int
) -> Float64[Tensor, "n_out fewer"]:
    """The columns of the monomials of the first k variables alone: what is orthogonal is left."""
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
    """Operations that a model takes, and the terms that it has."""
    variables = span.shape[1] + chain[0].constant
    cost = 0.0
    for i, tensor in enumerate(chain):
        terms = n_monomials(variables, 2**i)
        cost += terms**2 / 2 * tensor.n_out * (2 * tensor.n_in + ADDITION)
    return cost, n_monomials(variables, 2 ** len(chain))
