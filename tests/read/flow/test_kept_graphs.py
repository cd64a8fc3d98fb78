"""Flows of texts so long that the graphs of all layers do not fit into memory."""

import pytest
import torch

from bilens.read.flow import flow, split
from bilens.residual import ResidualModel
from tests.language import random_model, toy_tokenizer


@pytest.mark.parametrize("against", ["t1 t7 t3 t4", None])
def test_a_flow_is_the_same_if_each_layer_runs_again(against, monkeypatch):
    view = ResidualModel(random_model(n_layers=3, norm="rms"), toy_tokenizer())
    results = []
    for limit in (split.KEPT_BYTES, 0):
        monkeypatch.setattr(split, "KEPT_BYTES", limit)
        through = flow(view, "t1 t2 t3 t4", "t5", minus="t6", against=against)
        assert through.adjoints.keep == (limit > 0)
        results.append([through.heads, through.mlps, through.embeddings, through.top(10).edges])
    torch.testing.assert_close(*results)
