from itertools import product
from math import factorial, prod

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from bilens.tensor.chain import joined
from bilens.tensor.expectation import hermite, monomials, n_monomials, written_out
from tests.tensor.deep import chains, forward, random_chain
from tests.tensor.factors import close, normal


@given(st.integers(1, 5), st.integers(0, 6))
def test_monomials_are_all_there_in_order(k: int, degree: int) -> None:
    rows = [tuple(row) for row in monomials(k, degree).tolist()]
    every = [row for row in product(range(degree + 1), repeat=k) if sum(row) == degree]
    assert rows == sorted(every)
    assert len(rows) == n_monomials(k, degree)


@given(chains, st.integers(1, 3))
def test_polynomials_are_the_chain(chain: dict, k: int) -> None:
    tensors = random_chain(**chain, n_in=k, n_out=2)
    full = joined(tensors, torch.eye(2, dtype=torch.float64))
    parts = written_out(full, k, constant=tensors[0].constant)
    x = normal(5, k)
    values = [
        (x[:, None].double() ** monomials(k, degree)).prod(-1) @ part.T
        for degree, part in parts.items()
    ]
    assert close(torch.stack(values).sum(0), forward(tensors, x))


@given(chains, st.integers(1, 2))
def test_hermite_coefficients_are_expectations(chain: dict, k: int) -> None:
    """c_alpha = E[f(y) He_alpha(y)] / alpha!, by a quadrature that is exact for these degrees."""
    tensors = random_chain(**chain, n_in=k, n_out=2)
    full = joined(tensors, torch.eye(2, dtype=torch.float64))
    parts = hermite(written_out(full, k, constant=tensors[0].constant), k)
    nodes, weights = np.polynomial.hermite_e.hermegauss(12)
    y = torch.tensor(list(product(nodes, repeat=k)))
    w = torch.tensor([prod(several) for several in product(weights / weights.sum(), repeat=k)])
    f = forward(tensors, y)
    for degree, part in parts.items():
        for alpha, result in zip(monomials(k, degree).tolist(), part.T, strict=True):
            He = torch.ones(len(y), dtype=torch.float64)
            for i, power in enumerate(alpha):
                single = [0.0] * power + [1.0]
                He = He * torch.from_numpy(
                    np.polynomial.hermite_e.hermeval(y[:, i].numpy(), single)
                )
            expected = (w * He) @ f / prod(factorial(power) for power in alpha)
            size = (w @ f.square()).sqrt().max()
            assert (result - expected).abs().max() <= 1e-9 * size
