"""Models that compute something else than their weights say are refused, or read exactly."""

import pytest
import torch
from torch import nn
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from bilens.errors import BilensError
from bilens.flows import flow
from bilens.language.contexts import _run_texts
from bilens.testing import sum_of_parts
from bilens.transformer import Pass, ResidualModel
from tests.families import FAMILIES, TIME, family_view, some_text, tiny
from tests.nightly import nightly

SHORT = {"original_max_position_embeddings": 6, "factor": 4.0}
ROTATIONS = {
    "longrope": {**SHORT, "short_factor": [1.0] * 3, "long_factor": [2.0, 5.0, 3.0]},
    "dynamic": {"factor": 4.0},
    "linear": {"factor": 4.0},
    "yarn": {"factor": 4.0},
    "llama3": {**SHORT, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
    "proportional": {"partial_rotary_factor": 0.5},
}
# By the length of a text in every family that transformers lets have it; the other kinds in one.
DAILY = [(kind, "llama") for kind in ROTATIONS]
ROTATING = DAILY + [(kind, name) for kind in ("dynamic", "longrope") for name in FAMILIES]
DAILY += [("dynamic", "neox-no-bias"), ("longrope", "phi3"), ("dynamic", "gemma3")]
ROTATING = [
    (kind, name)
    for kind, name in dict.fromkeys(ROTATING)
    if not name.startswith("gpt2") and (kind, name) != ("dynamic", "phi3")
]


def rotating(kind, name="llama", seed=0):
    """Return a tiny model with a kind of scaled rotary positions, made for texts of 6 tokens."""
    settings = dict(FAMILIES[name][1])
    rope = {"rope_type": kind, "rope_theta": 10_000.0, **ROTATIONS[kind]}
    if kind == "longrope":
        # As many as a head has pairs that are rotated.
        count = 3 if settings.get("head_dim") == 6 else 2
        rope |= {name: rope[name][:count] for name in ("short_factor", "long_factor")}
        settings["original_max_position_embeddings"] = 6
    else:
        settings["max_position_embeddings"] = 6
    if name == "gemma3":
        plain = {"rope_type": "default", "rope_theta": 10_000.0}
        settings["layer_types"] = ["sliding_attention", "full_attention"]
        rope = {"sliding_attention": plain, "full_attention": rope}
    return tiny(name, seed, settings={**settings, "rope_parameters": rope})


def test_every_kind_of_rotary_scaling_is_tested():
    assert set(ROTATIONS) == set(ROPE_INIT_FUNCTIONS)


@pytest.mark.parametrize(("kind", "name"), nightly(ROTATING, DAILY))
def test_texts_of_different_lengths_have_their_own_logits_with_scaled_positions(kind, name):
    text = some_text()[0]
    texts = [text[:4], text, text[2:10]]
    # In both orders: dynamic positions keep the frequencies of the longest text so far, until one
    # is shorter than those of the training.
    view, reverse = ResidualModel(rotating(kind, name)), ResidualModel(rotating(kind, name))
    passes = [Pass.of(view, x) for x in texts] + [Pass.of(reverse, x) for x in texts[::-1]]
    for of_text in passes:
        expected = rotating(kind, name)(of_text.ids, use_cache=False).logits
        torch.testing.assert_close(of_text.logits, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", ROTATIONS)
def test_queries_and_keys_are_those_of_a_text_of_any_length(kind):
    view = ResidualModel(rotating(kind))
    of_text = Pass.of(view, some_text()[0])
    n = of_text.layer(0).attn_n[0]
    rows = [view.queries_keys(0, n[[at]], at, length=TIME)[0] for at in range(TIME)]
    q, k = (torch.cat([row[side] for row in rows]) for side in (0, 1))
    unseen = torch.ones(TIME, TIME, dtype=torch.bool).triu(1)
    score = torch.einsum("thd,shd->hts", q, k).masked_fill(unseen, -torch.inf)
    torch.testing.assert_close(score.softmax(-1), of_text.pattern(0)[0], rtol=1e-4, atol=1e-5)


def doubled(module):
    own = module.forward

    def patched(*args, **kwargs):
        output = own(*args, **kwargs)
        return output * 2 if isinstance(output, torch.Tensor) else output

    return patched


PATCHED = {
    "model.layers.0.self_attn.v_proj": lambda view: view.ov(0),
    "model.layers.0.self_attn.o_proj": lambda view: view.ov(0),
    "model.layers.0": lambda view: view.ov(0),
    "model.embed_tokens": lambda view: view.W_E,
    "lm_head": lambda view: view.W_U,
    "model.norm": lambda view: view.direction(3),
}


@pytest.mark.parametrize("name", PATCHED)
def test_readings_of_weights_refuse_a_patched_forward_pass(name):
    view = family_view("llama")
    module = view.model.get_submodule(name)
    module.forward = doubled(module)
    with pytest.raises(BilensError, match=f"{name} has a forward pass of its own, doubled"):
        PATCHED[name](view)
    del module.forward
    PATCHED[name](view)


def test_readings_of_weights_refuse_hooks_of_all_modules():
    view = ResidualModel(tiny("llama"))
    hook = nn.modules.module.register_module_forward_hook(lambda *_: None)
    with hook, pytest.raises(BilensError, match="All modules has a forward hook"):
        view.W_U  # noqa: B018
    assert view.W_U.isfinite().all()


@pytest.mark.parametrize("name", ["embedding_multiplier", "residual_multiplier"])
def test_a_factor_of_zero_is_zero(name):
    view = family_view("granite", settings={**FAMILIES["granite"][1], name: 0.0})
    of_text = Pass.of(view, some_text()[0])
    torch.testing.assert_close(sum_of_parts(of_text), of_text.logits[0], rtol=1e-4, atol=1e-5)
    settings = {**FAMILIES["cohere2"][1], "logit_scale": 0.0}
    assert not family_view("cohere2", settings=settings).W_U.any()


def test_without_a_tokenizer_the_message_names_a_way_that_works(view):
    view = ResidualModel(view.model)
    with pytest.raises(BilensError, match="write the numbers of tokens, as 5 17 3, or put"):
        flow(view, some_text()[0], "t5")
    flow(view, some_text()[0], view.direction(5))


def test_the_size_of_stored_numbers_is_told():
    assert repr(family_view("llama", dtype=torch.bfloat16)).endswith("tokens, bfloat16)")


@pytest.mark.parametrize("kind", ["longrope", "dynamic"])
def test_contexts_of_different_lengths_are_those_of_each(kind):
    view, text = ResidualModel(rotating(kind)), some_text()[0]
    batches = list(_run_texts(view, [text[:4], text], 0, 8, None))
    for (ids, _, n), expected in zip(batches, (text[:4], text), strict=True):
        assert torch.equal(ids[0], expected)
        alone = Pass.of(view, expected).layer(0).mlp_n[0]
        torch.testing.assert_close(n[0], alone, rtol=1e-4, atol=1e-5)
