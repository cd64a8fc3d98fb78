"""Weight processing: the function stays, whatever the family, the step and the dtype."""

import json
from functools import cache
from itertools import product

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn.utils import parametrizations, prune
from transformers import LlamaForCausalLM

from bilens.convert import open_model, process, save_model
from bilens.errors import BilensError, CheckpointError
from bilens.language import read_stream
from bilens.transformer import ResidualModel
from bilens.transformer.families import find_modules
from bilens.transformer.maps import InputNorm
from tests.families import ALL, DAILY, exact_norms, log_probabilities, tiny
from tests.models import check_same_model, parts, random_model, random_text
from tests.nightly import nightly

STEPS = ["fold_norms", "fold_value_biases", "center_writing_weights", "center_unembed"]
WITH_LAYER_NORM = ["gpt2", "gpt2-untied", "neox", "neox-sequential", "neox-no-bias", "cohere2"]
TOLERANCE = {torch.float64: 1e-6, torch.float32: 5e-5}
"""Between layers transformers rounds to float32, in softmax and rotary positions."""


@pytest.fixture(autouse=True)
def exact():
    """Norms keep the dtype of the model."""
    with exact_norms():
        yield


def difference(a, b):
    return (log_probabilities(a) - log_probabilities(b)).abs().max()


@cache
def allowed(name):
    parts = find_modules(tiny(name))
    with_mean = any(r.norm is None or not r.norm.centres for r in parts.fold_groups())
    refused = (False, parts.partial_values is not None, with_mean, parts.softcap is not None)
    return [step for step, is_refused in zip(STEPS, refused, strict=True) if not is_refused]


# Structures that differ: shared tables, parallel blocks, norms after parts, mixed values.
SOME = ["gpt2", "neox", "gemma3", "own-mixed"]
BY_DAY = [*product(DAILY, [torch.float64]), *product(SOME, [torch.float32])]


@pytest.mark.parametrize(("name", "dtype"), nightly(product(ALL, TOLERANCE), BY_DAY))
def test_processing_changes_no_log_probability(name, dtype):
    model = tiny(name, dtype=dtype).train()
    before = {key: tensor.clone() for key, tensor in model.state_dict().items()}
    settings = json.dumps(model.config.to_dict(), default=str)
    processed, report = process(model)
    assert processed is not model
    assert all(torch.equal(before[key], weight) for key, weight in model.state_dict().items())
    assert json.dumps(model.config.to_dict(), default=str) == settings
    assert all(module.training for module in model.modules())
    assert difference(model.eval(), processed.eval()) < TOLERANCE[dtype]
    assert report.change < TOLERANCE[dtype]
    assert list(report.folded) == allowed(name)
    norms = [reader.norm for reader in find_modules(processed).fold_groups() if reader.norm]
    assert all(norm.is_plain() for norm in norms), "norms only centre and scale"
    check_again(processed, report)


def check_equal(model, other):
    weights = other.state_dict()
    assert all(torch.equal(tensor, weights[key]) for key, tensor in model.state_dict().items())


def check_again(once, first):
    """Process a model a second time, which changes nothing."""
    twice, second = process(once)
    check_equal(once, twice)
    assert not any(second.folded.values())
    assert second.added_biases == ()
    assert second.change == 0
    assert twice.config.bilens_processing == once.config.bilens_processing
    assert once.config.bilens_processing["steps"] == list(first.folded)


@pytest.mark.slow
@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("name", ALL)
def test_each_step_alone_changes_no_log_probability(name, step):
    model = tiny(name)
    if step not in allowed(name):
        with pytest.raises(BilensError, match=f"{step} would change the function of this model"):
            process(model, [step])
        return
    processed, report = process(model, [step])
    assert difference(model, processed) < 1e-6
    assert report.refused == {}
    assert processed.config.bilens_processing["steps"] == [step]


@given(parts=st.fixed_dictionaries(parts), seed=st.integers(0, 99))
def test_own_models_of_all_parts(parts, seed):
    model = random_model(seed, n_layers=2, **parts)
    processed, report = process(model)
    ids = random_text(9, seed)[None]
    before, after = (m(ids).logits.log_softmax(-1) for m in (model, processed))
    assert torch.allclose(before, after, atol=1e-9)
    apart = parts["positions"] == "shortformer" and parts["norm"] != "none"
    assert ("fold_norms" in report.refused) == apart
    partly = parts["attention"] != "softmax" or parts["value_mix"]
    assert ("fold_value_biases" in report.refused) == partly
    assert ("center_unembed" in report.refused) == (parts["logit_cap"] is not None)


def products(parts):
    """Return each head's QK and OV, with a row and a column for biases, by hand."""
    found = []
    for heads in (layer.heads for layer in parts.layers):
        for pair in heads.pairs:
            q, k = (with_bias(part, heads) for part in pair)
            found.append(q @ k.mT)
        out = heads.out.weight().unflatten(1, (heads.n_heads, heads.d_head)).movedim(1, 0)
        found.append(with_bias(heads.value, heads) @ out.mT)
    return found


def with_bias(part, heads):
    bias = part.weight().new_zeros(part.n_out) if part.bias() is None else part.bias()
    both = torch.cat([part.weight(), bias[:, None]], 1)
    return both.unflatten(0, (heads.n_heads, heads.d_head)).mT


@given(
    attention=st.sampled_from(["softmax", "squared", "bilinear", "differential"]),
    positions=st.sampled_from(["learned", "shortformer"]),
    norm=st.sampled_from(["none", "rms", "layer"]),
    bias=st.booleans(),
    seed=st.integers(0, 99),
)
def test_heads_have_the_form_of_their_singular_values(**settings):
    model = random_model(n_layers=2, **settings)
    processed, report = process(model, ["factor_heads"])
    assert (report.added_biases, report.untied, report.refused) == ((), False, {})
    assert difference(model, processed) < 1e-9
    before, after = (find_modules(each) for each in (model, processed))
    for one, other in zip(products(before), products(after), strict=True):
        torch.testing.assert_close(one, other)
    for heads in (layer.heads for layer in after.layers):
        for pair in heads.pairs:
            q, k = (with_bias(part, heads) for part in pair)
            values = torch.linalg.svdvals(q @ k.mT)[:, : heads.d_head]
            torch.testing.assert_close(q.mT @ q, torch.diag_embed(values))
            torch.testing.assert_close(k.mT @ k, torch.diag_embed(values))
    again, second = process(processed, ["factor_heads"])
    assert second.folded == {"factor_heads": []}
    check_equal(processed, again)


def test_shortformer_keeps_the_norms_that_positions_follow():
    model = random_model(3, n_layers=2, norm="layer", positions="shortformer")
    processed, report = process(model, ["fold_norms"])
    assert difference(model, processed) < 1e-9
    assert report.refused["fold_norms"].startswith("2 norms stay: positions are added between")
    before, after = (find_modules(each) for each in (model, processed))
    for old, new in zip(before.layers, after.layers, strict=True):
        assert (new.mlp.norm.is_plain(), old.mlp.norm.is_plain()) == (True, False)
        assert torch.equal(new.heads.norm.gain(), old.heads.norm.gain())
    assert after.norm.is_plain()


@pytest.mark.parametrize("name", WITH_LAYER_NORM)
def test_all_is_centred_behind_layer_norms(name):
    result = find_modules(process(tiny(name))[0])
    reads = [part for reader in result.fold_groups() for part in reader.maps]
    for part in (*reads, *result.tables):
        assert part.weight().mean(1).abs().max() < 1e-12
    for part in (*result.writes, result.unembed):
        assert part.weight().mean(0).abs().max() < 1e-12
        assert part.bias() is None or part.bias().mean().abs() < 1e-12
    values = [layer.heads.value.bias() for layer in result.layers]
    assert all(bias is None or not bias.any() for bias in values)


@pytest.mark.parametrize("name", nightly(ALL, SOME))
def test_a_second_time_changes_nothing_where_rounding_is_coarsest(name):
    check_again(*process(tiny(name, dtype=torch.bfloat16)))


def test_what_stays_is_not_copied():
    model = tiny("llama")
    old, new = (each.model.layers[0].mlp for each in (model, process(model)[0]))
    assert new.down_proj.weight.data_ptr() == old.down_proj.weight.data_ptr()
    assert new.up_proj.weight.data_ptr() != old.up_proj.weight.data_ptr()


def test_in_place_the_model_itself_changes():
    model = tiny("gpt2")
    before = log_probabilities(model)
    processed, report = process(model, in_place=True)
    assert processed is model
    assert report.untied
    assert model.config.tie_word_embeddings is False
    assert torch.allclose(log_probabilities(model), before, atol=1e-9)


def test_modules_in_several_places_are_refused():
    """A folding into a shared module would change its other places."""
    model = tiny("llama")
    model.model.layers[1].self_attn.q_proj = model.model.layers[0].self_attn.q_proj
    before = log_probabilities(model)
    with pytest.raises(BilensError, match=r"q_proj.*: one module stands in several places of the"):
        process(model)
    assert torch.equal(log_probabilities(model), before)


def test_what_changes_the_function_is_refused_and_the_model_stays(monkeypatch):
    """A layer, in a way that no module shows, turns its output around at the second text."""
    model, calls = tiny("llama"), []
    layer = model.model.layers[0]
    weight, forward = layer.mlp.up_proj.weight.clone(), type(layer).forward

    def meddle(self, *args, **options):
        calls.append(self)
        output = forward(self, *args, **options)
        return output if len(calls) <= 2 else -2 * output

    monkeypatch.setattr(type(layer), "forward", meddle)
    with pytest.raises(BilensError, match=r"changed a log-probability by .* it is as it was"):
        process(model)
    assert torch.equal(layer.mlp.up_proj.weight, weight)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_a_wrong_folding_is_refused_in_every_type(name, dtype, monkeypatch):
    """Rounding of stored weights explains a hundredth of a nat, not what five per cent do."""
    folded = InputNorm.folded

    def wrong(self, weight, bias):
        moved, added = folded(self, weight, bias)
        return 1.05 * moved, added

    model = tiny(name, dtype=dtype)
    process(model)
    monkeypatch.setattr(InputNorm, "folded", wrong)
    with pytest.raises(BilensError, match="changed a log-probability by"):
        process(model)


@pytest.mark.parametrize("in_place", [True, False])
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_pruned_and_weight_normed_models_are_refused(family, in_place):
    """Their weights are computed anew at every call, which would undo the folding."""
    name = "model.layers.0.mlp.down_proj" if family == "llama" else "transformer.h.0.mlp.c_fc"
    for change, message in (
        (lambda module: prune.l1_unstructured(module, "weight", 0.3), "has a forward hook, torch"),
        (parametrizations.weight_norm, "ParametrizedLinear|ParametrizedConv1D"),
    ):
        model = tiny(family)
        change(model.get_submodule(name))
        with pytest.raises(BilensError, match=message):
            process(model, in_place=in_place)


def test_steps_are_chosen():
    model = tiny("qwen2")
    with pytest.raises(BilensError, match="center_writing_weights would change the function of th"):
        process(model, ["center_writing_weights"])
    processed, report = process(model, ["fold_norms", "center_unembed"])
    assert list(report.folded) == ["fold_norms", "center_unembed"]
    assert report.loads_in_transformers
    assert report.record()["loads_in_transformers"]
    assert not process(model)[1].loads_in_transformers
    with pytest.raises(BilensError, match=r"steps=\['fold_all'\], expected a list, each one"):
        process(model, ["fold_all"])
    assert difference(model, processed) < 1e-6


def test_the_report_says_what_was_folded_where():
    _, report = process(tiny("qwen2"))
    norm = "model.layers.1.input_layernorm into model.layers.1.self_attn.k_proj"
    assert norm in report.folded["fold_norms"]
    assert report.folded["center_unembed"] == ["lm_head centred"]
    heads = "model.layers.0.self_attn"
    biases = f"bias of values in {heads}.v_proj into {heads}.o_proj"
    assert report.folded["fold_value_biases"][0] == biases
    assert report.added_biases == tuple(f"model.layers.{i}.self_attn.o_proj" for i in range(2))
    cause = f"{heads}.q_proj reads the stream through an RMSNorm, which lets its mean pass"
    assert report.refused["center_writing_weights"] == cause


# Of NeoX, transformers gives the unembedding another name in files.
SAVED = ["gpt2", "neox", "qwen2", "cohere2", "own-layer-bias"]


@pytest.mark.parametrize("name", nightly(ALL, SAVED))
def test_a_processed_model_is_saved_and_opened(name, tmp_path):
    processed, _ = process(tiny(name))
    save_model(tmp_path, processed, None)
    opened = open_model(tmp_path, dtype=torch.float64)
    assert type(opened) is type(processed)
    assert difference(processed, opened) < 1e-9
    check_equal(processed, opened)
    assert opened.config.bilens_processing == processed.config.bilens_processing
    assert not list(tmp_path.glob(".*"))


def test_a_processed_model_is_read_as_before():
    model = random_model(norm="layer", positions="learned", n_layers=2)
    before, after = ResidualModel(model), ResidualModel(process(model)[0])
    n = before.mlp_inputs(1, random_text()[None])[0, 5]
    assert torch.allclose(read_stream(after, random_text(), 5, layer=1).total(), n, atol=1e-9)
    expected = before.mlp(1)(n)
    assert torch.allclose(after.mlp(1)(n), expected - expected.mean())


def test_nan_weights_are_named_and_nothing_changes():
    model = tiny("llama")
    model.model.layers[1].mlp.down_proj.weight[2, 3] = torch.nan
    gain = model.model.norm.weight.clone()
    with pytest.raises(CheckpointError, match="layers.1.mlp.down_proj.weight holds NaN or infini"):
        process(model, in_place=True)
    assert torch.equal(model.model.norm.weight, gain)


def test_plain_transformers_reads_a_model_that_needed_no_bias(tmp_path):
    processed, report = process(tiny("llama-tied", dtype=torch.float32))
    assert report.added_biases == ()
    save_model(tmp_path, processed, None)
    check_same_model(LlamaForCausalLM.from_pretrained(tmp_path).eval(), processed)
