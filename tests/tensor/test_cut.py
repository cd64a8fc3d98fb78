import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from bilens.tensor import Bonds, Cut, bonds, product_weight, sparse_basis
from tests.tensor.deep import chains, forward, random_chain
from tests.tensor.factors import close, eye, normal


def make_bonds(chain: dict) -> Bonds:
    return bonds(random_chain(**chain, n_in=3, n_out=2), eye(2))


readings = st.builds(make_bonds, chains)
cuts = st.builds(Bonds.cut, readings, st.integers(1, 4))


def rotation(k: int, seed: int) -> Tensor:
    return torch.linalg.qr(normal(k, k, seed=seed)).Q


@given(cuts)
def test_a_rotation_leaves_the_model_as_it_is(cut: Cut) -> None:
    turned = cut.rotate([rotation(k, i) for i, k in enumerate(cut.ranks)])
    x = normal(6, 3, seed=2)
    assert close(turned(x), cut(x), 1e-8)
    assert close(forward(turned.tensors(), x), cut(x), 1e-8)
    assert close(turned.write @ turned.read, cut.write @ cut.read, 1e-8)
    assert turned.certificate == cut.certificate
    for before, after in zip(cut.environments, turned.environments, strict=True):
        assert float(after.trace()) == pytest.approx(float(before.trace()))


@given(readings, st.integers(1, 4))
def test_all_products_are_the_model(result: Bonds, ranks: int) -> None:
    cut = result.cut(ranks)
    terms = cut.products()
    assert len(terms) == sum(c.n_out * c.n_in * (c.n_in + 1) // 2 for c in cut.cores)
    assert (terms.share[:-1] >= terms.share[1:]).all()
    assert (terms.first <= terms.second).all()
    x = normal(6, 3, seed=2)
    assert close(forward(cut.keep_products(len(terms)), x), cut(x), 1e-8)
    # Uncut, what a layer's products make up is the whole of the model.
    full = result.cut(100)
    terms = full.products()
    for layer in range(len(full.cores)):
        assert float(terms.share[terms.layer == layer].sum()) == pytest.approx(1, abs=1e-6)
    z = full.coordinates(x)
    for layer, core in enumerate(full.cores):
        total = torch.zeros(6, core.n_out, dtype=torch.float64)
        for row in torch.nonzero(terms.layer == layer).flatten():
            o, i, j = (int(column[row]) for column in (terms.output, terms.first, terms.second))
            total[:, o] += terms.coefficient[row] * z[layer][:, i] * z[layer][:, j]
        assert close(total, z[layer + 1], 1e-8)


def test_few_products_are_the_largest() -> None:
    cut = make_bonds({"depth": 2, "kind": "bias", "width": 3, "seed": 1}).cut(4)
    terms, x = cut.products(), normal(5, 3, seed=2)
    z0, _, _ = cut.coordinates(x)
    expected = torch.zeros(5, cut.ranks[1], dtype=torch.float64)
    for row in range(7):
        if terms.layer[row] == 0:
            i, j = int(terms.first[row]), int(terms.second[row])
            expected[:, terms.output[row]] += terms.coefficient[row] * z0[:, i] * z0[:, j]
    assert close(cut.keep_products(7)[0](x), expected, 1e-10)


@given(cuts)
def test_a_sparse_basis_is_the_same_model_with_less_weight(cut: Cut) -> None:
    sparse, x = sparse_basis(cut, steps=30), normal(6, 3, seed=2)
    assert close(sparse(x), cut(x), 1e-7)
    assert product_weight(sparse) <= product_weight(cut) * (1 + 1e-9) + 1e-12
    assert (sparse.write.sum(0) >= 0).all()
    for U in sparse.environments[:-1]:
        sizes = U.diagonal()
        assert (sizes[:-1] >= sizes[1:] - 1e-12).all()
    for core in sparse.cores[:-1]:
        for matrix in core.dense():
            twice = matrix * (2 - eye(len(matrix))).sqrt()
            assert twice.max() >= -twice.min() - 1e-9


def test_hidden_products_are_found_again() -> None:
    """A model of few products in a turned basis: the rotation that hides them is undone."""
    cut = make_bonds({"depth": 2, "kind": "plain", "width": 3, "seed": 3}).cut(3)
    result = bonds(cut.keep_products(5), eye(2)).cut(3)
    hidden = result.rotate([rotation(k, i) for i, k in enumerate(result.ranks)])
    assert product_weight(sparse_basis(hidden)) < 0.85 * product_weight(hidden)


def test_a_sparse_basis_of_weights_with_gradients() -> None:
    """The cut of a model in training has a graph, which the rotations do not change."""
    tensors = random_chain(2, "plain", n_in=3, n_out=2)
    for tensor in tensors:
        for factor in (tensor.left, tensor.right, tensor.out):
            factor.requires_grad_()
    cut = bonds(tensors, eye(2)).cut(2)
    assert float(product_weight(sparse_basis(cut, steps=5))) <= float(product_weight(cut)) + 1e-9
