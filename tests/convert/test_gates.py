"""Lines and Swish in the place of gates, and the models with such gates that open again."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn import functional
from transformers import AutoModelForCausalLM

import bilens
from bilens.convert import gates, give_swish, make_bilinear, open_model, save_model
from bilens.errors import BilensError
from bilens.transformer.layers import MLP
from tests.families import EACH_GATED, log_probabilities, some_text, tiny
from tests.nightly import nightly

HIDDEN = 20


def with_lines(name, layers):
    """Return a model that has a line for each gate of some layers."""
    model = tiny(name)
    mlps = gates.gated_mlps(model)
    for layer in layers:
        generator = torch.Generator().manual_seed(layer)
        gates.set_line(mlps[layer], gates.Line(*torch.randn(2, HIDDEN, generator=generator), 0.0))
    gates.mark_linear(model, mlps, layers)
    return model


@given(seed=st.integers(0, 10_000), rows=st.integers(3, 40))
def test_the_line_is_the_least_squares_solution_of_each_unit(seed, rows):
    torch.manual_seed(seed)
    up, gate = torch.randn(2, rows, 4, dtype=torch.float64)
    act = functional.silu(3 * gate)
    line = gates.best_line(sum(map(gates.gate_sums, up.split(7), gate.split(7), act.split(7))))
    left = torch.tensor(0.0)
    for unit, (u, g, a) in enumerate(zip(up.T, gate.T, act.T, strict=True)):
        wanted = torch.linalg.lstsq(torch.stack([u * g, u], -1), u * a).solution
        result = torch.stack([line.slope[unit], line.offset[unit]]).double()
        torch.testing.assert_close(result, wanted, rtol=1e-4, atol=1e-4)
        left = left + (u * (a - wanted[0] * g - wanted[1])).square().sum()
    assert line.error == pytest.approx(float(left / (up * act).square().sum()), rel=1e-4, abs=1e-7)


def test_a_unit_that_is_never_active_has_no_line_and_no_text_is_an_error():
    with pytest.raises(BilensError, match="texts hold no token at which the MLP is active; pass o"):
        gates.best_line(torch.zeros(6, 2).double())
    up = torch.tensor([[0.0, 1.0], [0.0, 2.0]])
    gate, act = torch.tensor([[1.0, 1.0], [2.0, 3.0]]), torch.tensor([[1.0, 2.0], [2.0, 4.0]])
    sums = gates.gate_sums(up, gate, act)
    line = gates.best_line(sums)
    assert line.slope.tolist() == pytest.approx([0, 1], abs=1e-6)
    assert line.offset.tolist() == pytest.approx([0, 1], abs=1e-6)
    with pytest.raises(BilensError, match="texts holds NaN or infinite values"):
        gates.best_line(sums + gates.gate_sums(up, up * torch.nan, up))


@pytest.mark.parametrize("name", EACH_GATED)
def test_the_folded_gate_is_the_line(name):
    mlp = gates.gated_mlps(tiny(name))[1]
    x = torch.randn(6, mlp.up.module.weight.shape[1], dtype=torch.float64)
    up, gate = (part.select(part.module(x).T).T for part in (mlp.up, mlp.gate))
    slope, offset = torch.randn(2, HIDDEN)
    wanted = mlp.down.module(up * (slope * gate + offset))
    gates.set_line(mlp, gates.Line(slope, offset, 0.0))
    torch.testing.assert_close(mlp.module(x), wanted, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("layers", nightly([[0], [1], [0, 1]], [[1], [0, 1]]), ids=str)
@pytest.mark.parametrize("name", EACH_GATED)
def test_what_was_saved_opens_with_the_same_layers_linear(name, layers, tmp_path):
    model = with_lines(name, layers)
    wanted = log_probabilities(model)
    save_model(tmp_path / "once", model, None)
    opened = open_model(tmp_path / "once", dtype=torch.float64)
    save_model(tmp_path / "twice", opened, None)
    for again in (opened, open_model(tmp_path / "twice", dtype=torch.float64)):
        # What was opened keeps the speeds of rotary positions in float32.
        torch.testing.assert_close(log_probabilities(again), wanted, rtol=1e-4, atol=1e-4)
    if len(layers) == 2 and hasattr(model.config, "mlp_bias"):
        assert "bilens" not in (tmp_path / "once" / "config.json").read_text()
        result = AutoModelForCausalLM.from_pretrained(tmp_path / "once", dtype=torch.float64).eval()
        torch.testing.assert_close(log_probabilities(result), wanted, rtol=1e-4, atol=1e-4)
    else:
        assert gates.linear_layers(opened.config) == layers
        with pytest.raises(KeyError, match="bilens.load opens this model"):
            AutoModelForCausalLM.from_pretrained(tmp_path / "once")


def test_the_linear_layers_of_a_mixed_model_are_tensors(tmp_path):
    save_model(tmp_path, with_lines("llama", [1]), None)
    opened = bilens.load(tmp_path)
    assert opened.mlp(1).n_out == 16
    with pytest.raises(bilens.NotBilinearError, match=r"layers.0.mlp has an activation that is"):
        opened.mlp(0)


@pytest.mark.parametrize("name", EACH_GATED)
def test_swish_begins_as_the_models_own_activation(name):
    model = tiny(name)
    before = log_probabilities(model)
    gelu = name.startswith("gemma")
    assert give_swish(model).beta == gates.find_swish(model.config) == (1.702 if gelu else 1.0)
    assert torch.allclose(log_probabilities(model), before, atol=0.3 if gelu else 1e-9)


@pytest.mark.parametrize("name", EACH_GATED)
def test_every_layer_follows_beta(name):
    model = tiny(name)
    give_swish(model).beta = 0.25
    z = torch.linspace(-3, 3, 20)
    for mlp in gates.gated_mlps(model):
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
    for number, mlp in enumerate(gates.gated_mlps(tiny(name))):
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
