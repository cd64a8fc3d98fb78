"""Weights of any size have the results of those of size 1; NaN is an error."""

import re

import numpy as np
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from bilens.errors import BilensError
from bilens.tensor import BilinearTensor, Dictionary, FactoredMatrix, bonds, cluster, decompile
from bilens.tensor.jacobian_bonds import function_bonds
from tests.tensor.factors import close, eye, normal, random_matrix, random_tensor, shapes

ONE = torch.ones(()).double()
sizes = st.sampled_from([1e-100, 1e-40, 1.0, 1e40, 1e100])


def scaled(tensor: BilinearTensor, left: float, right: float, out: float) -> BilinearTensor:
    factors = tensor.left * left, tensor.right * right, tensor.out * out
    return BilinearTensor(*factors, tensor.constant)


@given(shapes, sizes, sizes, sizes)
def test_tensors_of_any_size(shape, left, right, out):
    a = random_tensor(**shape)
    b = random_tensor(a.n_in, 4, a.n_out, 1)
    large, size = scaled(a, left, right, out), left * right * out
    assert torch.isclose(large.cosine(a), ONE)
    assert torch.allclose(large.cosine(b), a.cosine(b), atol=1e-12)
    assert torch.isclose(large.norm() / size, a.norm())
    assert torch.allclose(large.inner(b) / size, a.inner(b), atol=1e-12 * a.norm() * b.norm())
    form, expected = large.interaction(output=[0]), a.interaction(output=[0])
    assert torch.allclose(form.norm() / size, expected.norm())
    k = min(2, a.n_in)
    assert close(form.eigh(k).values / size, expected.eigh(k).values)
    assert torch.allclose(form.eigh().effective_rank(), expected.eigh().effective_rank())
    assert close(large.svd().values / size, a.svd().values, 1e-7)


@given(shapes, st.integers(0, 30))
def test_single_precision_holds_what_its_factors_hold(shape, power):
    """Hidden units whose two rows are of very different sizes, as after a rescaling."""
    tensor = random_tensor(**shape).to(torch.float32)
    rows = 10.0 ** (power * torch.tensor([1, -1] * tensor.rank)[: tensor.rank, None])
    turned = BilinearTensor(tensor.left * rows, tensor.right / rows, tensor.out)
    values, expected = (t.interaction(output=0).eigh().values for t in (turned, tensor))
    assert torch.allclose(values, expected, rtol=1e-4, atol=1e-4 * expected.abs().max())
    assert torch.isclose(turned.cosine(tensor), ONE, atol=1e-5)


def test_zeros_have_no_scale():
    tensor = random_tensor(3, 4, 2, 0)
    tensor.left[1], tensor.out[0] = 0, 0
    form = tensor.interaction(output=[0, 1])
    assert form.norm()[0] == 0
    assert (form.eigh().values[0] == 0).all()
    assert close(form.eigh().dense(), form.dense())


READINGS = {
    "svd": BilinearTensor.svd,
    "eigenvalues": lambda t: t.interaction(output=[0, -1 % t.n_out]).eigh(),
    "tensor": lambda t: t,
    "form": lambda t: t.interaction(output=0),
    "matrix": lambda t: FactoredMatrix(t.left.mT.contiguous(), t.right),
    "matrix svd": lambda t: FactoredMatrix(t.left.mT.contiguous(), t.right).svd(),
    "paths": lambda t: decompile([t], torch.ones(t.n_out)),
    "bonds": lambda t: bonds([t], torch.ones(t.n_out)),
}
NUMBERS = {
    "norm": BilinearTensor.norm,
    "inner": lambda t: t.inner(t),
    "output_gram": BilinearTensor.output_gram,
    "input_gram": BilinearTensor.input_gram,
    "form norm": lambda t: t.interaction(output=[0]).norm(),
    "matrix norm": lambda t: READINGS["matrix"](t).norm(),
    "matrix eigenvalues": lambda t: READINGS["matrix"](t).eigenvalues().abs(),
    "inverse": lambda t: Dictionary.of(t.out).inverse,
    "coverage": lambda t: cluster(torch.eye(len(t.out)), t.out[:, 0].abs()).coverage,
}
TOO_LARGE = "(beyond|of|leave) the range of (torch|float)|beyond float64|zero along|all zero"


def unless_refused(words, read, *args):
    """Return what a call returns, or None if it is refused in a sentence of such words."""
    try:
        return read(*args)
    except BilensError as error:
        if len(str(error)) >= 400 or not re.search(words, str(error)):
            raise
        return None


@given(
    shapes,
    st.sampled_from([torch.float32, torch.float64]),
    st.sampled_from([0.0, 1e-300, 1e-150, 1e-30, 1e-18, 1.0, 1e18, 1e30, 1e150, 1e300]),
)
def test_a_result_is_finite_or_refused(shape, dtype, size):
    tensor = scaled(random_tensor(**shape), size, size, size).to(dtype)
    assume(all(factor.isfinite().all() for factor in (tensor.left, tensor.right, tensor.out)))
    for name, number in NUMBERS.items():
        result = unless_refused(TOO_LARGE, number, tensor)
        assert result is None or result.isfinite().all(), name
    for name, read in READINGS.items():
        if (reading := unless_refused(TOO_LARGE, read, tensor)) is None:
            continue
        if (frame := unless_refused(TOO_LARGE, reading.frame)) is not None:
            assert np.isfinite(frame.select_dtypes("number").to_numpy(float)).all(), name
        if (shown := unless_refused(TOO_LARGE, reading._repr_mimebundle_)) is not None:
            assert not re.search(r"\b(nan|inf)", shown["text/html"]), name


OF_CHAINS = {
    "bonds": lambda c, u: bonds(c, u).norm,
    "certificate": lambda c, u: bonds(c, u).certificate(1),
    "error": lambda c, u: bonds(c, u).error(1),
    "function_bonds": lambda c, u: function_bonds(c, u, normal(9, 2)).norm,
    "decompile": lambda c, u: decompile(c, u).effective.abs().max(),
}


@pytest.mark.parametrize("depth", [1, 6, 7, 8, 60, 61, 300])
def test_models_of_any_depth(depth):
    """A result is finite, or the refusal is a sentence: degrees double with each layer."""
    layers = [BilinearTensor(eye(2), eye(2))] * depth
    words = "layers|leaves|operations needed|mean square of|beyond the range"
    for name, read in OF_CHAINS.items():
        result = unless_refused(words, read, layers, torch.ones(2))
        assert result is None or np.isfinite(float(result)), name


@given(st.integers(-280, 280), st.integers(-280, 280))
def test_matrices_of_any_size(left, right):
    """The norm is the sum of squares of singular values, however small these are."""
    assume(abs(left + right) <= 280)
    matrix = random_matrix(4, 5, 3)
    moved = FactoredMatrix(matrix.left * 10.0**left, matrix.right * 10.0**right)
    size = 10.0 ** (left + right)
    assert torch.isclose(moved.norm() / size, matrix.norm())
    svd, expected = moved.svd(), matrix.svd()
    assert torch.allclose(svd.values / size, expected.values)
    assert torch.isclose(svd.norm / size, expected.norm)


def test_eigenvalues_that_the_dtype_cannot_hold_are_an_error():
    large = scaled(random_tensor(3, 4, 2, 0).to(torch.float32), 1e30, 1e30, 1.0)
    with pytest.raises(BilensError, match="eigenvalues holds numbers beyond the range of"):
        large.interaction(output=0).eigh()
    assert large.to(torch.float64).interaction(output=0).eigh().values[0].abs() > 1e58
