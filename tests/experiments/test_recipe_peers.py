"""Rules of another package are in force as long as asked, and no longer."""

import pytest
import torch
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.llama import modeling_llama

from bilens.errors import BilensError
from experiments import peers as recipe
from tests.models import random_text

RULES = """
rms_norm_forward = lambda self, x: 2 * x
gated_mlp_forward = lambda self, x: 3 * x
cp_gated_mlp_forward = lambda self, x: 5 * x
wrap_attention_forward = lambda forward: lambda *args, **how: (7 * forward(*args, **how)[0], None)
cp_wrap_attention_forward = wrap_attention_forward
"""


def test_rules_are_in_force_inside_and_gone_after(llama, tmp_path, monkeypatch):
    folder = tmp_path / "lxt" / "efficient"
    folder.mkdir(parents=True)
    (tmp_path / "lxt" / "__init__.py").write_text("")
    (folder / "__init__.py").write_text("raise ImportError('needs an older transformers')")
    (folder / "patches.py").write_text(RULES)
    monkeypatch.syspath_prepend(tmp_path)
    before = llama.logits(random_text()[None])
    layer, x = llama.model.model.layers[0], torch.ones(1, 2, 16, dtype=torch.float64)
    name = llama.model.config._attn_implementation
    attend, plain = ALL_ATTENTION_FUNCTIONS[name], modeling_llama.LlamaMLP.forward
    for cp, factor in ((False, 3), (True, 5)):
        with recipe.lxt_rules(llama, cp):
            assert torch.equal(layer.mlp(x), factor * x)
            assert torch.equal(layer.input_layernorm(x), 2 * x)
            assert ALL_ATTENTION_FUNCTIONS[name] is not attend
        assert ALL_ATTENTION_FUNCTIONS[name] is attend
        assert modeling_llama.LlamaMLP.forward is plain
    torch.testing.assert_close(llama.logits(random_text()[None]), before)


def test_a_missing_package_is_named(llama, monkeypatch):
    monkeypatch.setattr(recipe, "find_spec", lambda _: None)
    with pytest.raises(BilensError, match="lxt is not installed"), recipe.lxt_rules(llama, False):
        pass
