from itertools import product

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import Tensor

from bilens.errors import BilensError
from bilens.tensor import BilinearTensor, affine, bonds
from tests.tensor.deep import chains, dense_chain, forward, random_chain
from tests.tensor.factors import close, normal, random_tensor

N_IN, N_OUT = 3, 3

cases = st.fixed_dictionaries({"chain": chains, "with_metric": st.booleans()})


def case(chain: dict, with_metric: bool) -> tuple[list[BilinearTensor], Tensor, Tensor | None]:
    tensors = random_chain(**chain, n_in=N_IN, n_out=N_OUT)
    metric = None
    if with_metric:
        x = normal(8, tensors[0].n_in, seed=chain["seed"])
        metric = x.T @ x / 8
    return tensors, normal(2, N_OUT, seed=chain["seed"]), metric


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
def test_singular_values_are_those_of_the_unfolded_tree(given_case: dict) -> None:
    tensors, directions, metric = case(**given_case)
    T = whole_tree(tensors, directions, metric)
    reading = bonds(tensors, directions, metric)
    assert reading.norm == pytest.approx(float(T.norm()), rel=1e-10)
    for i, bond in enumerate(reading.bonds):
        squares = torch.linalg.svdvals(unfolded(T, 2**i)) ** 2 / T.norm() ** 2
        both = torch.zeros(2, max(len(squares), bond.k), dtype=torch.float64)
        both[0, : len(squares)], both[1, : bond.k] = squares, bond.shares
        assert (both[0] - both[1]).abs().max() < 1e-12
        assert bond.uses == 2 ** (len(tensors) - i)


@given(cases, st.integers(1, 3))
def test_a_projector_keeps_the_best_subspace(given_case: dict, k: int) -> None:
    """Cutting one use of one bond leaves the best approximation of the tree unfolded there."""
    tensors, directions, metric = case(**given_case)
    reading = bonds(tensors, directions, metric)
    for i, bond in enumerate(reading.bonds):
        projector = bond.projector(min(k, bond.k))
        assert close(projector @ projector, projector, 1e-8)
        # In whitened coordinates of what is below, the projector is an orthogonal one.
        assert close(bond.read @ bond.write, torch.eye(bond.k, dtype=torch.float64), 1e-8)
        lost = float(bond.shares[min(k, bond.k) :].sum())
        squares = torch.linalg.svdvals(unfolded(whole_tree(tensors, directions, metric), 2**i)) ** 2
        best = float(squares[min(k, bond.k) :].sum() / squares.sum())
        assert lost == pytest.approx(best, abs=1e-12)


@given(cases, st.integers(0, 10_000))
def test_no_cut_loses_more_than_its_certificate(given_case: dict, seed: int) -> None:
    tensors, directions, metric = case(**given_case)
    reading = bonds(tensors, directions, metric)
    generator = torch.Generator().manual_seed(seed)
    ranks = [int(torch.randint(1, b.k + 1, (), generator=generator)) for b in reading.bonds]
    cut = reading.cut(ranks)
    T = whole_tree(tensors, directions, metric)
    lost = (T - whole_tree(cut.tensors(), directions, metric)).norm() / T.norm()
    assert reading.error(ranks) == pytest.approx(float(lost), abs=1e-6)
    assert cut.certificate**2 >= float(lost) ** 2 - 1e-12
    assert cut.certificate == reading.certificate(ranks)


@given(cases)
def test_all_directions_are_the_model(given_case: dict) -> None:
    tensors, directions, metric = case(**given_case)
    reading = bonds(tensors, directions, metric)
    x = normal(6, N_IN, seed=1)
    cut = reading.cut(100)
    expected = forward(tensors, x) @ directions.T
    assert close(cut(x) @ directions.T, expected, 1e-8)
    assert close(forward(cut.tensors(), x) @ directions.T, expected, 1e-8)
    assert cut.certificate == 0
    assert reading.error(100) < 1e-6


@given(cases)
def test_coordinates_are_of_unit_size(given_case: dict) -> None:
    """Below every bond P is the identity, above it U is diagonal: the shares."""
    tensors, directions, metric = case(**given_case)
    reading = bonds(tensors, directions, metric)
    for core, bond in zip(reading.cores, reading.bonds[1:], strict=False):
        assert close(core.output_gram(), torch.eye(bond.k, dtype=torch.float64), 1e-6)
    weights = reading.directions / reading.norm
    for core, bond in zip(reversed(reading.cores), reversed(reading.bonds), strict=True):
        U = core.change_basis(outputs=weights).input_gram()
        assert close(U, bond.shares.diag(), 1e-6)
        weights = bond.shares.sqrt().diag()


@given(chains, st.booleans())
def test_an_embedding_may_be_folded_in(chain: dict, with_metric: bool) -> None:
    tensors = random_chain(**chain, n_in=5, n_out=N_OUT)
    E = normal(5, 4, seed=chain["seed"])
    if tensors[0].constant:
        E = affine(E, normal(5, seed=3))
    x = normal(9, E.shape[1], seed=2)
    metric = x.T @ x / 9 if with_metric else None
    directions = torch.eye(N_OUT, dtype=torch.float64)
    apart = bonds(tensors, directions, metric, E)
    first = tensors[0]
    folded = BilinearTensor(first.left @ E, first.right @ E, first.out, first.constant)
    together = bonds([folded, *tensors[1:]], directions, metric)
    assert apart.norm == pytest.approx(together.norm, rel=1e-8)
    for a, b in zip(apart.bonds, together.bonds, strict=True):
        k = min(a.k, b.k)
        assert (a.shares[:k] - b.shares[:k]).abs().max() < 1e-10
        assert a.read.shape[1] == b.read.shape[1]
    assert close(apart.cut(100)(x), together.cut(100)(x), 1e-8)


@given(cases, st.floats(0, 2))
@example(
    {"chain": {"depth": 3, "kind": "residual", "width": 1, "seed": 0}, "with_metric": False}, 2.0
)
def test_ranks_within_are_the_fewest(given_case: dict, error: float) -> None:
    tensors, directions, metric = case(**given_case)
    reading = bonds(tensors, directions, metric)
    ranks = reading.ranks_within(error)
    assert reading.certificate(ranks) <= error + 1e-9
    every = product(*(range(1, bond.k + 1) for bond in reading.bonds))
    fewest = min(sum(r) for r in every if reading.certificate(list(r)) <= error)
    # What is left out adds up in another order.
    assert sum(ranks) <= fewest or reading.certificate([*ranks]) == pytest.approx(error)


def test_ranks_scoring_leaves_out_what_the_score_can_do_without() -> None:
    tensors = random_chain(2, "plain", width=3, n_in=3, n_out=2, seed=4)
    reading = bonds(tensors, torch.eye(2, dtype=torch.float64))
    asked = []

    def score(cut: object) -> float:
        asked.append(cut.ranks)  # type: ignore[attr-defined]
        return float(cut.ranks[0] >= 2)  # type: ignore[attr-defined]

    assert reading.ranks_scoring(score, 1.0) == (2, 1)
    assert (3, 3) in asked
    with pytest.raises(BilensError, match="least=2.0, but with all directions the model scores 1"):
        reading.ranks_scoring(score, 2.0)


def test_float32_is_computed_in_float64() -> None:
    tensors = random_chain(3, "bias and residual", seed=3)
    directions = torch.eye(4)
    small = [tensor.to(torch.float32) for tensor in tensors]
    reading = bonds(small, directions)
    same = bonds([tensor.to(torch.float64) for tensor in small], directions.double())
    for a, b in zip(reading.bonds, same.bonds, strict=True):
        assert a.shares.dtype == torch.float64
        assert torch.equal(a.shares, b.shares)


def test_deep_models_stay_within_the_range_of_numbers() -> None:
    """Ten layers square sizes ten times: the model's norm is then beyond float64."""
    layer = random_tensor(2, 2, 2, seed=1)
    tame = [BilinearTensor(layer.left, layer.right, layer.out / layer.norm())] * 6
    assert bonds(tame, torch.eye(2, dtype=torch.float64)).norm > 0
    wild = [BilinearTensor(layer.left * 1e3, layer.right, layer.out)] * 9
    with pytest.raises(BilensError, match="outside of the range of float64; scale its weights"):
        bonds(wild, torch.eye(2, dtype=torch.float64))


def test_gaussian_error_bounds_what_a_cut_loses() -> None:
    for kind, depth in product(("plain", "bias and residual"), (1, 2, 3)):
        tensors = random_chain(depth, kind, width=2, n_in=2, n_out=2, seed=6)
        reading = bonds(tensors, torch.eye(2, dtype=torch.float64))
        x = normal(100_000, 2, seed=2)
        lost = (forward(tensors, x) - reading.cut(1)(x)).square().sum(-1).mean().sqrt()
        assert float(lost) <= reading.gaussian_error(1)
        assert reading.gaussian_error(9) == 0
