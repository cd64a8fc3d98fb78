import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn import functional

from bilens.errors import BilensError
from bilens.tensor import BilinearTensor, steer, with_constant
from tests.tensor.factors import close, dense, normal, random_tensor, shapes

layers = st.sampled_from(["plain", "bias", "residual", "both"])
axes = st.sampled_from([(), (3,), (2, 3)])


def lifted(tensor: BilinearTensor, layer: str) -> BilinearTensor:
    if layer in ("bias", "both"):
        bias = normal(tensor.rank, seed=1), normal(tensor.rank, seed=2)
        tensor = tensor.with_bias(*bias, normal(tensor.n_out, seed=3))
    return tensor.with_residual() if layer in ("residual", "both") else tensor


@given(shapes, layers, axes, axes)
def test_the_terms_are_those_of_the_dense_tensor(shape, layer, samples, vectors):
    tensor = lifted(random_tensor(**{**shape, "n_out": shape["n_in"]}), layer)
    B, n = dense(tensor), shape["n_in"]
    s, x = normal(*vectors, n, seed=4), normal(*samples, n, seed=5)
    result = steer(tensor, s, x)
    assert close(result.square, torch.einsum("oij,...i,...j->...o", B[:, :n, :n], s, s))
    constant = 2 * s @ B[:, :n, n].T if tensor.constant else torch.zeros_like(result.constant)
    assert close(result.constant, constant)
    flat = 2 * torch.einsum("oij,ai,bj->abo", B[:, :n, :n], x.reshape(-1, n), s.reshape(-1, n))
    assert close(result.cross, flat.reshape(*samples, *vectors, n))
    steered = tensor((x.reshape(-1, 1, n) + s.reshape(-1, n)).reshape(*samples, *vectors, n))
    assert close(result.total(), steered)
    before = tensor(x).reshape(*samples, *[1] * len(vectors), n)
    scale = result.total().abs().max()
    assert torch.allclose(result.change(), steered - before, atol=1e-10 * scale)


@given(shapes, layers, axes)
def test_the_map_is_what_steering_makes_of_the_input(shape, layer, vectors):
    tensor = lifted(random_tensor(**{**shape, "n_out": shape["n_in"]}), layer)
    s, x = normal(*vectors, shape["n_in"], seed=4), normal(5, shape["n_in"], seed=5)
    read = with_constant(x) if tensor.constant else x
    free = functional.pad(s, (0, int(tensor.constant)))
    result, matrix = steer(tensor, s, x), tensor.contract(2 * free)
    expected = (result.cross + result.constant).movedim(0, -2)
    assert close(matrix.apply(read.expand(*vectors, *read.shape)), expected)


def test_strength_scales_what_it_should():
    tensor = random_tensor(4, 6, 3, 0).with_bias(normal(6))
    s, x = normal(4), normal(5, 4, seed=1)
    once, twice = steer(tensor, s, x), steer(tensor, -2.5 * s, x)
    assert close(once.scaled(-2.5).total(), twice.total())
    assert close(once.scaled(-2.5).square, twice.square)


def test_outputs_may_be_directions_and_x_may_have_the_constant():
    tensor = random_tensor(4, 6, 3, 0).with_bias(normal(6))
    U, s, x = normal(2, 3), normal(4), normal(5, 4, seed=1)
    full, along = steer(tensor, s, x), steer(tensor.change_basis(outputs=U), s, with_constant(x))
    assert close(along.change(), full.change() @ U.T)


def test_gradients():
    tensor = random_tensor(3, 4, 2, 0).with_bias(normal(4))
    factors = [f.clone().requires_grad_() for f in (tensor.left, tensor.right, tensor.out)]
    s, x = normal(2, 3).requires_grad_(), normal(2, 3, seed=1).requires_grad_()

    def terms(left, right, out, s, x):
        t = BilinearTensor(left, right, out, constant=True)
        result = steer(t, s, x)
        return result.square, result.constant, result.cross, result.before

    assert torch.autograd.gradcheck(terms, (*factors, s, x))


def test_misuse_is_explained():
    tensor = random_tensor(4, 6, 3, 0)
    with pytest.raises(
        BilensError, match=r"s has shape \(5,\); its last axis should have length 4"
    ):
        steer(tensor, normal(5), normal(4))
    with pytest.raises(BilensError, match=r"length 4, .*without the constant 1"):
        steer(tensor.with_bias(), normal(5), normal(4))
    with pytest.raises(BilensError, match=r"x has shape \(2, 3\)"):
        steer(tensor, normal(4), normal(2, 3))
