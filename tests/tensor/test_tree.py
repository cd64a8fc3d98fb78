"""The whole eigenvector tree against dense decompositions and against the composed layers."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from bilens.tensor import BilinearTensor, with_constant
from bilens.tensor import tree as tree_module
from bilens.tensor.tree import Paths, decompile
from tests.tensor.deep import (
    chains,
    dense_chain,
    forward,
    random_chain,
    same_strengths,
    strongest_by_hand,
)
from tests.tensor.factors import close, normal, random_tensor, shapes

EXACT = 1e-9


@given(chains, st.sampled_from([(), (2,), (2, 2)]))
def test_the_whole_tree_computes_what_the_layers_compute(shape, batch):
    chain = random_chain(**shape)
    u, x = normal(*batch, 4, seed=1), normal(3, 5, seed=2)
    paths = decompile(chain, u)
    assert close(paths(x), torch.einsum("so,...o->s...", forward(chain, x), u), EXACT)
    assert close(paths(x[0]), paths(x)[0], EXACT)
    lengths = paths.vectors.norm(dim=1)
    assert close(lengths, torch.ones_like(lengths))


@given(chains)
def test_effective_eigenvalues(shape):
    chain, u = random_chain(**shape), normal(2, 4, seed=1)
    paths = decompile(chain, u)
    expected = strongest_by_hand(dense_chain(chain), u, len(paths))
    assert same_strengths(paths.effective, expected, len(chain))
    assert (paths.effective.abs().diff() <= 0).all()
    assert torch.equal(paths.effective.sign(), paths.eigenvalues[:, -1].sign())


def by_hand(paths: Paths, x: Tensor) -> Tensor:
    """Evaluate a pruned tree node by node."""

    def value(name: tuple[int, ...]) -> Tensor:
        names = torch.cat([paths.roots[:, None], paths.indices], 1)
        below = (names[:, : len(name)] == torch.tensor(name)).all(1).nonzero()[:, 0]
        if len(name) > paths.depth:
            return paths.vectors[below[0]] @ x
        total = torch.zeros((), dtype=x.dtype)
        for child in sorted({int(names[row, len(name)]) for row in below}):
            rows = [int(row) for row in below if names[row, len(name)] == child]
            total += paths.eigenvalues[rows[0], len(name) - 1] * value((*name, child)) ** 2
        return total

    return torch.stack([value((root,)) for root in range(len(paths.directions))])


@pytest.mark.parametrize("kind", ["plain", "bias and residual"])
@pytest.mark.parametrize("k", [1, 7, 40])
def test_a_pruned_tree_is_a_model(kind, k):
    full, x = decompile(random_chain(3, kind), normal(3, 4, seed=1)), normal(4, 5, seed=2)
    paths = full.truncate(k)
    for name in ("roots", "indices", "eigenvalues", "vectors"):
        assert torch.equal(getattr(paths, name), getattr(full, name)[:k])
    assert close(paths(x), torch.stack([by_hand(paths, fit(paths, row)) for row in x]))


@pytest.mark.parametrize("k", [1, 7, 40])
def test_a_tree_is_the_sum_of_its_roots_paths(k):
    paths = decompile(random_chain(3, "plain"), normal(3, 4, seed=1), k)
    x = normal(4, 5, seed=2)
    assert k > 1 or any(len(paths.of(root)) == 0 for root in range(3))
    assert close(sum(paths.of(root)(x) for root in range(3)), paths(x))


def fit(paths: Paths, x: Tensor) -> Tensor:
    return with_constant(x) if paths.constant else x


def test_samples_are_done_in_blocks_when_memory_is_short(monkeypatch):
    paths = decompile(random_chain(2, "bias"), normal(2, 4, seed=1))
    x = normal(2, 3, 5, seed=2)
    together = paths(x)
    monkeypatch.setattr(tree_module, "WORKING_BYTES", 1)
    assert together.shape == (2, 3, 2)
    assert close(paths(x), together)


def test_single_precision_stays_single():
    chain = random_chain(2, "bias")
    paths = decompile([tensor.to(torch.float32) for tensor in chain], normal(4, seed=1))
    assert {part.dtype for part in (paths.vectors, paths.eigenvalues, paths.effective)} == {
        torch.float32
    }
    x = normal(3, 5, seed=2)
    assert close(paths(x.float()).double(), forward(chain, x) @ normal(4, seed=1), 1e-4)


def test_weights_that_train_are_read_without_a_graph():
    chain = random_chain(2, "plain")
    chain[0].left.requires_grad_()
    paths = decompile(chain, normal(4))
    assert not paths.vectors.requires_grad
    assert not paths.eigenvalues.requires_grad


@pytest.mark.parametrize("scale", [1.0, 1e-9, 1e9])
def test_what_no_layer_reads_is_no_branch(scale):
    """L reads two of six inputs, R two others, and a unit without weight a fifth: four count."""
    left, right = torch.zeros(2, 3, 6, dtype=torch.float64)
    left[:2, :2], right[:2, 2:4] = normal(2, 2), normal(2, 2, seed=1)
    left[2, 5] = right[2, 5] = 1
    out = normal(4, 3, seed=2)
    out[:, 2] = 0
    expected, x, u = BilinearTensor(left, right, out), normal(3, 6, seed=3), normal(4, seed=4)
    by_unit = torch.tensor([scale, 1 / scale, 1]).double()
    for factors in (
        (left * scale, right / scale, out),
        (left * by_unit[:, None], right / by_unit[:, None], out),
        (left * by_unit[:, None], right, out / by_unit),
    ):
        paths = decompile([BilinearTensor(*factors)], u)
        assert len(paths) == 4
        assert close(paths(x), expected(x) @ u, EXACT)


def test_numbers_count_from_the_largest_of_a_node():
    single = decompile(random_chain(1, "bias"), normal(4))
    assert single.indices[:, 0].tolist() == [0, 1, 2, 3]
    paths = decompile(random_chain(2, "plain"), normal(4))
    order = paths.indices @ torch.tensor([3, 1])
    assert order.sort().values.tolist() == list(range(9))
    values = paths.eigenvalues[order.argsort()].abs().reshape(3, 3, 2)
    assert (values[:, 0, 0].diff() < 0).all()
    assert (values[..., 0] == values[:, :1, 0]).all()
    assert (values[..., 1].diff(dim=1) < 0).all()


def test_a_layer_that_gives_nothing():
    chain = random_chain(2, "plain")
    chain[0] = BilinearTensor(normal(2, 5), normal(2, 5), torch.zeros(3, 2, dtype=torch.float64))
    paths = decompile(chain, normal(4))
    assert (paths.effective == 0).all()
    assert (paths(normal(3, 5)) == 0).all()


def test_a_constant_that_begins_above_the_first_layer():
    """Biases in the second layer only, and a first layer that passes the 1 on its own."""
    chain = [random_tensor(5, 4, 3, 0), random_tensor(3, 4, 4, 1).with_bias(normal(4), normal(4))]
    handed_on = [chain[0].with_constant_output(), chain[1]]
    x, u = normal(3, 5, seed=2), normal(4, seed=3)
    assert close(decompile(chain, u)(x), forward(chain, x) @ u, EXACT)
    assert close(decompile(handed_on, u)(x), forward(chain, x) @ u, EXACT)


@given(shapes)
def test_an_output_that_is_one(shape):
    tensor, x = random_tensor(**shape), normal(5, shape["n_in"])
    assert close(tensor.with_constant_output()(x), with_constant(tensor(x)))
    biased = tensor.with_bias(left=normal(tensor.rank, seed=1))
    assert close(biased.with_constant_output()(x), with_constant(biased(x)))


@given(chains, st.integers(1, 30), st.booleans())
def test_exactly_the_k_best(shape, k, narrow):
    chain, u = random_chain(**shape), normal(2, 4, seed=1)
    full = decompile(chain, u)
    k = min(k, len(full))
    with pytest.MonkeyPatch.context() as patch:
        if narrow:  # one node in a block
            patch.setattr(tree_module, "WORKING_BYTES", 1)
        best = decompile(chain, u, k)
    assert len(best) == k
    assert same_strengths(best.effective, strongest_by_hand(dense_chain(chain), u, k), len(chain))
    assert len(torch.cat([best.roots[:, None], best.indices], 1).unique(dim=0)) == k


def test_the_best_have_the_names_of_the_whole_tree(monkeypatch):
    chain, u = random_chain(3, "bias and residual", 6, seed=3), normal(2, 4, seed=1)
    full = decompile(chain, u)
    monkeypatch.setattr(tree_module, "WORKING_BYTES", 4 * 7**2 * 8 * 5)  # five nodes in a block
    best = decompile(chain, u, 50)
    for name in ("roots", "indices", "eigenvalues", "vectors"):
        assert close(getattr(best, name).double(), getattr(full, name)[:50].double(), 1e-9)


def test_ties_go_to_the_lower_numbers(monkeypatch):
    u = normal(4, seed=1)
    monkeypatch.setattr(tree_module, "WORKING_BYTES", 1)
    best = decompile(random_chain(2, "plain"), torch.stack([u, u, u]), 4)
    assert best.roots.tolist() == [0, 1, 2, 0]
    assert len(best.indices[:3].unique(dim=0)) == 1
