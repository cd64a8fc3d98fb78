"""Swish in place of an activation, and the model that plain transformers reads at beta = 0."""

import pytest
import torch
from transformers import AutoModelForCausalLM

from bilens.convert import give_swish, make_bilinear, open_model, save_model
from bilens.convert.gates import find_swish, gated_mlps
from bilens.errors import BilensError
from bilens.residual.layers import MLP
from tests.families import EACH_GATED, log_probabilities, some_text, tiny
from tests.nightly import nightly


@pytest.mark.parametrize("name", EACH_GATED)
def test_swish_begins_as_the_models_own_activation(name):
    model = tiny(name)
    before = log_probabilities(model)
    swish = give_swish(model)
    gelu = name.startswith("gemma")
    assert swish.beta == find_swish(model.config) == (1.702 if gelu else 1.0)
    assert torch.allclose(log_probabilities(model), before, atol=0.3 if gelu else 1e-9)


@pytest.mark.parametrize("name", EACH_GATED)
def test_every_layer_follows_beta(name):
    model = tiny(name)
    give_swish(model).beta = 0.25
    z = torch.linspace(-3, 3, 20)
    for mlp in gated_mlps(model):
        assert torch.allclose(mlp.activation_function()(z), z * torch.sigmoid(z / 4))
    assert give_swish(model).beta == 0.25


@torch.no_grad()
@pytest.mark.parametrize(
    "dtype", nightly([torch.float32, torch.bfloat16], [torch.float32]), ids=str
)
@pytest.mark.parametrize("name", EACH_GATED)
def test_plain_transformers_reads_the_bilinear_model(name, dtype, tmp_path):
    model = tiny(name, dtype=dtype)
    give_swish(model).beta = 0.0
    save_model(tmp_path / "run", model, None)
    # What was opened keeps the speeds of rotary positions in float32.
    model = open_model(tmp_path / "run", dtype=dtype)
    before = model(some_text()).logits
    make_bilinear(model)
    save_model(tmp_path, model, None)
    plain = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=dtype).eval()
    assert "bilens" not in (tmp_path / "config.json").read_text()
    assert "linear" in (plain.config.to_dict().get(k) for k in ("hidden_act", "hidden_activation"))
    assert torch.allclose(plain(some_text()).logits, before, atol=1e-5)


@pytest.mark.parametrize("name", EACH_GATED)
def test_the_gated_mlps_are_found_in_their_parts(name):
    for number, mlp in enumerate(gated_mlps(tiny(name))):
        assert mlp.name == f"model.layers.{number}.mlp"
        x = torch.randn(3, 16, dtype=torch.float64)
        assert torch.allclose(mlp.output(x), mlp.module(x))


def test_folded_gates_are_compared_with_the_model_before(monkeypatch):
    model = tiny("llama")
    give_swish(model).beta = 0.0
    scale = MLP.scale_gate
    monkeypatch.setattr(MLP, "scale_gate", lambda mlp, factor: scale(mlp, 1.1 * factor))
    with pytest.raises(BilensError, match="Folding the gates changed a log-probability by"):
        make_bilinear(model)
