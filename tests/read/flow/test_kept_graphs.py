"""Flows of texts so long that the graphs of all layers do not fit into memory."""

import pytest
import torch
from experiments.families import make, texts

from bilens.read.flow import flow, split
from bilens.residual import ResidualModel
from tests.models import toy_tokenizer, view_of


@pytest.mark.parametrize("against", ["t1 t7 t3 t4", None])
def test_a_flow_is_the_same_if_each_layer_runs_again(against, monkeypatch):
    view = view_of(n_layers=3, norm="rms")
    results = []
    for limit in (split.KEPT_BYTES, 0):
        monkeypatch.setattr(split, "KEPT_BYTES", limit)
        through = flow(view, "t1 t2 t3 t4", "t5", minus="t6", against=against)
        assert through.adjoints.keep == (limit > 0)
        results.append([through.heads, through.mlps, through.embeddings, through.top(10).edges])
    torch.testing.assert_close(*results)


# Of the first, layers read keys of earlier ones, so that all graphs are kept; of the last, layers
# return a list.
@pytest.mark.parametrize(
    ("name", "crosses"), [("gemma4_text", True), ("gpt_neo", False), ("openai-gpt", False)]
)
def test_layers_run_again_unless_they_read_earlier_ones(name, crosses, monkeypatch):
    view = ResidualModel(make(name), toy_tokenizer())
    assert view.places.crosses == crosses
    monkeypatch.setattr(split, "KEPT_BYTES", 0)
    first, second = (ids % 30 for ids in texts())
    assert flow(view, first, "t5", minus="t6", against=second, ablate=0).adjoints.keep == crosses
