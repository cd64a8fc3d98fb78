"""Every attention of a language model in bfloat16, under autocast and with its weights in it."""

from itertools import product
from typing import get_args

import pytest
import torch

from bilens.nn.language import LanguageModel
from bilens.nn.settings import ATTENTIONS, PositionName
from tests.kernels.inputs import cases
from tests.models import small_config


def language_model(attention, positions="rotary", *, mixes=False):
    torch.manual_seed(0)
    sizes = {"d_model": 32, "n_layers": 2, "n_heads": 4, "n_kv_heads": 2, "n_ctx": 16}
    parts = dict.fromkeys(("qk_norm", "value_mix", "embed_mix"), mixes)
    config = small_config(norm="rms", attention=attention, positions=positions, **sizes, **parts)
    return LanguageModel(config), torch.randint(20, (2, 12))


def results(model, ids):
    """Logits and gradients, and the logits of the last token when it follows the others."""
    model.zero_grad()
    result = model(ids, labels=ids)
    result.loss.backward()
    with torch.no_grad():
        cache = model(ids[:, :-1], use_cache=True).past_key_values
        last = model(ids[:, -1:], past_key_values=cache).logits
    gradients = torch.cat([weight.grad.flatten() for weight in model.parameters()])
    return [x.detach().double() for x in (result.logits, gradients, last)]


POSITIONS = get_args(PositionName)
DAILY = [(name, POSITIONS[i % 4], i % 2 == 0) for i, name in enumerate(ATTENTIONS)]


@cases("attention positions mixes", product(ATTENTIONS, POSITIONS, [False, True]), DAILY)
def test_models_in_bfloat16_are_nearly_those_in_float32(attention, positions, mixes):
    model, ids = language_model(attention, positions, mixes=mixes)
    exact = results(model, ids)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        mixed = results(model, ids)
    rounded = results(model.bfloat16(), ids)
    for result in (mixed, rounded):
        for a, b in zip(result, exact, strict=True):
            assert (a - b).norm() < 0.03 * b.norm()


@pytest.mark.parametrize("attention", ATTENTIONS)
def test_patterns_of_weights_in_bfloat16(attention):
    model, ids = language_model(attention)

    def pattern():
        x, pos_embed, rope = model.embed_text(ids, torch.arange(ids.shape[1])[None])
        return model.blocks[0].attn.attention_pattern(x, pos_embed, rope).detach()

    exact = pattern()
    model.bfloat16()
    assert (pattern() - exact).norm() < 0.03 * exact.norm()
