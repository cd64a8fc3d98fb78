from dataclasses import replace
from itertools import permutations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from bilens.tensor import BilinearTensor, FactoredMatrix, decompile, with_constant
from bilens.tensor.factors import affine
from tests.tensor.factors import BATCHES, close, dense, eye, normal, random_tensor, shapes


@given(shapes)
def test_dense_grams_and_change_of_basis(shape):
    tensor = random_tensor(**shape)
    B = dense(tensor)
    assert close(tensor.dense(), B)
    assert close(tensor.output_gram(), torch.einsum("oij,pij->op", B, B))
    assert close(tensor.input_gram(), torch.einsum("oik,ojk->ij", B, B))
    E, U = normal(tensor.n_in, 6, seed=1), normal(4, tensor.n_out, seed=2)
    expected = torch.einsum("po,oij,ia,jb->pab", U, B, E, E)
    assert close(tensor.change_basis(inputs=E, outputs=U).dense(), expected)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_a_layer_without_an_output_map_has_its_hidden_units_as_outputs(dtype):
    W, V, x = (normal(*shape).to(dtype) for shape in ((7, 5), (7, 5), (4, 5)))
    tensor = BilinearTensor(W, V)
    assert tensor.n_out == tensor.rank == 7
    assert tensor.out.dtype == dtype
    torch.testing.assert_close(tensor(x), (x @ W.T) * (x @ V.T))


@given(shapes, BATCHES)
def test_one_and_two_inputs(shape, batch):
    tensor = random_tensor(**shape)
    B, x, y = dense(tensor), normal(*batch, tensor.n_in), normal(4, *batch, tensor.n_in, seed=1)
    expected = torch.einsum("oij,...i,s...j->s...o", B, x, y)
    assert close(tensor(x, y), expected)
    assert close(tensor(y, x), expected)
    for z in (x, y):
        assert close(tensor(z), torch.einsum("oij,...i,...j->...o", B, z, z))
        assert close(tensor(z, z), tensor(z))
    matrix = tensor.contract(x)
    assert matrix.batch_shape == batch
    assert close(matrix.dense(), torch.einsum("oij,...i->...oj", B, x))
    assert close(matrix.apply(y.movedim(0, -2)).movedim(-2, 0), expected)


@given(shapes, BATCHES)
def test_directions(shape, batch):
    tensor = random_tensor(**shape)
    u = normal(*batch, tensor.n_out, seed=1)
    form = tensor.interaction(u)
    expected = torch.einsum("...o,oij->...ij", u, dense(tensor))
    assert form.batch_shape == batch
    assert close(form.dense(), expected)
    x = normal(5, tensor.n_in, seed=2)
    assert close(form(x), torch.einsum("si,...ij,sj->s...", x, expected, x))
    v = normal(*batch, 2, tensor.n_in, seed=3)
    assert close(form.apply(v), torch.einsum("...ij,...kj->...ki", expected, v))
    assert close(form.norm(), expected.flatten(-2).norm(dim=-1))


def test_classes_are_unit_directions():
    tensor = random_tensor(4, 6, 5, 0)
    third = tensor.interaction(eye(5)[2]).dense()
    for output in (2, np.int64(2)):
        assert close(tensor.interaction(output=output).dense(), third)
    for outputs in ([4, 2], range(1, 3), np.arange(1, 3), torch.tensor([1, 2])):
        assert close(tensor.interaction(output=outputs)[1].dense(), third)


@given(shapes)
def test_biases(shape):
    tensor = random_tensor(**shape)
    left, right = normal(tensor.rank, seed=1), normal(tensor.rank, seed=2)
    out, x = normal(tensor.n_out, seed=3), normal(5, tensor.n_in, seed=4)
    expected = ((x @ tensor.left.T + left) * (x @ tensor.right.T + right)) @ tensor.out.T
    biased = tensor.with_bias(left, right)
    assert close(biased(x), expected)
    assert close(biased(with_constant(x)), expected)
    y = normal(5, tensor.n_in, seed=5)
    assert close(biased(x, with_constant(y)), biased(with_constant(x), y))
    assert close(biased.contract(x).apply(with_constant(y)[:, None])[:, 0], biased(x, y))
    assert close(biased.with_bias(out=out)(x), expected + out)
    assert close(tensor.with_bias(left).with_bias(right=right, out=out)(x), expected + out)


@given(shapes, st.booleans())
def test_residual(shape, biased):
    tensor, x = random_tensor(**{**shape, "n_out": shape["n_in"]}), normal(5, shape["n_in"])
    tensor = tensor.with_bias(left=normal(tensor.rank, seed=1)) if biased else tensor
    assert close(tensor.with_residual()(x), x + tensor(x))


@given(shapes)
def test_an_affine_map_before_the_layer(shape):
    tensor = random_tensor(**shape).with_bias()
    weight, bias = normal(tensor.n_in - 1, 3, seed=1), normal(tensor.n_in - 1, seed=2)
    z = normal(4, 3, seed=3)
    assert close(tensor.change_basis(inputs=affine(weight, bias))(z), tensor(z @ weight.T + bias))
    assert close(tensor.change_basis(inputs=weight)(z), tensor(z @ weight.T))


@given(shapes, st.integers(1, 7))
def test_sums_differences_and_inner_products(shape, rank):
    a = random_tensor(**shape)
    b = random_tensor(a.n_in, rank, a.n_out, shape["seed"] + 1)
    A, B, x = dense(a), dense(b), normal(3, a.n_in)
    assert close((a + b).dense(), A + B)
    assert close((a - b).dense(), A - B)
    assert close((a - b)(x), a(x) - b(x))
    assert (a + b).rank == a.rank + rank
    assert close((a - b).norm(), (A - B).norm())
    assert (a - a).norm() <= 1e-7 * A.norm()
    assert torch.allclose(a.inner(b), (A * B).sum(), rtol=1e-10, atol=1e-10 * A.norm() * B.norm())
    assert close(a.norm(), A.norm())
    assert torch.allclose(a.cosine(b), (A * B).sum() / (A.norm() * B.norm()), atol=1e-10)
    assert a.cosine(BilinearTensor(a.right, a.left, a.out)).item() == pytest.approx(1)
    assert a.cosine(replace(a, out=0 * a.out)) == 0


KEEP_OUTPUTS = [
    BilinearTensor.with_residual,
    lambda t: t + t,
    lambda t: t.to(torch.float32),
    lambda t: t - replace(t, names=()),
    lambda t: t.with_bias(out=normal(4)),
    lambda t: t.change_basis(inputs=normal(4, 2)),
]


@pytest.mark.parametrize("change", KEEP_OUTPUTS)
def test_outputs_that_stay_keep_their_names(change):
    tensor = change(replace(random_tensor(4, 6, 4, 0), names=tuple("abcd")))
    for number, name in enumerate("abcd"):
        named, numbered = (tensor.interaction(output=output) for output in (name, number))
        assert torch.equal(named.weights, numbered.weights)


OTHER = {
    "inputs": lambda t, x: t.change_basis(inputs=x(4, 2)),
    "outputs": lambda t, x: t.change_basis(outputs=x(2, 3)),
    "left": lambda t, x: t.with_bias(left=x(6)),
    "right": lambda t, x: t.with_bias(right=x(6)),
    "out": lambda t, x: t.with_bias(out=x(3)),
    "direction": lambda t, x: t.interaction(x(3)),
    "contract": lambda t, x: t.contract(x(4)),
    "product": lambda t, x: t.contract(normal(4)).T @ FactoredMatrix(x(3, 2), x(2, 4)),
}


@pytest.mark.parametrize("name", OTHER)
@pytest.mark.parametrize(("dtype", "other"), [*permutations([torch.float32, torch.float64])])
def test_arrays_of_another_dtype_are_brought_to_that_of_the_factors(name, dtype, other):
    tensor = random_tensor(4, 6, 3, 0)
    moved = OTHER[name](tensor.to(dtype), lambda *shape: normal(*shape, seed=1).to(other))
    expected = OTHER[name](tensor, lambda *shape: normal(*shape, seed=1))
    assert moved.dense().dtype == dtype
    assert close(moved.dense().double(), expected.dense(), 1e-5)


def test_inputs_of_another_dtype_are_brought_to_that_of_the_factors():
    tensor, x = random_tensor(4, 6, 3, 0).with_bias(normal(6)), normal(5, 4)
    assert tensor(x.float()).dtype == torch.float64
    single = tensor.to(torch.float32)
    for of_x in (single, single.interaction(output=0), single.interaction(output=0).eigh()):
        assert of_x(x).dtype == torch.float32
        assert close(of_x(x).double(), of_x(x.float()).double(), 1e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_low_precision_is_read_in_single_and_its_sums_in_double(dtype):
    low = random_tensor(6, 8, 4, 0).to(dtype)
    exact = low.to(torch.float64)
    spectrum = low.interaction(output=[0, 1]).eigh()
    assert spectrum.values.dtype == spectrum.vectors.dtype == torch.float32
    assert close(spectrum.values.double(), exact.interaction(output=[0, 1]).eigh().values, 1e-5)
    assert close(low.svd().values.double(), exact.svd().values, 1e-5)
    for number, expected in ((low.norm(), exact.norm()), (low.output_gram(), exact.output_gram())):
        assert number.dtype == torch.float64
        assert close(number, expected)
    many = random_tensor(300, 400, 2, 0).to(dtype).interaction(output=[0, 1])
    assert many.eigh(1).values.dtype == torch.float32
    paths = decompile([low.change_basis(outputs=normal(6, 4)), low], torch.ones(4, dtype=dtype))
    assert paths.eigenvalues.dtype == torch.float32


def test_gradients():
    tensor = random_tensor(4, 5, 3, 0)
    factors = [f.clone().requires_grad_() for f in (tensor.left, tensor.right, tensor.out)]
    x = normal(2, 4).requires_grad_()

    def everything(left, right, out, x):
        t = BilinearTensor(left, right, out)
        lifted = t.with_bias(left[:, 0], right[:, 1], out[:, 0])
        form = t.interaction(out[:, 0])
        two = t(x, x.flip(0)), t.contract(x).dense(), (lifted - t.with_bias()).norm()
        return t(x), lifted(x), form(x), t.inner(t), form.dense(), t.input_gram(), form.norm(), *two

    assert torch.autograd.gradcheck(everything, (*factors, x))
