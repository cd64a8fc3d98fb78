"""A language model in TransformerLens and nnsight, if these are installed."""

import re
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer

from tests.families import tiny
from tests.models import VOCAB, random_model, random_text, toy_tokenizer

pytestmark = pytest.mark.long

MODELS = [
    {},
    {"n_layers": 2, "attention": "bilinear", "norm": "layer", "positions": "learned"},
    {"n_layers": 2, "attention": "differential", "norm": "rms", "mlp": "relu", "n_kv_heads": 2},
    {"attention": "squared", "positions": "shortformer", "qk_norm": True, "bias": True},
    {"n_layers": 2, "value_mix": True, "embed_mix": True, "logit_cap": 2.0},
]
LACKS = "TransformerLens is not installed: pip install 'transformer-lens>=4'"
installed = pytest.mark.skipif(find_spec("transformer_lens") is None, reason=LACKS)


def booted(*tokenizer, **parts):
    from experiments.lens import to_transformer_lens  # noqa: PLC0415

    return to_transformer_lens(random_model(**parts), *tokenizer)


@installed
@pytest.mark.parametrize("parts", MODELS, ids=str)
def test_the_logits_stay(parts):
    ids = random_text()[None]
    expected = random_model(**parts)(ids).logits
    assert torch.allclose(booted(**parts)(ids), expected, rtol=0, atol=1e-12)


@installed
@pytest.mark.parametrize("parts", MODELS, ids=str)
def test_the_hooks_see_what_flows(parts):
    ids, model, bridge = random_text()[None], random_model(**parts), booted(**parts)
    _, cache = bridge.run_with_cache(ids)
    seen = {}
    for name in ("blocks.0", "blocks.0.mlp.out", "unembed"):
        model.get_submodule(name).register_forward_hook(
            lambda _, args, y, name=name: seen.update({name: (args[0], y)})
        )
    model(ids)
    assert torch.allclose(cache["blocks.0.hook_resid_pre"], seen["blocks.0"][0])
    assert torch.allclose(cache["blocks.0.hook_resid_post"], seen["blocks.0"][1])
    assert torch.allclose(cache["blocks.0.mlp.hook_post"], seen["blocks.0.mlp.out"][0])
    assert torch.allclose(cache["unembed.hook_out"], seen["unembed"][1])
    assert cache["blocks.0.attn.hook_z"].shape == (1, 9, 4, 4)
    if parts.get("attention") in ("bilinear", "differential"):
        assert cache["blocks.0.attn.q2.hook_out"].shape == (1, 9, 16)


@installed
def test_the_weights_have_their_names():
    model, bridge = random_model(), booted()
    attention, layer = bridge.blocks[0].attn, bridge.blocks[0].mlp
    assert torch.equal(attention.W_Q, model.blocks[0].attn.W_Q)
    assert torch.equal(attention.W_O, model.blocks[0].attn.W_O)
    assert torch.equal(layer.W_in, model.mlp(0).W_L.T)
    assert torch.equal(layer.W_gate, model.mlp(0).W_R.T)
    assert torch.equal(bridge.W_E, model.W_E)
    assert torch.equal(bridge.W_U, model.W_U)
    assert bridge.cfg.d_vocab == VOCAB


@installed
@pytest.mark.parametrize("parts", MODELS[:2], ids=str)
def test_a_hook_that_changes_something(parts):
    """Without its last head's values, a model is one whose head writes nothing."""
    ids, model = random_text()[None], random_model(**parts)
    for block in model.blocks:
        block.attn.out.weight[:, -4:] = 0

    def without(z, hook):
        z[:, :, -1] = 0
        return z

    hooks = [(f"blocks.{layer}.attn.hook_z", without) for layer in range(len(model.blocks))]
    changed = booted(**parts).run_with_hooks(ids, fwd_hooks=hooks)
    assert torch.allclose(changed, model(ids).logits, rtol=0, atol=1e-12)


@installed
def test_prompts_as_text(tmp_path):
    toy_tokenizer().save_pretrained(tmp_path)
    bridge = booted(AutoTokenizer.from_pretrained(tmp_path))
    ids = bridge.to_tokens("t3")
    assert ids[0, -1] == 3
    torch.testing.assert_close(bridge("t3"), bridge(ids))


def test_the_modules_have_the_names_that_the_docs_say():
    page = (Path(__file__).parents[2] / "docs" / "howto" / "lens.md").read_text()
    rows = re.findall(r"^\| (`.*?) \| (.*?) ?\| .* \|$", page, re.MULTILINE)
    own = [random_model(**parts, d_hidden=20) for parts in MODELS]
    for column, models in zip(zip(*rows, strict=True), (own, [tiny("llama")]), strict=True):
        modules = {name for model in models for name, _ in model.named_modules()}
        endings = {f".{name.rpartition('.')[2]}" for name in modules}
        named = re.findall(r"`([\w.]+)`", " ".join(column))
        assert len(named) > 12
        assert not [name for name in named if name not in modules and name not in endings]


def test_nnsight_traces_them():
    nnsight = pytest.importorskip("nnsight", reason="pip install nnsight")
    ids, model, traced = random_text()[None], random_model(), nnsight.NNsight(random_model())
    with traced.trace(ids):
        left = traced.blocks[0].mlp.left.output.save()
        logits = traced.output.logits.save()
    assert left.shape == (1, 9, 20)
    torch.testing.assert_close(logits, model(ids).logits)
