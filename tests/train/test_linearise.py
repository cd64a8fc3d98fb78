"""Gates made linear: each layer on the outputs of earlier linear ones, and the measured cost."""

from functools import partial

import pytest
import torch
from torch.nn import functional

from bilens.convert import give_swish, make_bilinear
from bilens.convert.gates import find_swish, gated_mlps
from bilens.errors import BilensError, CheckpointError
from bilens.train import linearise as module
from bilens.train.layers import LayerStreams, TrainingRows
from bilens.train.linearise import fit_mlp, linearise, next_token_loss, weighted_squares
from bilens.train.settings import Distillation
from tests.families import EACH_GATED, VOCAB, log_probabilities, tiny
from tests.train.runs import file_limit

TIME = 12


def texts(n, seed=0):
    return torch.randint(VOCAB, (n, TIME), generator=torch.Generator().manual_seed(seed))


def seen(model, mlp, ids):
    """Return inputs and outputs of an MLP in the model."""
    result = []
    hook = mlp.module.register_forward_hook(lambda m, given, made: result.append((given[0], made)))
    model(ids, use_cache=False)
    hook.remove()
    return [part.flatten(0, 1) for part in result[0]]


def streams_of(model, ids, folder):
    mlps = gated_mlps(model)
    layers = [model.get_submodule(mlp.name.rpartition(".")[0]) for mlp in mlps]
    return LayerStreams(model, layers, ids, folder), mlps


@pytest.mark.parametrize("name", EACH_GATED)
def test_a_model_run_layer_by_layer_is_the_model(name, tmp_path):
    model, ids = tiny(name), texts(11)
    streams, mlps = streams_of(model, ids, tmp_path)
    for mlp in mlps:
        for numbers, wanted in zip(streams.seen(mlp.module), seen(model, mlp, ids), strict=True):
            torch.testing.assert_close(numbers, wanted, rtol=1e-5, atol=1e-5)
        assert streams.stream.shape[:2] == ids.shape
        streams.advance()


def test_a_layer_that_changed_runs_again(tmp_path):
    model, ids = tiny("llama"), texts(3)
    streams, mlps = streams_of(model, ids, tmp_path)
    mlps[0].down.module.weight.data.neg_()
    streams.advance()
    wanted, _ = seen(model, mlps[1], ids)
    torch.testing.assert_close(streams.seen(mlps[1].module)[0], wanted, rtol=1e-6, atol=1e-6)


def test_streams_that_the_disk_has_no_room_for_are_refused(tmp_path):
    full = pytest.raises(CheckpointError, match="stream could not be written: File too large")
    # The stream has 4,608 bytes. A write to a mapped file would end the process.
    with file_limit(4000), full:
        streams_of(tiny("llama"), texts(3), tmp_path)


@pytest.mark.parametrize("name", ["llama", "llama-biases", "phi3"])
def test_the_down_map_minimises_its_objective(name):
    mlp, ridge = gated_mlps(tiny(name))[0], 0.3
    torch.manual_seed(0)
    x, w = torch.randn(60, 16, dtype=torch.float64), torch.rand(60, dtype=torch.float64) + 0.1
    y = mlp.module(x)
    rows = TrainingRows(x, y, w)
    before, bias = mlp.down.weight().clone(), mlp.down.bias()
    fit_mlp(mlp, rows, ridge)
    up, gate = (part.select(part.module(x).T).T for part in (mlp.up, mlp.gate))
    hidden, root = up * gate, w[:, None].sqrt()
    keep = (ridge * (w[:, None] * hidden.square()).sum(0)).sqrt()
    left = torch.cat([hidden * root, torch.diag(keep)])
    right = torch.cat([(y if bias is None else y - bias) * root, (before * keep).T])
    wanted = torch.linalg.lstsq(left, right).solution.T
    torch.testing.assert_close(mlp.down.weight(), wanted, rtol=1e-5, atol=1e-6)
    wrong = (mlp.module(x) - y) * root
    sums = float(wrong.square().sum()), float((y * root).square().sum())
    assert weighted_squares(mlp.module, rows) == pytest.approx(sums)


def test_each_layer_is_fitted_on_what_the_linear_ones_before_it_hand_it(monkeypatch):
    monkeypatch.setattr(module, "RIDGE", torch.inf)
    near = partial(torch.testing.assert_close, rtol=1e-4, atol=1e-4)
    model, dense, ids = tiny("llama"), tiny("llama"), texts(30)
    linearise(model, ids, texts(4, 1), alone=False)
    for layer, mlp in enumerate(gated_mlps(dense)):
        reads, _ = seen(dense, mlp, ids)
        stream = dense.model(ids, output_hidden_states=True).hidden_states[layer]
        weight = stream.flatten(0, 1).square().mean(-1).rsqrt()[:, None]
        u, g = mlp.up.module(reads), mlp.gate.module(reads)
        columns = torch.stack([u * g * weight, u * weight], -1).transpose(0, 1)
        right = (u * functional.silu(g) * weight).T[..., None]
        slope, offset = torch.linalg.lstsq(columns, right).solution[..., 0].T
        gate, weight = gated_mlps(model)[layer].gate, slope[:, None] * mlp.gate.weight()
        near(gate.weight(), weight)
        near(gate.bias(), offset)
        mlp.gate.set_weight(weight)
        mlp.gate.set_bias(offset)
        mlp.module.act_fn = torch.nn.Identity()
    near(log_probabilities(model), log_probabilities(dense))


@pytest.mark.parametrize("name", ["llama", "phi3", "gemma2"])
def test_alone_is_the_loss_with_this_layer_linear_and_all_else_as_it_was(name):
    held = texts(4, 1)
    result = linearise(tiny(name), texts(20), held, [1], budget=0)
    assert result.before == pytest.approx(next_token_loss(tiny(name), held))
    assert list(result.alone) == [1]
    alone = linearise(tiny(name), texts(20), held, [1], alone=False)
    assert alone.alone == {}
    assert alone.layers == (1,)
    assert result.alone[1] == pytest.approx(alone.after)


@pytest.mark.parametrize("name", EACH_GATED)
def test_a_budget_takes_as_many_layers_as_stay_within(name):
    held = texts(4, 1)
    everything = linearise(tiny(name), texts(20), held)
    assert everything.layers == (0, 1)
    costs = sorted(loss - everything.before for loss in everything.alone.values())
    wide = linearise(tiny(name), texts(20), held, budget=10)
    assert wide.layers == (0, 1)
    assert wide.after == pytest.approx(everything.after)
    model, before = tiny(name), tiny(name).state_dict()
    budget = max(0.0, (costs[0] + costs[1]) / 2)
    several = linearise(model, texts(20), held, budget=budget)
    assert several.after <= several.before + budget + 1e-9
    assert next_token_loss(model, held) == pytest.approx(several.after)
    for layer in {0, 1} - set(several.layers):
        for key, weight in model.state_dict().items():
            if f"layers.{layer}.mlp" in key and key in before:
                assert torch.equal(weight, before[key])


def test_distillation_brings_a_layer_nearer_to_what_it_gave():
    model, held = tiny("llama"), texts(4, 1)
    fitted = linearise(tiny("llama"), texts(30), held, [0], alone=False)
    how = Distillation(steps=40, batch_size=100, learning_rate=1e-2)
    learnt = linearise(model, texts(30), held, [0], alone=False, distillation=how)
    assert learnt.fits[0].distance < 0.9 * fitted.fits[0].distance
    assert learnt.fits[0].lines == fitted.fits[0].lines
    assert all(not weight.requires_grad for weight in model.parameters())


def test_bfloat16_weights_are_fitted_in_float32():
    exact, rough = (tiny("llama", dtype=dtype) for dtype in (torch.float32, torch.bfloat16))
    for model in (exact, rough):
        how = Distillation(steps=3, batch_size=32)
        linearise(model, texts(20), texts(4, 1), alone=False, distillation=how)
    assert rough.dtype == torch.bfloat16
    assert (log_probabilities(exact) - log_probabilities(rough).float()).abs().mean() < 0.1


def test_annealing_goes_on_from_the_fit():
    model = tiny("llama")
    linearise(model, texts(20), texts(4, 1), alone=False)
    wanted = log_probabilities(model)
    assert give_swish(model).beta == 0
    torch.testing.assert_close(log_probabilities(model), wanted)
    assert find_swish(model.config) == 0
    make_bilinear(model)
    assert model.config.hidden_act == "linear"
    torch.testing.assert_close(log_probabilities(model), wanted)


def test_a_model_that_was_made_bilinear_before_is_refused():
    model = tiny("llama")
    linearise(model, texts(3), texts(3), [0], alone=False)
    partly = "hidden_act='linear in some layers: bilens.load opens.*' in the model's config"
    with pytest.raises(BilensError, match=partly):
        linearise(model, texts(3), texts(3))
    model = tiny("llama")
    give_swish(model)
    with pytest.raises(BilensError, match="the model is bilinear already, at least in part; expec"):
        linearise(model, texts(3), texts(3))


def test_a_distillation_that_diverges_and_weights_that_are_nan():
    model = tiny("llama", dtype=torch.float32)
    how = Distillation(steps=20, batch_size=32, learning_rate=1e12)
    with pytest.raises(BilensError, match="The (loss|weights) became .* by step .*; lower"):
        linearise(model, texts(3), texts(3), alone=False, distillation=how)
    model.model.norm.weight.data[3] = torch.nan
    with pytest.raises(CheckpointError, match="model.norm.weight holds NaN or infinite values"):
        linearise(model, texts(3), texts(3))
