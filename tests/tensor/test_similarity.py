from dataclasses import replace
from itertools import product

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from bilens.tensor import BilinearTensor, expected_cosine
from tests.tensor.factors import close, eye, normal, random_tensor

ONE = torch.ones((), dtype=torch.float64)


def expectation(a: BilinearTensor, b: BilinearTensor, mean: Tensor, root: Tensor) -> Tensor:
    """Return E[a(x) . b(x)] under N(mean, root root') by quadrature, exact up to degree 9."""
    nodes, weights = np.polynomial.hermite_e.hermegauss(5)
    y, w = (
        torch.tensor(list(product(numbers, repeat=root.shape[1])), dtype=torch.float64)
        for numbers in (nodes, weights / weights.sum())
    )
    x = mean + y @ root.T
    return w.prod(-1) @ (a(x) * b(x)).sum(-1)


def layer(kind: str, n_in: int, rank: int, n_out: int, seed: int) -> BilinearTensor:
    if kind == "plain":
        return random_tensor(n_in, rank, n_out, seed)
    biases = (normal(size, seed=seed + i) for i, size in enumerate((rank, rank, n_out), 1))
    if kind == "residual":
        return random_tensor(n_in, rank, n_in, seed).with_residual()
    return random_tensor(n_in, rank, n_out, seed).with_bias(*biases)


KINDS = st.sampled_from(["plain", "biased"])


@given(KINDS, KINDS, st.booleans(), st.booleans(), st.integers(1, 3), st.integers(0, 99))
def test_the_cosine_is_that_of_expectations(kind, other, with_mean, with_spread, n, seed):
    a, b = layer(kind, n, 3, 2, seed), layer(other, n, 2, 2, seed + 100)
    check(a, b, with_mean, with_spread)


def test_residuals_count():
    check(layer("residual", 2, 3, 2, 0), layer("biased", 2, 3, 2, 1), True, True)


def check(a, b, with_mean, with_spread):
    n = a.n_in - a.constant
    mean, root = with_mean * normal(n, seed=3), normal(n, n, seed=4) if with_spread else eye(n)
    inputs = {"mean": mean} if with_mean else {}
    inputs |= {"covariance": root @ root.T} if with_spread else {}
    squares = expectation(a, a, mean, root) * expectation(b, b, mean, root)
    expected = expectation(a, b, mean, root) / squares.sqrt()
    assert (expected_cosine(a, b, **inputs) - expected).abs() <= 1e-9
    assert (expected_cosine(a, a, **inputs) - 1).abs() <= 1e-9


def test_the_cosine_of_one_function_in_two_forms_is_one_and_with_zero_zero():
    a = layer("biased", 4, 5, 3, 0)
    other = BilinearTensor(3 * a.right, a.left, a.out, constant=True)
    assert close(expected_cosine(a, other), ONE)
    assert close(expected_cosine(a, replace(a, out=-a.out)), -ONE)
    assert expected_cosine(a, replace(a, out=0 * a.out)) == 0


def test_single_precision_is_computed_in_double():
    single = layer("biased", 5, 4, 3, 0).to(torch.float32)
    other, wide = layer("plain", 5, 4, 3, 1), single.to(torch.float64)
    found = expected_cosine(single, other.to(torch.float32))
    assert found.dtype == torch.float64
    assert close(found, expected_cosine(wide, other.to(torch.float32).to(torch.float64)), 1e-11)


@pytest.mark.parametrize("kind", ["plain", "biased"])
def test_gradients(kind):
    a, b = layer(kind, 3, 2, 2, 0), layer("plain", 3, 2, 2, 9)
    factors = [x.clone().requires_grad_() for x in (a.left, a.right, a.out)]

    def cosine(*factors):
        return expected_cosine(BilinearTensor(*factors, constant=a.constant), b)

    assert torch.autograd.gradcheck(cosine, factors, fast_mode=True)
