"""The strongest paths against all paths, and the bounds against their exact values."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from bilens.errors import BilensError
from bilens.tensor import BilinearTensor
from bilens.tensor.tree import _layer_bounds, _LayerBound, decompile, spectral_norm_bound, top_paths
from tests.tensor.deep import (
    KINDS,
    chains,
    dense_chain,
    effective_by_hand,
    forward,
    random_chain,
    same_strengths,
    strongest_by_hand,
)
from tests.tensor.factors import close, normal

ROUNDING = 1e-7  # bounds are given room for it, so nothing that they cut off exceeds it


@given(chains, st.integers(1, 30))
def test_exactly_the_k_best(shape, k):
    chain, u = random_chain(**shape), normal(2, 4, seed=1)
    full = decompile(chain, u)
    k = min(k, len(full))
    result = top_paths(chain, u, k)
    paths = result.paths
    assert len(paths) == k
    assert same_strengths(paths.effective, strongest_by_hand(dense_chain(chain), u, k), len(chain))
    assert len(torch.cat([paths.roots[:, None], paths.indices], 1).unique(dim=0)) == k
    assert result.expanded <= result.total
    strengths = full.effective.abs()
    if k == len(full) or strengths[k - 1] - strengths[k] > 1e-6 * strengths[0]:
        x = normal(3, 5, seed=2)
        assert close(paths(x), full.truncate(k)(x), 1e-6)


def test_the_names_are_those_of_the_whole_tree():
    chain, u = decaying_chain(2), normal(2, 30, seed=1)
    result, full = top_paths(chain, u, 50).paths, decompile(chain, u).truncate(50)
    assert torch.equal(result.roots, full.roots)
    assert torch.equal(result.indices, full.indices)
    assert close(result.eigenvalues, full.eigenvalues)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("depth", [1, 2, 3])
def test_all_paths_are_the_model(depth, kind):
    chain, u, x = random_chain(depth, kind), normal(4, seed=1), normal(3, 5, seed=2)
    result = top_paths(chain, u, len(decompile(chain, u)))
    assert result.expanded == result.total
    assert close(result.paths(x), forward(chain, x) @ u, 1e-9)


def test_the_number_of_nodes():
    """Two directions, four eigenvectors (the constant one is among them) in each of two layers."""
    assert top_paths(random_chain(3, "bias"), normal(2, 4), 1).total == 2 + 2 * 4 + 2 * 4 * 4
    assert top_paths(random_chain(3, "plain"), normal(4), 1).total == 1 + 3 + 9


@given(chains)
def test_bounds_hold(shape):
    chain = random_chain(**shape)
    arrays = dense_chain(chain)
    closed = [
        tensor.with_constant_output() if above and above.constant else tensor
        for tensor, above in zip(chain, [*chain[1:], None], strict=True)
    ]
    for layer, bound in enumerate(_layer_bounds(closed)):
        directions = normal(5, closed[layer].n_out, seed=layer)
        directions[1:] /= directions[1:].norm(dim=1, keepdim=True)
        quick = bound.quick(directions)
        for i, direction in enumerate(directions):
            best = max(effective_by_hand(arrays[: layer + 1], direction))
            tight = bound.tight(direction)
            assert best <= tight * (1 + 1e-12)
            assert tight <= quick[i] * (1 + ROUNDING)


@given(st.integers(1, 12), st.integers(1, 12), st.integers(0, 3), st.integers(-25, 25))
def test_powers_bound_the_spectral_norm(n, rank, squarings, exponent):
    half = normal(n, rank)
    A = (half * normal(rank, seed=1)) @ half.T * 10.0**exponent
    exact = torch.linalg.eigvalsh(A).abs().max()
    bound = spectral_norm_bound(A.float(), squarings).double()
    assert exact * (1 - 1e-5) <= bound <= exact * min(n, rank) ** (0.5**squarings / 2) * (1 + 1e-5)
    assert spectral_norm_bound(torch.zeros(n, n), squarings) == 0


def decaying_chain(depth: int, n: int = 30, seed: int = 0) -> list[BilinearTensor]:
    """Layers with a few strong hidden units, as in a trained model."""
    weights = 0.6 ** torch.arange(n, dtype=torch.float64)
    return [
        BilinearTensor(normal(n, n, seed=i), normal(n, n, seed=i + 5), normal(n, n) * weights)
        for i in range(seed, seed + depth)
    ]


def test_few_nodes_are_expanded_where_few_matter():
    """The number of nodes that the paths need, and a little more for the slack of the bounds."""
    for depth, share in ((2, 0.15), (3, 0.02)):
        result = top_paths(decaying_chain(depth), torch.eye(30, dtype=torch.float64)[:5], 10)
        assert result.total == sum(5 * 30**layer for layer in range(depth))
        assert result.expanded <= share * result.total
    single_part = top_paths(decaying_chain(3), torch.eye(30, dtype=torch.float64)[0] * 1e-3, 1)
    assert single_part.expanded < 30


def test_a_direction_that_adds_nothing_is_not_expanded():
    directions = normal(3, 30, seed=1)
    directions[1] *= 1e-9
    result = top_paths(decaying_chain(2), directions, 20)
    alone = top_paths(decaying_chain(2), directions[[0, 2]], 20)
    assert result.expanded == alone.expanded
    assert not (result.paths.roots == 1).any()


def test_the_tight_bound_saves_expansions(monkeypatch):
    chain, u = decaying_chain(2), torch.eye(30, dtype=torch.float64)[:5]
    tight = top_paths(chain, u, 20)
    monkeypatch.setattr("bilens.tensor.tree.spectral_norm_bound", torch.linalg.matrix_norm)
    loose = top_paths(chain, u, 20)
    assert tight.expanded < 0.8 * loose.expanded
    assert torch.equal(tight.paths.indices, loose.paths.indices)


def test_the_quick_bound_saves_tight_ones(monkeypatch):
    looked_at = []
    tight = _LayerBound.tight

    def counted(bound, direction):
        looked_at.append(direction)
        return tight(bound, direction)

    monkeypatch.setattr(_LayerBound, "tight", counted)
    result = top_paths(decaying_chain(2), torch.eye(30, dtype=torch.float64)[:5], 10)
    assert result.expanded <= len(looked_at) <= 0.3 * result.total


def test_ties_go_to_the_lower_numbers():
    u = normal(30, seed=1)
    result = top_paths(decaying_chain(2), torch.stack([u, u, u]), 4).paths
    assert result.roots.tolist() == [0, 1, 2, 0]
    assert len(result.indices[:3].unique(dim=0)) == 1


def test_paths_of_no_strength_fill_up():
    """Rank one and one direction of zeros: the remaining choices have no effect."""
    chain = random_chain(2, "low rank")
    directions = torch.stack([torch.zeros(4, dtype=torch.float64), normal(4, seed=1)])
    result = top_paths(chain, directions, len(decompile(chain, directions)))
    assert result.paths.effective[-1] == 0
    x = normal(3, 5, seed=2)
    assert close(result.paths(x), forward(chain, x) @ directions.T, 1e-9)


def test_single_precision_finds_the_same_paths():
    chain, u = decaying_chain(3), normal(2, 30, seed=1)
    double = top_paths(chain, u, 10).paths
    single = top_paths([tensor.to(torch.float32) for tensor in chain], u.float(), 10).paths
    assert single.eigenvalues.dtype == single.vectors.dtype == torch.float32
    assert close(single.effective.double().abs(), double.effective.abs(), 1e-4)


def test_weights_that_train_are_read_without_a_graph():
    chain = random_chain(2, "plain")
    chain[1].out.requires_grad_()
    assert not top_paths(chain, normal(4), 2).paths.vectors.requires_grad


MISUSES = [
    (
        lambda c: top_paths(c, normal(4), 0),
        "k=0, expected a whole number, 1 to 9, the number of paths",
    ),
    (lambda c: top_paths(c, normal(200, 4), 1801), "k=1801, expected a whole number, 1 to 1800"),
    (lambda c: top_paths([], normal(4), 1), "tensors is empty"),
    (lambda c: top_paths(c, normal(3), 1), r"directions has shape \(3,\).*length 4"),
    (lambda c: top_paths(c, normal(4) / 0, 1), "directions holds NaN or infinite"),
]


@pytest.mark.parametrize(("misuse", "message"), MISUSES)
@pytest.mark.usefixtures("unchecked")
def test_misuse_is_explained(misuse, message):
    with pytest.raises(BilensError, match=message):
        misuse(random_chain(2, "plain"))
