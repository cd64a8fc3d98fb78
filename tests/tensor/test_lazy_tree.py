"""A tree that is opened node by node computes what the layers compute."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from bilens.errors import BilensError
from bilens.tensor import LazyTree, decompile
from tests.tensor.deep import chains, forward, random_chain
from tests.tensor.factors import close, normal


def value(tree: LazyTree, node: tuple[int, ...], x: torch.Tensor) -> torch.Tensor:
    """v . h of a node, from everything below it."""
    spectrum = tree.branches(node)
    if len(node) == tree.depth:
        return spectrum(x)
    below = torch.stack([value(tree, (*node, i), x) for i in range(spectrum.k)], -1)
    return below.square() @ spectrum.values


@given(chains, st.integers(0, 1))
def test_all_branches_together_are_the_model(shape, number):
    chain, u, x = random_chain(**shape), normal(2, 4, seed=1), normal(3, 5, seed=2)
    tree = LazyTree(chain, u)
    assert close(value(tree, (number,), x), forward(chain, x) @ u[number], 1e-9)


@given(chains, st.integers(0, 1))
def test_overlaps_are_what_the_nodes_give(shape, number):
    chain, u, x = random_chain(**shape), normal(2, 4, seed=1), normal(3, 5, seed=2)
    tree = LazyTree(chain, u)
    node: tuple[int, ...] = (number,)
    given_ = forward(chain, x) @ u[number]
    while len(node) <= tree.depth:
        overlaps = tree.overlaps(node, x)
        assert close(overlaps.square() @ tree.branches(node).values, given_, 1e-9)
        given_, node = overlaps[:, 0], (*node, 0)


def test_nodes_have_the_names_that_paths_have():
    chain, u = random_chain(3, "bias", 3), normal(2, 4, seed=1)
    tree, paths = LazyTree(chain, u), decompile(chain, u)
    for row in range(20):
        name = (int(paths.roots[row]), *paths.indices[row].tolist())
        result = tree.branches(name[:-1])
        assert close(result.values[name[-1]], paths.eigenvalues[row, -1])
        custom, other = result.vectors[name[-1]], paths.vectors[row]
        assert close(torch.outer(custom, custom), torch.outer(other, other), 1e-8)


@pytest.mark.parametrize("node", [(), (2,), (-1,), (0, 0, 0, 0)])
def test_nodes_that_are_none(node):
    tree = LazyTree(random_chain(3, "plain"), normal(2, 4, seed=1))
    with pytest.raises(BilensError, match="expected the number of one of 2 directions, then of up"):
        tree.branches(node)


def test_an_eigenvector_that_is_none():
    tree = LazyTree(random_chain(3, "plain"), normal(2, 4, seed=1))
    with pytest.raises(BilensError, match="node=.0, 7. ends in eigenvector 7, expected 0 to 2"):
        tree.branches((0, 7))
