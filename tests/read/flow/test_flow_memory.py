"""Flows of long texts, whose numbers are computed again and whose heads are taken in blocks."""

import pytest
import torch

from bilens.read.flow import flow
from bilens.read.flow import split as splitting
from bilens.read.linear import heads
from bilens.residual import ResidualModel
from bilens.residual import trace as tracing
from tests.families import some_text, tiny
from tests.language import random_model

MODELS = {
    "llama": lambda: tiny("llama"),
    "gemma3": lambda: tiny("gemma3"),
    "olmo2": lambda: tiny("olmo2"),
    "squared": lambda: random_model(n_layers=2, attention="squared", qk_norm=True),
    "mixed values": lambda: random_model(n_layers=2, value_mix=True, bias=True),
}


@pytest.mark.parametrize("two_texts", [True, False])
@pytest.mark.parametrize("name", MODELS)
def test_a_long_text_has_the_flow_of_a_kept_one(name, two_texts, monkeypatch):
    model = ResidualModel(MODELS[name]())
    ids, other, _ = some_text()
    options = {"against": other} if two_texts else {}

    def split():
        return flow(model, ids, model.direction(3), threshold=0, ablate=0, **options)

    def flows(result):
        names = ("kind", "layer", "part", "position", "source", "number", "role")
        return {tuple(getattr(n, x) for x in names): n.flow for n in result.nodes}

    kept = split()
    for module, limit in (
        (tracing, "KEPT_BYTES"),
        (splitting, "KEPT_BYTES"),
        (heads, "BLOCK_BYTES"),
    ):
        monkeypatch.setattr(module, limit, 0)
    again = split()
    expected = flows(kept)
    assert flows(again) == pytest.approx(expected, rel=1e-3, abs=1e-5 * kept.absolute)
    moments = range(kept.mixing.shape[1])
    for moment in moments:
        torch.testing.assert_close(again.above(moment), kept.above(moment), rtol=1e-3, atol=1e-4)
