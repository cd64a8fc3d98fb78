"""Flows that are kept: their memory, pickle and copies, and graphs that are made again."""

import copy
import pickle
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from bilens.errors import BilensError
from bilens.flows import flow
from tests.models import view_of

FIRST, SECOND = torch.tensor([3, 4, 5, 6]), torch.tensor([3, 8, 5, 6])


def read(view, **options):
    return flow(view, FIRST, "t6", minus="t7", against=SECOND, labels=0, **options)


def tensors(value, seen):
    """Yield all tensors that an object holds, through attributes and containers."""
    if id(value) in seen or isinstance(value, (torch.nn.Module, type)):
        return
    seen.add(id(value))
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict):
        for part in value.values():
            yield from tensors(part, seen)
    elif isinstance(value, (list, tuple, set)):
        for part in value:
            yield from tensors(part, seen)
    elif hasattr(value, "__dict__"):
        yield from tensors(vars(value), seen)


def test_a_flow_holds_no_graph(view):
    kept = read(view)
    held = [*tensors(kept, {id(kept.origin._run)})]
    assert held
    assert not any(x.requires_grad for x in held)
    # No view of an array that other flows share.
    assert all(x.untyped_storage().nbytes() == x.nbytes for x in held)


def test_of_all_passes_the_last_one_that_was_used_keeps_its_graph(view):
    flows = [read(view) for _ in range(3)]
    tops = [x.top(5) for x in flows]
    assert [x.origin._adjoints is not None for x in flows] == [False, False, True]
    torch.testing.assert_close(flows[0].top(5).edges, tops[0].edges)
    assert [x.origin._adjoints is not None for x in flows] == [True, False, False]


def test_flows_are_pickled_and_copied(view):
    kept = read(view)
    graph = kept.top(5)
    again, copied = pickle.loads(pickle.dumps(kept)), copy.deepcopy(kept)
    for other in (again, copied):
        assert other.values == kept.values
        assert other.nodes == kept.nodes
        assert other.frame().equals(kept.frame())
    torch.testing.assert_close(copied.top(5).edges, graph.edges)
    torch.testing.assert_close(pickle.loads(pickle.dumps(graph)).edges, graph.edges)
    with pytest.raises(BilensError, match="written by pickle, without its model"):
        again.top(5)


def test_a_graph_is_not_that_of_changed_weights():
    view = view_of(n_layers=2)
    kept = read(view)
    with torch.no_grad():
        view.modules.layers[0].mlp.down.stored.mul_(2)
    with pytest.raises(BilensError, match="its weights have changed"):
        kept.top(5)


def test_several_threads_share_a_flow():

    view = view_of(n_layers=2)
    flows = [read(view) for _ in range(2)]
    expected = flows[0].top(6).edges
    with ThreadPoolExecutor(4) as pool:
        found = [*pool.map(lambda i: flows[i % 2].top(6).edges, range(12))]
    for edges in found:
        torch.testing.assert_close(edges, expected)
