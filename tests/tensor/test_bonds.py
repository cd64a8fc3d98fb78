from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from bilens.errors import BilensError
from bilens.tensor import BilinearTensor, bonds
from bilens.tensor.factors import affine
from tests.tensor.deep import chains, dense_chain, forward, random_chain
from tests.tensor.factors import SEEDS, close, eye, normal, random_tensor

N_IN, N_OUT = 3, 3
Case = tuple[list[BilinearTensor], Tensor, Tensor | None]


def make_case(chain: dict, with_metric: bool) -> Case:
    """Return a chain, directions of its outputs, and a metric of its inputs."""
    tensors = random_chain(**chain, n_in=N_IN, n_out=N_OUT)
    x = normal(8, tensors[0].n_in, seed=chain["seed"])
    return tensors, normal(2, N_OUT, seed=chain["seed"]), x.T @ x / 8 if with_metric else None


cases = st.builds(make_case, chains, st.booleans())
LONG = make_case({"depth": 3, "kind": "residual", "width": 1, "seed": 0}, with_metric=False)


def whole_tree(tensors: list[BilinearTensor], directions: Tensor, metric: Tensor | None) -> Tensor:
    """T, with an axis of directions and one for each leaf, in which the metric is the identity."""
    arrays = dense_chain(tensors)
    T = torch.tensordot(directions, arrays[-1], dims=1)
    for array in reversed(arrays[:-1]):
        for _ in range(T.ndim - 1):
            # Each leaf makes room for two at the end, so that the next in turn is again the first.
            T = torch.tensordot(T, array, dims=([1], [0]))
    if metric is not None:
        root = torch.linalg.cholesky(metric)
        for _ in range(T.ndim - 1):
            T = torch.tensordot(T, root, dims=([1], [0]))
    return T


def unfolded(T: Tensor, leaves: int) -> Tensor:
    """Return the matrix of the first `leaves` leaves times all others."""
    size = T.shape[1] ** leaves
    return T.reshape(len(T), size, -1).transpose(0, 1).reshape(size, -1)


@given(cases)
def test_singular_values_are_those_of_the_unfolded_tree(case: Case) -> None:
    T, reading = whole_tree(*case), bonds(*case)
    assert reading.norm == pytest.approx(float(T.norm()), rel=1e-10)
    for i, bond in enumerate(reading.bonds):
        squares = torch.linalg.svdvals(unfolded(T, 2**i)) ** 2 / T.norm() ** 2
        both = torch.zeros(2, max(len(squares), bond.k), dtype=torch.float64)
        both[0, : len(squares)], both[1, : bond.k] = squares, bond.shares
        assert (both[0] - both[1]).abs().max() < 1e-12
        assert bond.uses == 2 ** (len(case[0]) - i)
        # In whitened coordinates of what is below, projectors are orthogonal.
        assert close(bond.read @ bond.write, eye(bond.k), 1e-8)
        for k in range(1, bond.k + 1):
            projector = bond.projector(k)
            assert close(projector @ projector, projector, 1e-8)


@given(cases, SEEDS)
def test_no_cut_loses_more_than_its_certificate(case: Case, seed: int) -> None:
    reading, generator = bonds(*case), torch.Generator().manual_seed(seed)
    ranks = [int(torch.randint(1, b.k + 1, (), generator=generator)) for b in reading.bonds]
    cut, T = reading.cut(ranks), whole_tree(*case)
    lost = (T - whole_tree(cut.tensors(), *case[1:])).norm() / T.norm()
    assert reading.error(ranks) == pytest.approx(float(lost), abs=1e-6)
    assert cut.certificate**2 >= float(lost) ** 2 - 1e-12
    assert cut.certificate == reading.certificate(ranks)


@given(cases)
def test_all_directions_are_the_model(case: Case) -> None:
    tensors, directions, _ = case
    reading, x = bonds(*case), normal(6, N_IN, seed=1)
    cut, expected = reading.cut(100), forward(tensors, x) @ directions.T
    assert close(cut(x) @ directions.T, expected, 1e-8)
    assert close(forward(cut.tensors(), x) @ directions.T, expected, 1e-8)
    assert cut.certificate == 0
    assert reading.error(100) < 1e-6


@given(cases)
def test_coordinates_are_of_unit_size(case: Case) -> None:
    """Below every bond P is the identity, above it U is diagonal: the shares."""
    reading = bonds(*case)
    for core, bond in zip(reading.cores, reading.bonds[1:], strict=False):
        assert close(core.output_gram(), eye(bond.k), 1e-6)
    weights = reading.directions / reading.norm
    for core, bond in zip(reversed(reading.cores), reversed(reading.bonds), strict=True):
        assert close(core.change_basis(outputs=weights).input_gram(), bond.shares.diag(), 1e-6)
        weights = bond.shares.sqrt().diag()


@given(chains, st.booleans())
def test_an_embedding_may_be_folded_in(chain: dict, with_metric: bool) -> None:
    tensors = random_chain(**chain, n_in=5, n_out=N_OUT)
    E = normal(5, 4, seed=chain["seed"])
    if tensors[0].constant:
        E = affine(E, normal(5, seed=3))
    x = normal(9, E.shape[1], seed=2)
    metric = x.T @ x / 9 if with_metric else None
    apart, first = bonds(tensors, eye(N_OUT), metric, E), tensors[0]
    folded = replace(first, left=first.left @ E, right=first.right @ E)
    together = bonds([folded, *tensors[1:]], eye(N_OUT), metric)
    assert apart.norm == pytest.approx(together.norm, rel=1e-8)
    for a, b in zip(apart.bonds, together.bonds, strict=True):
        k = min(a.k, b.k)
        assert (a.shares[:k] - b.shares[:k]).abs().max() < 1e-10
        assert a.read.shape[1] == b.read.shape[1]
    assert close(apart.cut(100)(x), together.cut(100)(x), 1e-8)


def test_ranks_scoring_leaves_out_what_the_score_can_do_without() -> None:
    reading = bonds(random_chain(2, "plain", width=3, n_in=3, n_out=2, seed=4), eye(2))
    asked = []

    def score(cut: object) -> float:
        asked.append(cut.ranks)  # type: ignore[attr-defined]
        return float(cut.ranks[0] >= 2)  # type: ignore[attr-defined]

    assert reading.ranks_scoring(score, 1.0) == (2, 1)
    assert (3, 3) in asked
    with pytest.raises(BilensError, match="least=2.0, but with all directions the model scores 1"):
        reading.ranks_scoring(score, 2.0)


def test_float32_is_computed_in_float64() -> None:
    small = [t.to(torch.float32) for t in random_chain(3, "bias and residual", seed=3)]
    same = bonds([tensor.to(torch.float64) for tensor in small], eye(4))
    for a, b in zip(bonds(small, torch.eye(4)).bonds, same.bonds, strict=True):
        assert a.shares.dtype == torch.float64
        assert torch.equal(a.shares, b.shares)


def test_deep_models_stay_within_the_range_of_numbers() -> None:
    """Ten layers square sizes ten times: the model's norm is then beyond float64."""
    layer = random_tensor(2, 2, 2, seed=1)
    assert bonds([replace(layer, out=layer.out / layer.norm())] * 6, eye(2)).norm > 0
    with pytest.raises(BilensError, match="outside of the range of float64; scale its weights"):
        bonds([replace(layer, left=layer.left * 1e3)] * 9, eye(2))
