"""Lines for gates: they minimise their error, and models with such gates open again."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn import functional
from transformers import AutoModelForCausalLM

import bilens
from bilens.convert import open_model, save_model
from bilens.convert.gates import (
    Line,
    best_line,
    gate_sums,
    gated_mlps,
    linear_layers,
    mark_linear,
    set_line,
)
from bilens.errors import BilensError
from tests.families import EACH_GATED, log_probabilities, tiny
from tests.nightly import nightly

HIDDEN = 20


def lines(mlps, layers):
    """Return a line for each of the layers."""
    for layer in layers:
        generator = torch.Generator().manual_seed(layer)
        slope, offset = torch.randn(2, HIDDEN, generator=generator)
        set_line(mlps[layer], Line(slope, offset, 0.0))


@given(seed=st.integers(0, 10_000), rows=st.integers(3, 40))
def test_the_line_is_the_least_squares_solution_of_each_unit(seed, rows):
    torch.manual_seed(seed)
    up, gate = torch.randn(2, rows, 4, dtype=torch.float64)
    act = functional.silu(3 * gate)
    line = best_line(sum(map(gate_sums, up.split(7), gate.split(7), act.split(7))))
    left = torch.tensor(0.0)
    for unit in range(4):
        u, g, a = up[:, unit], gate[:, unit], act[:, unit]
        wanted = torch.linalg.lstsq(torch.stack([u * g, u], -1), u * a).solution
        result = torch.stack([line.slope[unit], line.offset[unit]]).double()
        torch.testing.assert_close(result, wanted, rtol=1e-4, atol=1e-4)
        left = left + (u * (a - wanted[0] * g - wanted[1])).square().sum()
    share = left / (up * act).square().sum()
    assert line.error == pytest.approx(float(share), rel=1e-4, abs=1e-7)


def test_a_unit_that_is_never_active_has_no_line_and_no_text_is_an_error():
    with pytest.raises(BilensError, match="texts hold no token at which the MLP is active; pass o"):
        best_line(torch.zeros(6, 2).double())
    up = torch.tensor([[0.0, 1.0], [0.0, 2.0]])
    gate, act = torch.tensor([[1.0, 1.0], [2.0, 3.0]]), torch.tensor([[1.0, 2.0], [2.0, 4.0]])
    sums = gate_sums(up, gate, act)
    line = best_line(sums)
    assert line.slope.tolist() == pytest.approx([0, 1], abs=1e-6)
    assert line.offset.tolist() == pytest.approx([0, 1], abs=1e-6)
    with pytest.raises(BilensError, match="texts holds NaN or infinite values"):
        best_line(sums + gate_sums(up, up * torch.nan, up))


@pytest.mark.parametrize("name", EACH_GATED)
def test_the_folded_gate_is_the_line(name):
    model = tiny(name)
    mlp = gated_mlps(model)[1]
    x = torch.randn(6, mlp.up.module.weight.shape[1], dtype=torch.float64)
    up, gate = (part.select(part.module(x).T).T for part in (mlp.up, mlp.gate))
    slope, offset = torch.randn(2, HIDDEN)
    wanted = mlp.down.module(up * (slope * gate + offset))
    set_line(mlp, Line(slope, offset, 0.0))
    torch.testing.assert_close(mlp.module(x), wanted, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("layers", nightly([[0], [1], [0, 1]], [[1], [0, 1]]), ids=str)
@pytest.mark.parametrize("name", EACH_GATED)
def test_what_was_saved_opens_with_the_same_layers_linear(name, layers, tmp_path):
    model = tiny(name)
    mlps = gated_mlps(model)
    lines(mlps, layers)
    mark_linear(model, mlps, layers)
    wanted = log_probabilities(model)
    save_model(tmp_path / "once", model, None)
    opened = open_model(tmp_path / "once", dtype=torch.float64)
    save_model(tmp_path / "twice", opened, None)
    for again in (opened, open_model(tmp_path / "twice", dtype=torch.float64)):
        # What was opened keeps the speeds of rotary positions in float32.
        torch.testing.assert_close(log_probabilities(again), wanted, rtol=1e-4, atol=1e-4)
    plain = len(layers) == 2 and hasattr(model.config, "mlp_bias")
    if plain:
        text = (tmp_path / "once" / "config.json").read_text()
        assert "bilens" not in text
        result = AutoModelForCausalLM.from_pretrained(tmp_path / "once", dtype=torch.float64).eval()
        torch.testing.assert_close(log_probabilities(result), wanted, rtol=1e-4, atol=1e-4)
    else:
        assert linear_layers(opened.config) == layers
        with pytest.raises(KeyError, match="bilens.load opens this model"):
            AutoModelForCausalLM.from_pretrained(tmp_path / "once")


def test_the_linear_layers_of_a_mixed_model_are_tensors(tmp_path):
    model = tiny("llama")
    mlps = gated_mlps(model)
    lines(mlps, [1])
    mark_linear(model, mlps, [1])
    save_model(tmp_path, model, None)
    opened = bilens.load(tmp_path)
    assert opened.mlp(1).n_out == 16
    with pytest.raises(bilens.NotBilinearError, match=r"layers.0.mlp has an activation that is"):
        opened.mlp(0)
