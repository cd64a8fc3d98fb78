"""The explanation of one input of a deep model adds up to its logits."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from bilens.read import class_paths, explain_deep
from bilens.tensor import LazyTree, decompile
from tests.tensor.deep import chains, forward, random_chain
from tests.tensor.factors import close, normal


@given(chains, st.integers(1, 3), st.integers(1, 3))
def test_activations_and_rest_are_the_logits(shape, branches, k):
    chain, x = random_chain(**shape), normal(1, 5, seed=2)[0]
    if len(chain) < 2:
        return
    directions = normal(4, 4, seed=1)
    tree = LazyTree(chain, directions)
    explanation = explain_deep(tree, x, n_classes=2, branches=branches, k=k)
    logits = forward(chain, x[None])[0] @ directions.T
    assert close(explanation.logits, logits, 1e-9)
    best = logits.argsort(descending=True)[:2].tolist()
    assert [part.label for part in explanation.parts] == best
    for part in explanation.parts:
        total = part.remainder + sum(branch.activation for branch in part.branches)
        assert total == pytest.approx(float(logits[part.label]), rel=1e-9, abs=1e-9)
        strengths = [abs(branch.activation) for branch in part.branches]
        assert strengths == sorted(strengths, reverse=True)


def test_shares_are_of_the_overlap_of_the_node():
    chain, x = random_chain(3, "bias", 3), normal(1, 5, seed=2)[0]
    tree = LazyTree(chain, normal(2, 4, seed=1))
    width = tree.branches((0, 0, 0)).k
    for part in explain_deep(tree, x, k=width).parts:
        for branch in part.branches:
            assert len(branch.node) == 2
            assert float(branch.shares.sum()) == pytest.approx(1)
            *above, last = (part.label, *branch.node)
            full = tree.overlaps(above, x[None])[0, last]
            node = (*above, last)
            parts = tree.branches(node).values * tree.overlaps(node, x[None])[0].square()
            assert close(branch.shares * full, parts[parts.abs().argsort(descending=True)])
            read = torch.cat([x, x.new_ones(branch.vectors.shape[1] - len(x))])
            assert (branch.vectors @ read >= 0).all()


def test_inputs_are_those_of_largest_overlap():
    chain, u, x = random_chain(2, "plain", 3), normal(1, 4, seed=1), normal(50, 5, seed=3)
    tree, paths = LazyTree(chain, u), decompile(chain, u)
    result = class_paths(tree, paths.truncate(4), x, k=3)
    hidden = chain[0](x)
    for row in range(4):
        first, second = paths.indices[row].tolist()
        top = tree.branches((0,)).vectors[first]
        expected = (hidden @ (chain_basis(chain, top))).abs().argsort(descending=True)[:3]
        assert torch.equal(result.inputs[first,], x[expected])
        overlaps = (x @ paths.vectors[row]).abs()
        expected = overlaps.argsort(descending=True)[:3]
        assert torch.equal(result.inputs[first, second], x[expected])
        assert (x[expected] @ result.paths.vectors[row]).sign().sum() >= 0
        assert close(result.paths.vectors[row].abs(), paths.vectors[row].abs())


def chain_basis(chain, vector):
    """Return a vector of the second layer's input as outputs of the first."""
    return vector if len(vector) == chain[0].n_out else pytest.skip("a layer reads less")
