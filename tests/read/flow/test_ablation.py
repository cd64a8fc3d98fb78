"""Interventions have the effect of their definition, and flows between texts predict it exactly."""

import pytest

from bilens.errors import BilensError
from bilens.read.flow import flow, measure
from bilens.residual import ResidualModel
from tests.families import EACH_READ, exact_norms, some_text, tiny
from tests.language import random_model, random_text, view_of
from tests.read.flow.flows import numbers_of

STRAIGHT = {"n_layers": 2, "norm": "none", "bias": True, "attention": "softmax"}


def without_mlps(model):
    for block in model.blocks:
        block.mlp.out.weight.zero_()
    return model


def exact(results, tolerance=1e-10):
    assert results
    assert all(r.actual == pytest.approx(r.predicted, abs=tolerance) for r in results)
    assert any(abs(r.actual) > 1e-3 for r in results)


@pytest.mark.parametrize("scale", [0.0, 2.0])
def test_what_only_the_unembedding_reads_changes_the_logit_by_its_flow(scale):
    view, ids = view_of(**STRAIGHT), random_text()
    flows = flow(view, ids, view.direction(3), directions="all", threshold=0)
    last = numbers_of(flows, kind="direction", layer=1, position=len(ids) - 1)
    exact(measure(view, flows, last, scale=scale))


@pytest.mark.parametrize("settings", [{}, {"positions": "learned"}, {"embed_mix": True}])
def test_edges_to_the_logit_are_exact_without_a_norm(settings):
    view, ids = view_of(**STRAIGHT, **settings), random_text(5)
    flows = flow(view, ids, view.direction(3), directions=3, threshold=1e-4)
    edges = [(0, i) for i, node in enumerate(flows.nodes) if i and node.kind != "bias"]
    exact(measure(view, flows, edges, scale=0.5))


def test_edges_to_directions_change_what_they_read():
    view, ids = view_of(**STRAIGHT), random_text(5)
    flows = flow(view, ids, view.direction(3), directions=3, threshold=1e-4)
    above = numbers_of(flows, kind="direction", layer=1, position=len(ids) - 1)
    below = [i for kind in ("head", "token", "rest") for i in numbers_of(flows, kind=kind)]
    exact(measure(view, flows, [(a, b) for a in above for b in below if b > a]))


@pytest.mark.parametrize("settings", [{}, {"value_mix": True, "embed_mix": True}])
def test_heads_under_nothing_but_the_unembedding_are_exact(settings):
    view = ResidualModel(without_mlps(random_model(**STRAIGHT, **settings)))
    flows = flow(view, random_text(3), view.direction(3), threshold=1e-3)
    heads = numbers_of(flows, kind="head", layer=1)
    exact(measure(view, flows, heads))
    below = [*numbers_of(flows, kind="head", layer=0), *numbers_of(flows, kind="token")]
    exact(measure(view, flows, [(a, b) for a in heads for b in below]))


@pytest.mark.parametrize("name", EACH_READ)
def test_tokens_are_taken_away_as_if_their_embedding_were_zero(name):
    with exact_norms():
        view, ids = ResidualModel(tiny(name)), some_text()[0][:4]
        assert len(set(ids.tolist())) == 4
        u = view.direction(3)
        flows = flow(view, ids, u, threshold=0.1)
        [result] = measure(view, flows, numbers_of(flows, kind="token", position=1))
        view.parts.embed.module.weight[ids[1]] = 0
        zeroed = flow(view, ids, u, threshold=0.1)
    # Between runs of other batches is a softmax in float32.
    assert result.actual == pytest.approx(zeroed.value - flows.value, abs=1e-5)
    assert result.predicted == -flows.nodes[numbers_of(flows, kind="token", position=1)[0]].flow


@pytest.mark.parametrize(
    ("part", "message"),
    [
        (0, "number=0 is output, which is not one part of the model to remove"),
        (10**6, "number=1000000, expected 0 to"),
        ((0, 0), r"edge=\(0, 0\), expected a node and one below it that is not a bias"),
        ("rest", r"ends in a node of kind rest; expected the logit, a direction, or a head"),
    ],
)
def test_what_cannot_be_removed_is_said(part, message):
    view = view_of(**STRAIGHT)
    flows = flow(view, random_text(), view.direction(3), directions=3, threshold=0.1)
    if part == "rest":
        part = (numbers_of(flows, kind="rest")[0], numbers_of(flows, kind="token")[0])
    with pytest.raises(BilensError, match=message):
        measure(view, flows, [part])
