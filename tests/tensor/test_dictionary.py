import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from bilens.tensor.features import Dictionary
from tests.tensor.factors import close, dense, normal, random_tensor, shapes


def near(actual: torch.Tensor, expected: torch.Tensor) -> bool:
    return actual.shape == expected.shape and torch.allclose(actual, expected, atol=1e-8, rtol=1e-8)


@given(st.integers(1, 7), st.integers(1, 9), st.integers(1, 9), st.integers(0, 1000))
def test_the_inverse_is_the_pseudoinverse(n_out, m, rank, seed):
    F = normal(n_out, rank, seed=seed) @ normal(rank, m, seed=seed + 1)
    result = Dictionary.of(F)
    # The four conditions of Penrose, which one matrix alone satisfies.
    P = result.inverse
    assert near(F @ P @ F, F)
    assert near(P @ F @ P, P)
    assert near((F @ P).T, F @ P)
    assert near((P @ F).T, P @ F)
    assert result.rank == min(n_out, m, rank)
    assert result.complete == (result.rank == n_out)
    assert (result.n_out, result.n_features) == (n_out, m)
    assert close(result.singular_values, torch.linalg.svdvals(F))


@given(shapes, st.integers(1, 12))
def test_feature_outputs(shape, m):
    tensor = random_tensor(**shape)
    result = Dictionary.of(normal(tensor.n_out, m, seed=shape["seed"] + 1))
    read = result.features_tensor(tensor)
    assert near(read.dense(), torch.einsum("mo,oij->mij", result.inverse, dense(tensor)))
    x = normal(2, 3, tensor.n_in, seed=2)
    assert near(read(x), result.activations(tensor(x)))
    assert near(result.reconstruct(read(x)), tensor(x) @ (result.features @ result.inverse).T)
    if result.complete:
        assert near(result.reconstruct(read(x)), tensor(x))


def test_dead_features_stay_silent():
    F = normal(3, 6)
    F[:, [1, 4]] = 0
    result = Dictionary.of(F)
    alive = [0, 2, 3, 5]
    assert (result.inverse[[1, 4]].abs() < 1e-14).all()
    assert close(result.inverse[alive], Dictionary.of(F[:, alive]).inverse)
    silent = Dictionary.of(torch.zeros(3, 2))
    assert silent.rank == 0
    assert (silent.inverse == 0).all()


def test_features_of_saelens_are_the_rows_of_its_decoder():
    sae = torch.nn.Module()
    sae.W_dec = torch.nn.Parameter(normal(7, 3).float())
    sae.b_dec = torch.nn.Parameter(torch.ones(3))
    result = Dictionary.from_saelens(sae)
    assert torch.equal(result.features, sae.W_dec.T)
    assert not result.features.requires_grad
    assert (result.n_out, result.n_features) == (3, 7)


def test_single_precision_counts_its_own_rounding_as_zero():
    result = Dictionary.of((normal(30, 4).float() @ normal(4, 50, seed=1).float()) * 1e-6)
    assert result.rank == 4
    assert result.inverse.dtype == torch.float32
    assert result.singular_values.dtype == torch.float64
    assert Dictionary.of(normal(5, 8)).activations(normal(2, 5).float()).dtype == torch.float32


@pytest.mark.parametrize("m", [3, 6])
def test_gradients(m):
    F, y = normal(4, m).requires_grad_(), normal(2, 4, seed=1).requires_grad_()

    def read_and_write(F, y):
        result = Dictionary.of(F)
        return result.activations(y), result.reconstruct(result.activations(y))

    assert torch.autograd.gradcheck(read_and_write, (F, y))


@given(shapes, st.integers(1, 10), st.booleans())
def test_a_layer_is_the_eigenvectors_along_directions_that_span_it(shape, m, biased):
    tensor = random_tensor(**shape)
    if biased:
        tensor = tensor.with_bias(normal(tensor.rank), None, normal(tensor.n_out))
    U, x = normal(m, tensor.n_out, seed=shape["seed"] + 1), normal(5, shape["n_in"], seed=2)
    along = Dictionary.of(torch.linalg.pinv(U))
    assert near(along.inverse, U)
    forms = along.features_tensor(tensor).interaction(torch.eye(m)).eigh()
    assert near(along.reconstruct(forms(x)), tensor(x) @ torch.linalg.pinv(U) @ U)
    for k in range(1, forms.k + 1):
        expected = torch.zeros(5, tensor.n_out, dtype=torch.float64)
        for direction, back in zip(U, torch.linalg.pinv(U).T, strict=True):
            expected += tensor.interaction(direction).eigh(k)(x)[:, None] * back
        assert near(along.reconstruct(forms.truncate(k)(x)), expected)
