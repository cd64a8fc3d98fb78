"""Mixtures of experts: hidden units of all experts, with the weights of the router on a text."""

from contextlib import ExitStack
from functools import partial

import pytest
import torch
from experiments.families import make, texts

from bilens.convert import process
from bilens.errors import BilensError
from bilens.read.flow import flow, measure, remove
from bilens.read.flow.nodes import LEAVES
from bilens.residual import Pass, ResidualModel
from bilens.residual.layers import MLP
from bilens.testing import check_family
from tests.families import MIXTURES, tiny
from tests.models import toy_tokenizer
from tests.nightly import nightly

TEXT = torch.tensor([3, 14, 15, 9, 26, 5, 3])


@pytest.mark.parametrize("name", nightly(MIXTURES, ("mixtral", "qwen3-dense")))
def test_every_part_is_that_of_the_model(name):
    check_family(tiny(name))


def test_the_usual_types_and_products_of_groups():
    settings = {**MIXTURES["mixtral"][1], "experts_implementation": "grouped_mm"}
    check_family(tiny("mixtral", dtype=torch.float32, settings=settings), rounding=1e-4)


def test_a_router_that_is_ignored_is_noticed(monkeypatch):
    model = tiny("mixtral")
    monkeypatch.setattr(MLP, "routing", lambda mlp, _: torch.ones(1, mlp.up.n_out))
    with pytest.raises(BilensError, match="the parts of an MLP but computes something else"):
        check_family(model)
    monkeypatch.setattr(MLP, "check", lambda _: None)
    with pytest.raises(BilensError, match="not read exactly"):
        check_family(model)


@pytest.mark.parametrize("name", ["mixtral", "qwen3-experts"])
def test_experts_add_up_to_the_mlp(name):
    view = ResidualModel(tiny(name))
    layer, mlp = Pass.of(view, TEXT).layer(1), view.layer(1).mlp
    size = mlp.up.n_out // 4
    total = torch.zeros_like(layer.mlp_n)
    for number in range(4):
        tensor, units = mlp.expert(number), slice(number * size, (number + 1) * size)
        hidden = (layer.mlp_n @ tensor.left.T) * (layer.mlp_n @ tensor.right.T)
        total += hidden * layer.gate_ratio[..., units] @ tensor.out.T
    torch.testing.assert_close(total, mlp.stream_output(layer.mlp_input))
    runs = (layer.routing[0].unflatten(1, (4, size))[..., 0] != 0).sum(1)
    assert runs.tolist() == [2] * len(TEXT)
    with pytest.raises(BilensError, match="number=4, expected 0 to 3, an expert of the layer"):
        mlp.expert(4)


def test_flows_add_up_and_the_change_of_routing_is_a_choice():
    view = ResidualModel(tiny("mixtral"))
    on_text = flow(view, TEXT, view.direction(3, 4))
    between = flow(view, TEXT, view.direction(3, 4), against=TEXT.flip(0))
    assert not on_text.choices.any()
    assert between.choices.any()
    for result in (on_text, between):
        leaves = sum(node.flow for node in result.nodes if node.kind in LEAVES)
        assert leaves == pytest.approx(result.value, rel=1e-5)


def chosen_weights(gate, logits, places):
    """Return the weights that a router gives to places of its experts, by its equations."""
    if type(gate).__name__ == "MixtralTopKRouter":
        weights = logits.float().softmax(-1).gather(1, places)
        return weights / weights.sum(-1, keepdim=True)
    weights = logits.sigmoid().gather(1, places)
    return weights / (weights.sum(-1, keepdim=True) + 1e-20) * gate.routed_scaling_factor


def number_with_choices(model, ids, chosen):
    """Return a difference of logits of a text, with given places of the experts of routers."""

    def choose(gate, _, output):
        weights = chosen_weights(gate, output[0], chosen[gate])
        return output[0], weights.to(output[1]), chosen[gate]

    with ExitStack() as hooks:
        for gate in chosen:
            hooks.enter_context(gate.register_forward_hook(choose))
        logits = model(ids[None], use_cache=False).logits[0, -1]
    return float(logits[5] - logits[6])


@pytest.mark.parametrize("kind", ["mixtral", "deepseek_v3"])
def test_choices_are_exchanged_as_in_own_passes(kind):
    model = make(kind).requires_grad_(False)
    view, ids = ResidualModel(model, toy_tokenizer()), [x % 30 for x in texts()]
    split = flow(view, ids[0], "t5", minus="t6", against=ids[1], ablate=0)
    nodes = [node for node in split.nodes if node.kind == "choice"]
    assert nodes
    gates = [view.places.layers[node.layer].module.mlp.gate for node in nodes]
    chosen = []
    for text in ids:
        with ExitStack() as hooks:
            noted = {}
            for gate in gates:
                note = partial(noted.__setitem__, gate)
                hook = gate.register_forward_hook(lambda *call, note=note: note(call[-1][2]))
                hooks.enter_context(hook)
            model(text[None], use_cache=False)
        chosen.append(noted)

    def by_hand(some):
        first, second = (
            number_with_choices(model, text, {gate: of_other[gate] for gate in some})
            for text, of_other in zip(ids, reversed(chosen), strict=True)
        )
        own = [number_with_choices(model, text, {}) for text in ids]
        return (first - own[0] + own[1] - second) / 2

    for node, gate, effect in zip(nodes, gates, measure(view, split, nodes), strict=True):
        assert effect.actual == pytest.approx(by_hand([gate]), rel=1e-3, abs=1e-7)
        assert abs(effect.actual) > 1e-5
        assert effect.part == f"choice.{node.layer}"
    together = remove(view, split, nodes)
    assert together.actual == pytest.approx(by_hand(gates), rel=1e-3, abs=1e-7)
    with pytest.raises(BilensError, match="scale=0.5 of a choice, which is exchanged as a whole"):
        measure(view, split, nodes, scale=0.5)


def test_processing_folds_the_norm_into_experts_and_router():
    model, report = process(tiny("mixtral"))
    assert not report.refused or "fold_norms" not in report.refused
    layer = model.model.layers[0]
    assert torch.equal(layer.post_attention_layernorm.weight, torch.ones(16).double())
    assert not torch.equal(layer.mlp.gate.weight, tiny("mixtral").model.layers[0].mlp.gate.weight)


def test_dense_mlps_have_no_experts():
    view = ResidualModel(tiny("qwen3-dense"))
    assert [layer.mlp.router is None for layer in view.modules.layers] == [True, False, True]
    with pytest.raises(BilensError, match="layers.0.mlp has no experts"):
        view.layer(0).mlp.expert(0)
