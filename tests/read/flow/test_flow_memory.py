"""Flows of long texts: layers run again, heads come in blocks, strong pairs are kept."""

import pytest
import torch

from bilens.read.flow import flow
from bilens.read.flow import split as splitting
from bilens.residual import ResidualModel, mixing
from tests.families import some_text, tiny
from tests.models import random_model, toy_tokenizer
from tests.read.flow.flows import DIRECTION

MODELS = {
    "llama": lambda: tiny("llama"),
    "gemma3": lambda: tiny("gemma3"),
    "olmo2": lambda: tiny("olmo2"),
    "neox": lambda: tiny("neox"),
    "mixtral": lambda: tiny("mixtral"),
    "squared": lambda: random_model(n_layers=2, attention="squared", qk_norm=True),
    "mixed values": lambda: random_model(n_layers=2, value_mix=True, bias=True),
}


def view_and_options(name, two_texts):
    ids, other, _ = some_text()
    options = {"against": other} if two_texts else {}
    return ResidualModel(MODELS[name](), toy_tokenizer()), ids, options


def flows(nodes):
    return {node.place: node.flow for node in nodes}


@pytest.mark.parametrize("two_texts", [True, False])
@pytest.mark.parametrize("name", MODELS)
def test_a_long_text_has_the_flow_of_a_kept_one(name, two_texts, monkeypatch):
    view, ids, options = view_and_options(name, two_texts)
    kept = flow(view, ids, DIRECTION, ablate=3, **options)
    monkeypatch.setattr(splitting, "KEPT_BYTES", 0)
    monkeypatch.setattr(mixing, "PATTERN_BYTES", 0)
    again = flow(view, ids, DIRECTION, ablate=3, **options)
    assert (kept.adjoints.keep, again.adjoints.keep) == (True, False)
    close = {"rel": 1e-5, "abs": 1e-8 * kept.absolute}
    assert flows(again.nodes_above(0)) == pytest.approx(flows(kept.nodes_above(0)), **close)
    for a, b in zip(again.named, kept.named, strict=True):
        assert a.measured == pytest.approx(b.measured, **close)
        assert (a.place, a.sources) == (b.place, b.sources)
    nodes = [node for node in kept.nodes_above(0) if node.is_removable and node.kind != "choice"]
    nodes = nodes[:40]
    edges = [result.graph(nodes).edges for result in (kept, again)]
    torch.testing.assert_close(*edges, rtol=1e-5, atol=1e-8 * kept.absolute)
    for a, b in zip(again.written(nodes), kept.written(nodes), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("two_texts", [True, False])
@pytest.mark.parametrize("pattern_bytes", [0, 2**30])
def test_the_strongest_pairs_are_kept_and_all_are_counted(two_texts, pattern_bytes, monkeypatch):
    view, ids, options = view_and_options("gemma3", two_texts)
    whole = flow(view, ids, DIRECTION, ablate=0, **options)
    monkeypatch.setattr(splitting, "KEPT_PAIRS", 20)
    monkeypatch.setattr(mixing, "PATTERN_BYTES", pattern_bytes)
    some = flow(view, ids, DIRECTION, ablate=0, **options)
    assert some.absolute == pytest.approx(whole.absolute)
    torch.testing.assert_close(some.heads, whole.heads)
    for layer in range(2):
        heads = [n for n in whole.nodes_above(0) if (n.kind, n.layer) == ("head", layer)]
        assert len(heads) > 20
        expected = {node.place for node in heads[:20]}
        kept = [n for n in some.nodes_above(0) if (n.kind, n.layer) == ("head", layer)]
        assert {node.place for node in kept} == expected
        torch.testing.assert_close(some.pairs[layer].attention, whole.pairs[layer].attention)
