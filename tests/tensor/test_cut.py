import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from bilens.tensor import Bonds, Cut, bonds
from bilens.tensor.chain import with_signs
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
def test_with_signs_the_strongest_products_are_positive(cut: Cut) -> None:
    signed, x = with_signs(cut), normal(6, 3, seed=2)
    assert close(signed(x), cut(x), 1e-7)
    assert (signed.write.sum(0) >= 0).all()
    for core in signed.cores[:-1]:
        for matrix in core.dense():
            twice = matrix * (2 - eye(len(matrix))).sqrt()
            assert twice.max() >= -twice.min() - 1e-9
