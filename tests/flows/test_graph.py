"""Graphs, and edits of weights."""

import itertools
from copy import deepcopy
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch.nn import functional

from bilens.analyses import language
from bilens.circuits import edit, edit_heads
from bilens.convert import open_model, save_model
from bilens.errors import BilensError
from bilens.flows import flow
from bilens.flows.nodes import LEAVES
from bilens.tensor import with_constant
from bilens.transformer import Pass, ResidualModel
from tests.families import DAILY, EACH_GATED, GATED, family_view, some_text
from tests.flows.flows import DIRECTION
from tests.models import random_text
from tests.nightly import nightly


@pytest.fixture(scope="module")
def split_flow(biased):
    return flow(biased, random_text(), DIRECTION, labels=0)


def test_everything_holds_everything(split_flow):
    nodes = split_flow.nodes_above(0)
    full = split_flow.graph(nodes)
    assert full.share_of_flow == pytest.approx(1)
    assert full.share_of_logit == pytest.approx(1, abs=1e-9)
    assert len(split_flow.top(10**6).nodes) == len(split_flow.nodes) + 1
    assert {node.place for node in split_flow.nodes} <= {node.place for node in nodes}


def test_the_strongest_come_first_and_some_of_a_graph_are_a_graph(split_flow):
    graph = split_flow.top(5)
    sizes = sorted((abs(node.flow) for node in split_flow.nodes_above(0)), reverse=True)
    assert [abs(node.flow) for node in split_flow.strongest(9)] == sizes[:9]
    assert {abs(node.flow) for node in graph.nodes[1:]} == {*sizes[:5]}
    assert graph.share_of_flow == pytest.approx(sum(sizes[:5]) / split_flow.absolute)
    some = split_flow.top(30).some(graph.nodes)
    assert some.nodes == graph.nodes
    torch.testing.assert_close(some.edges, graph.edges, rtol=0, atol=1e-12)


def test_all_tokens_are_nodes_and_others_have_a_share(split_flow):
    strong = split_flow.nodes_above(0.01)
    assert len(strong) < len(split_flow.nodes)
    for node in split_flow.nodes:
        is_shown = node.kind in LEAVES or abs(node.flow) >= 0.01 * split_flow.absolute
        assert (node in strong) == is_shown


def test_a_path_is_counted_only_where_it_is_whole(split_flow):
    """With the logit and the leaves only, the flow is that of direct edges."""
    graph = split_flow.graph([n for n in split_flow.nodes if n.kind in LEAVES])
    direct = float(graph.edges[0].sum()) / split_flow.value
    assert graph.share_of_logit == pytest.approx(direct)


def every_path(graph):
    """Return the weight of each path from the logit down to a leaf, by enumeration."""
    paths, ways = {}, [((0,), 1.0)]
    while ways:
        path, weight = ways.pop()
        above = path[-1]
        for b in range(above + 1, len(graph.nodes)):
            edge = float(graph.edges[above, b])
            if not edge:
                continue
            through = weight * edge / (graph.nodes[above].flow if above else 1.0)
            if graph.nodes[b].kind in LEAVES:
                paths[*path, b] = through
            elif graph.nodes[b].flow:
                ways.append(((*path, b), through))
    return paths


def test_weights_of_all_paths_add_up_to_the_logit(biased):
    """The weight of an edge is that of all paths through it."""
    small = flow(biased, random_text(2), DIRECTION, labels=0)
    full = small.graph(small.nodes_above(0))
    paths = every_path(full)
    assert len(paths) > 100
    assert sum(paths.values()) == pytest.approx(small.value)
    sums = torch.zeros_like(full.path_weights)
    for path, weight in paths.items():
        for above, below in itertools.pairwise(path):
            sums[above, below] += weight
    torch.testing.assert_close(full.path_weights, sums)


def test_the_second_run_of_a_command_may_be_several_texts_or_a_mean(view):
    read = partial(language.flow, view, prompt="t3 t4 t5", token="t3", minus="t7,t8")
    several = read(against="t3 t4 t6|t7 t4 t5")
    expected = flow(view, "t3 t4 t5", DIRECTION, against=["t3 t4 t6", "t7 t4 t5"])
    assert several.flow.value == pytest.approx(expected.value)
    expected = flow(view, "t3 t4 t5", DIRECTION, against=view.W_E.mean(0))
    mean = read(mean=True)
    assert mean.flow.value == pytest.approx(expected.value)
    assert mean.record()["other"] == "mean embeddings"


def test_a_picture_has_twenty_nodes_with_labels_and_its_share(split_flow):
    graph = split_flow.top(20)
    figure = split_flow.plot()
    (axes,) = figure.axes
    assert {node.label for node in graph.nodes[1:]} <= {text.get_text() for text in axes.texts}
    assert sum(len(line.get_xdata()) == 1 for line in axes.lines) == 21
    caption = f"20 of {len(split_flow.nodes)} nodes: {graph.share_of_logit:.0%} of the change"
    assert figure.alt.startswith(caption)


def test_a_position_that_draws_most_attention_is_a_sink(split_flow):
    assert split_flow.sinks == ()
    pattern = torch.zeros(9, 9).double()
    pattern[:, 0], pattern[3:, 2] = 0.6, 0.2
    pairs = tuple(replace(of_layer, attention=pattern) for of_layer in split_flow.pairs)
    assert replace(split_flow, pairs=pairs).sinks == (0,)


def test_patterns_of_a_flow_are_the_mean_of_all_heads(biased, split_flow):
    of_text = Pass.of(biased, random_text())
    for number, of_layer in enumerate(split_flow.pairs):
        torch.testing.assert_close(of_layer.attention, of_text.pattern(number)[0].abs().mean(0))


def test_what_is_not_there_is_said(split_flow):
    with pytest.raises(BilensError, match="k=0"):
        split_flow.top(0)
    with pytest.raises(BilensError, match="the logit is in no layer"):
        split_flow.adjoint(split_flow.output)


def seeded(seed):
    return torch.Generator().manual_seed(seed)


def some_vectors(width):
    return torch.randn(2, width, generator=seeded(3), dtype=torch.float64)


@pytest.mark.parametrize("name", nightly([*GATED, "gpt2", "neox"], DAILY))
def test_an_edit_scales_a_direction_that_the_maps_read(name):
    view = family_view(name)
    mlp, before = view.layer(1).mlp, deepcopy(view.model.state_dict())
    old, z = mlp.factors(), view.mlp_inputs(1, some_text()[:1])[0]
    # Maps without biases cannot read the constant.
    bias = float(mlp.up.module.bias is not None)
    v = functional.normalize(torch.cat([z[-1], z.new_tensor([bias])]), dim=0)
    new, w = edit(view, 1, v[None], scale=0.25).layer(1).mlp.factors(), v[: old.n_in]
    n = with_constant(z) if old.constant else z
    for side in ("left", "right")[: 1 + (mlp.gate is not None)]:
        read, edited = (getattr(factors, side)[: mlp.up.n_out] for factors in (old, new))
        less = 0.75 * torch.outer(n @ w, read @ w)
        torch.testing.assert_close(n @ edited.T, n @ read.T - less)
        assert less.abs().max() > 1e-3
    assert all(p.equal(before[n]) for n, p in view.model.state_dict().items())


def test_an_edited_mlp_does_not_see_the_directions(biased):
    v = some_vectors(biased.d_model + 1)
    edited = edit(biased, 1, v).layer(1).mlp.factors()
    for read in (edited.left, edited.right):
        assert float((read[:-1] @ v.T).abs().max()) < 1e-12


@pytest.mark.parametrize("name", EACH_GATED)
def test_edited_heads_write_less_and_all_else_is_as_it_was(name):
    view = family_view(name)
    before = deepcopy(view.model.state_dict())
    edited = edit_heads(view, 1, [1, 0], scale=-0.25)
    old, new = view.ov(1).dense(), edited.ov(1).dense()
    torch.testing.assert_close(new[2:], old[2:])
    torch.testing.assert_close(new[:2], -0.25 * old[:2])
    assert old[:2].abs().amax((1, 2)).min() > 0
    assert all(p.equal(before[n]) for n, p in view.model.state_dict().items())


def test_an_edited_model_is_saved_and_opened(llama, tmp_path):
    edited = edit(llama, 0, some_vectors(llama.d_model))
    save_model(tmp_path, edited.model, None)
    again = ResidualModel(open_model(tmp_path))
    assert again.logits(some_text()).allclose(edited.logits(some_text()))
    assert not again.logits(some_text()).allclose(llama.logits(some_text()))
