from dataclasses import replace
from itertools import product

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from bilens.tensor import BilinearTensor, expected_cosine
from bilens.tensor.expectation import expected_inner
from tests.tensor.deep import KINDS, forward, random_chain, widened
from tests.tensor.factors import close, eye, normal, random_tensor

Chain = list[BilinearTensor]


def expectation(a: Chain, b: Chain, mean: Tensor, root: Tensor, points: int = 9) -> Tensor:
    """Return E[a(x) . b(x)] under N(mean, root root'), exact up to degree 2 points - 1."""
    nodes, weights = np.polynomial.hermite_e.hermegauss(points)
    y, w = (
        torch.tensor(list(product(numbers, repeat=root.shape[1])), dtype=torch.float64)
        for numbers in (nodes, weights / weights.sum())
    )
    x = mean + y @ root.T
    return w.prod(-1) @ (forward(a, x) * forward(b, x)).sum(-1)


def quadrature(a: Chain, b: Chain, n: int, points: int = 5) -> Tensor:
    return expectation(a, b, torch.zeros(n, dtype=torch.float64), eye(n), points)


def biased(n_in: int, rank: int, n_out: int, seed: int) -> BilinearTensor:
    return random_tensor(n_in, rank, n_out, seed).with_bias(
        normal(rank, seed=seed + 1), normal(rank, seed=seed + 2), normal(n_out, seed=seed + 3)
    )


def model(kind: str, n_in: int, n_out: int, rank: int, seed: int) -> Chain:
    """Chains of all sorts, each a polynomial of degree 2 or 4 in n_in numbers."""
    early_biased = kind in ("one biased", "two biased", "early bias", "residual")
    early = biased if early_biased else random_tensor
    late = biased if kind in ("two biased", "late bias", "residual") else random_tensor
    if kind in ONE:
        return [early(n_in, rank, n_out, seed)]
    if kind == "residual":
        first = early(n_in, rank, n_in, seed).with_residual()
        return [first, late(n_in, rank + 1, n_out, seed + 1)]
    return [early(n_in, rank, 3, seed), late(3, rank + 1, n_out, seed + 1)]


ONE = ["one", "one biased"]
TWO = ["two", "two biased", "residual", "late bias", "early bias"]
sizes = st.fixed_dictionaries(
    {"n_in": st.integers(1, 3), "n_out": st.integers(1, 3), "seed": st.integers(0, 10_000)}
)


@given(st.sampled_from(ONE + TWO), st.sampled_from(ONE + TWO), sizes, st.integers(1, 4))
def test_one_and_two_layers(kind_a, kind_b, size, rank):
    a, b = model(kind_a, rank=rank, **size), model(kind_b, rank=2, **{**size, "seed": 20_000})
    assert_inner(a, b, size["n_in"])
    assert_inner(b, a, size["n_in"])


def assert_inner(a: Chain, b: Chain, n: int) -> None:
    squares = [quadrature(chain, chain, n) for chain in (a, b)]
    scale, expected = (squares[0] * squares[1]).sqrt(), quadrature(a, b, n)
    assert (expected_inner(a, b) - expected).abs() <= 1e-10 * scale
    assert close(expected_inner(a, a), squares[0])
    assert (expected_cosine(a, b) - expected / scale).abs() <= 1e-10


def test_more_inputs_than_the_models_read():
    a, b = model("two biased", 2, 3, 4, 0), model("residual", 2, 3, 2, 7)
    assert_inner(widened(a, normal(2, 5)), widened(b, normal(2, 5)), 5)


def test_a_first_layer_may_hand_over_the_constant_itself():
    first, second = biased(2, 3, 2, 0), biased(2, 4, 3, 1)
    explicit = first.change_basis(outputs=eye(3)[:, :2]).with_bias(out=eye(3)[2])
    assert explicit.n_out == second.n_in
    assert_inner([explicit, second], [first, second], 2)


@pytest.mark.parametrize("kind", ["two", "residual"])
def test_sampling_agrees(kind):
    a, b = model(kind, 12, 4, 9, 0), model(kind, 12, 4, 7, 5)
    x = normal(100_000, 12)
    for other in (a, b):
        products = (forward(a, x) * forward(other, x)).sum(-1)
        error = products.std() / len(x) ** 0.5
        assert (products.mean() - expected_inner(a, other)).abs() < 5 * error


def test_the_cosine_of_one_function_in_two_forms_is_one_and_with_zero_zero():
    a = model("two", 4, 3, 5, 0)
    rescaled = BilinearTensor(3 * a[0].right, a[0].left, -a[0].out)
    one = torch.ones((), dtype=torch.float64)
    assert close(expected_cosine(a, [rescaled, replace(a[1], right=2 * a[1].right)]), one)
    assert close(expected_cosine(a, [a[0], replace(a[1], out=-a[1].out)]), -one)
    silent = BilinearTensor(0 * a[0].left, 0 * a[0].right, 0 * a[0].out)
    assert expected_cosine(a, [silent, a[1]]) == 0


def test_single_precision_is_computed_in_double():
    a = widened(model("two", 3, 3, 5, 0), normal(3, 40))
    single = [layer.to(torch.float32) for layer in a]
    rounded = [layer.to(torch.float64) for layer in single]
    assert expected_inner(single, single).dtype == torch.float64
    assert close(expected_inner(single, single), expected_inner(rounded, rounded), 1e-11)


def test_more_outputs_than_hidden_units():
    a, b = model("two biased", 2, 9, 2, 0), model("residual", 2, 9, 3, 7)
    assert_inner(a, b, 2)
    assert_inner(b, a, 2)


@pytest.mark.parametrize("kind", ["one biased", "two biased"])
def test_gradients(kind):
    # Five inputs, of which both together read three or four: what lies outside must count too.
    a, b = model(kind, 5, 2, 1, 0), model(kind, 5, 2, 1, 9)
    factors = [f.clone().requires_grad_() for c in a for f in (c.left, c.right, c.out)]

    def inner(*factors):
        layers = [factors[i : i + 3] for i in range(0, len(factors), 3)]
        return expected_inner([BilinearTensor(*layer, constant=True) for layer in layers], b)

    assert torch.autograd.gradcheck(inner, factors, fast_mode=True)


def test_gradients_where_the_basis_of_the_inputs_is_not_unique():
    def square(left):
        chain = [BilinearTensor(left, eye(3), normal(2, 3)), random_tensor(2, 2, 1, 0)]
        return expected_inner(chain, chain)

    assert torch.autograd.gradcheck(square, (eye(3).requires_grad_(),))


@given(st.sampled_from(KINDS), st.integers(1, 2), st.booleans(), st.booleans(), st.integers(0, 99))
def test_inputs_may_have_a_mean_and_a_covariance(kind, depth, with_mean, with_spread, seed):
    a = random_chain(depth, kind, n_in=2, n_out=2, seed=seed)
    b = random_chain(depth, "bias", n_in=2, n_out=2, seed=seed + 1)
    mean, root = with_mean * normal(2, seed=3), normal(2, 2, seed=4) if with_spread else eye(2)
    inputs = {"mean": mean} if with_mean else {}
    inputs |= {"covariance": root @ root.T} if with_spread else {}
    scale = (expectation(a, a, mean, root) * expectation(b, b, mean, root)).sqrt()
    assert abs(expected_inner(a, b, **inputs) - expectation(a, b, mean, root)) <= 1e-9 * scale
    assert abs(expected_cosine(a, a, **inputs) - 1) < 1e-9
