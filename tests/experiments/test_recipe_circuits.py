"""Circuits are those that their definition names."""

import numpy as np
import pytest
import torch
from experiments.gim import flat_softmax, gim_rules

from bilens.transformer import ResidualModel
from experiments import circuits as recipe
from tests.families import tiny
from tests.models import random_text, toy_tokenizer


@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_gim_leaves_the_forward_pass_and_shares_gradients(name):
    model = tiny(name)
    ids, x = random_text(seed=1)[None], torch.randn(2, 3, model.config.hidden_size).to(model.dtype)
    layer, logits = model.model.layers[0], model(ids).logits
    slopes = {"mlp": _slope(layer.mlp, x), "norm": _slope(layer.input_layernorm, x)}
    with gim_rules(ResidualModel(model, toy_tokenizer())):
        torch.testing.assert_close(model(ids).logits, logits, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(_slope(layer.mlp, x), slopes["mlp"] / 2)
        fixed = _slope(layer.input_layernorm, x)
    # Without the scale, a norm multiplies each number.
    torch.testing.assert_close(fixed, layer.input_layernorm(x) / x)
    assert not torch.allclose(fixed, slopes["norm"])
    torch.testing.assert_close(_slope(layer.mlp, x), slopes["mlp"])


def _slope(module, x):
    with torch.enable_grad():
        given = x.clone().requires_grad_()
        return torch.autograd.grad(module(given).sum(), given)[0]


def test_a_flat_softmax_has_the_gradient_of_a_higher_temperature():
    scores = torch.randn(3, 5, generator=torch.Generator().manual_seed(0)).double()
    given = [scores.clone().requires_grad_() for _ in range(2)]
    weights = torch.arange(15.0).reshape(3, 5).double().cos()
    with torch.enable_grad():
        (flat_softmax(given[0]) * weights).sum().backward()
        (2 * (given[1] / 2).softmax(-1) * weights).sum().backward()
    torch.testing.assert_close(flat_softmax(scores), scores.softmax(-1))
    torch.testing.assert_close(given[0].grad, given[1].grad)


def test_elimination_ranks_the_parts_that_add_up_by_what_they_add():
    class Added:
        """f is a sum of what each part adds, less than nothing for some."""

        shape = (2, 3)
        adds = torch.tensor([[0.1, -0.6, 0.5], [0.3, 0.0, 0.7]]).double()
        everything = torch.ones(2, 3, dtype=torch.bool)

        def scores(self, mask):
            return self.adds

    order = [(-recipe.eliminated(Added(), absolute=a)).flatten().argsort() for a in (False, True)]
    assert order[0].tolist() == [5, 2, 3, 0, 4, 1]
    assert order[1].tolist() == [5, 1, 2, 3, 0, 4]
    assert recipe.largest(Added.adds, 2).nonzero().tolist() == [[0, 2], [1, 2]]


def test_areas_are_trapezoids():
    straight = np.array(recipe.SHARES)
    assert recipe.areas(straight)["CPR"] == pytest.approx((1 - 1e-6) / 2)
    assert recipe.areas(straight)["CMD"] == pytest.approx((1 - 1e-3) ** 2 / 2)
    assert recipe.areas(np.ones(10))["CMD"] == 0


def test_the_measure_of_a_model_that_only_adds_is_known():
    # f is 0.5 at half of the nodes by one attribution, and 1 by the other.
    nothing, half, whole = [[0.0] * 2] * 9, [[0.0] * 2] * 8 + [[1.0, 3.0]], [[1.0, 3.0]] * 9
    rises = {"good": [half, whole], **dict.fromkeys(("bad", recipe.BASELINE), (nothing, nothing))}
    numbers = recipe.summary({"changes": [1.0, 3.0], "rises": rises})
    assert numbers["good"]["CPR"]["value"] == pytest.approx(0.3 / 2 + 0.5)
    assert numbers["bad"]["CPR"]["value"] == pytest.approx(0.5 / 2)
    assert numbers["good"]["CMD"]["value"] == 0
    assert numbers["bad"]["CMD"]["value"] == pytest.approx(0.5 - 0.001 + 0.25)
    difference = numbers["good"][f"CMD minus that of {recipe.BASELINE}"]
    assert difference["value"] == pytest.approx(-numbers["bad"]["CMD"]["value"])
    assert difference["low"] == difference["high"] == difference["value"]
    assert numbers["bad"]["CMD"]["low"] == numbers["bad"]["CMD"]["high"]


def test_a_circuit_is_a_graph_as_mib_reads_it(llama):
    ranks = torch.arange(llama.n_layers * (llama.n_heads + 1)).reshape(llama.n_layers, -1)
    graph = recipe.mib_graph(llama, ["head.0.1", "mlp.1"], ranks)
    assert graph["cfg"]["n_heads"] == llama.n_heads
    nodes = graph["nodes"]
    kept = {name for name, node in nodes.items() if node["in_graph"]}
    assert kept == {"input", "a0.h1", "m1", "logits"}
    assert nodes["a0.h1"]["score"] == 1
    assert nodes["m1"]["score"] == ranks[1, -1]
