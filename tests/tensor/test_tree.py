"""The whole eigenvector tree against dense decompositions and against the composed layers."""

from itertools import product

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from bilens.tensor import BilinearTensor, with_constant
from bilens.tensor import tree as tree_module
from bilens.tensor.tree import Paths, decompile
from tests.tensor.deep import chains, dense_chain, forward, random_chain, strongest_by_hand
from tests.tensor.factors import BATCHES, close, normal, random_tensor, shapes

EXACT = 1e-9
PARTS = ("roots", "indices", "eigenvalues", "vectors")


def same_strengths(actual: Tensor, expected: Tensor, depth: int) -> bool:
    """Equal but for rounding, which the roots of equation 4 magnify at eigenvalues of 0."""
    power = 2 ** (depth - 1)
    return close(actual.abs() ** power, expected**power)


@given(chains, BATCHES)
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


@pytest.mark.parametrize(("kind", "k"), [*product(["plain", "bias and residual"], [1, 7, 40])])
def test_a_pruned_tree_is_a_model(kind, k):
    full, x = decompile(random_chain(3, kind), normal(3, 4, seed=1)), normal(4, 5, seed=2)
    paths = full.truncate(k)
    for name in PARTS:
        assert torch.equal(getattr(paths, name), getattr(full, name)[:k])
    seen = with_constant(x) if paths.constant else x
    assert close(paths(x), torch.stack([by_hand(paths, row) for row in seen]))
    # A tree is the sum of its roots' paths, of which there may be none.
    assert k > 1 or any(len(paths.of(root)) == 0 for root in range(3))
    assert close(sum(paths.of(root)(x) for root in range(3)), paths(x))


def test_samples_are_done_in_blocks_when_memory_is_short(monkeypatch):
    paths, x = decompile(random_chain(2, "bias"), normal(2, 4, seed=1)), normal(2, 3, 5, seed=2)
    together = paths(x)
    monkeypatch.setattr(tree_module, "WORKING_BYTES", 1)
    assert together.shape == (2, 3, 2)
    assert close(paths(x), together)


def test_single_precision_stays_single_and_weights_that_train_are_read_without_a_graph():
    chain, x, u = random_chain(2, "bias"), normal(3, 5, seed=2), normal(4, seed=1)
    single = [tensor.to(torch.float32) for tensor in chain]
    single[0].left.requires_grad_()
    paths = decompile(single, u)
    for part in (paths.vectors, paths.eigenvalues, paths.effective):
        assert part.dtype == torch.float32
        assert not part.requires_grad
    assert close(paths(x.float()).double(), forward(chain, x) @ u, 1e-4)


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
    assert decompile(random_chain(1, "bias"), normal(4)).indices[:, 0].tolist() == [0, 1, 2, 3]
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
    x, u = normal(3, 5, seed=2), normal(4, seed=3)
    for layers in (chain, [chain[0].with_constant_output(), chain[1]]):
        assert close(decompile(layers, u)(x), forward(chain, x) @ u, EXACT)


@given(shapes)
def test_an_output_that_is_one(shape):
    plain, x = random_tensor(**shape), normal(5, shape["n_in"])
    for tensor in (plain, plain.with_bias(left=normal(plain.rank, seed=1))):
        assert close(tensor.with_constant_output()(x), with_constant(tensor(x)))


@given(chains, st.integers(1, 30), st.booleans())
def test_exactly_the_k_best(shape, k, narrow):
    chain, u = random_chain(**shape), normal(2, 4, seed=1)
    k = min(k, len(decompile(chain, u)))
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
    for name in PARTS:
        assert close(getattr(best, name).double(), getattr(full, name)[:50].double(), 1e-9)


def test_ties_go_to_the_lower_numbers(monkeypatch):
    u = normal(4, seed=1)
    monkeypatch.setattr(tree_module, "WORKING_BYTES", 1)
    best = decompile(random_chain(2, "plain"), torch.stack([u, u, u]), 4)
    assert best.roots.tolist() == [0, 1, 2, 0]
    assert len(best.indices[:3].unique(dim=0)) == 1
