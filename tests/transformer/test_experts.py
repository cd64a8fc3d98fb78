"""Mixtures of experts: hidden units of all experts, with the weights of the router on a text.

An expert is a part of its MLP: shown, removed and exchanged as by own hooks.
"""

from contextlib import ExitStack
from functools import partial

import pytest
import torch
from experiments.families import make, texts

from bilens.circuits import patched
from bilens.convert import process
from bilens.errors import BilensError
from bilens.flows import flow, measure, remove
from bilens.testing import check_family
from bilens.transformer import Pass, ResidualModel
from bilens.transformer.layers import MLP
from bilens.transformer.parts import Part
from tests.families import MIXTURES, family_view, tiny
from tests.flows.flows import leaves
from tests.models import TOKENS
from tests.nightly import nightly

TEXT = torch.tensor([3, 14, 15, 9, 26, 5, 3])
TEXTS = torch.stack([TEXT, torch.tensor([3, 14, 7, 9, 2, 5, 3])])


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


def test_flows_add_up_and_the_change_of_routing_is_a_choice():
    view = ResidualModel(tiny("mixtral"))
    result = flow(view, TEXT, view.direction(3, 4), against=TEXT.flip(0))
    assert result.choices.any()
    assert leaves(result) == pytest.approx(result.value, rel=1e-5)


def number_with_hooks(model, ids, hooks=()):
    """Return a difference of logits of a text, with hooks after modules."""
    with ExitStack() as registered:
        for module, hook in hooks:
            registered.enter_context(module.register_forward_hook(hook))
        logits = model(ids[None], use_cache=False).logits[0, -1]
    return float(logits[5] - logits[6])


@pytest.mark.parametrize("kind", ["mixtral", "deepseek_v3"])
def test_choices_are_in_the_flow_and_are_not_exchanged(kind):
    view, ids = ResidualModel(make(kind).requires_grad_(False), TOKENS), [x % 30 for x in texts()]
    split = flow(view, ids[0], "t5", minus="t6", against=ids[1], labels=0)
    node = next(node for node in split.nodes if node.kind == "choice")
    for call in (measure, remove):
        with pytest.raises(BilensError, match=rf"choice\.{node.layer} is no part"):
            call(view, split, [node])
    with (
        pytest.raises(BilensError, match=r"'choice\.0' is no address"),
        patched(view, ["choice.0"], "t3 t4"),
    ):
        pass


def test_processing_folds_the_norm_into_experts_and_router():
    model, report = process(tiny("mixtral"))
    assert not report.refused or "fold_norms" not in report.refused
    layer = model.model.layers[0]
    assert torch.equal(layer.post_attention_layernorm.weight, torch.ones(16).double())
    assert not torch.equal(layer.mlp.gate.weight, tiny("mixtral").model.layers[0].mlp.gate.weight)


def test_dense_mlps_have_no_experts():
    view = ResidualModel(tiny("qwen3-dense"))
    assert [layer.mlp.router is None for layer in view.modules.layers] == [True, False, True]


def term(experts, args, number):
    """Return weight times output of an expert by its equations, from the arguments of a call."""
    x, index, weights = args
    gate, up = (x @ experts.gate_up_proj[number].T).chunk(2, -1)
    output = (experts.act_fn(gate) * up) @ experts.down_proj[number].T
    return ((index == number) * weights).sum(-1, keepdim=True) * output


def on_experts(model, places, hook):
    """Return the experts at places, a layer and a number each, and the hook for them."""
    return [(model.model.layers[x[0]].mlp.experts, partial(hook, place=x)) for x in places]


def noted(model, ids, places):
    """Return the terms of experts in a run of the model, by layer and number."""
    terms = {}

    def note(experts, args, _, place):
        terms[place] = term(experts, args, place[1])

    number_with_hooks(model, ids, on_experts(model, places, note))
    return terms


def number_with(model, ids, given):
    """Return a difference of logits in a run in which experts have given terms at positions."""

    def exchange(experts, args, output, place):
        own, output = term(experts, args, place[1]), output.clone()
        for position, row in given[place].items():
            output[position] += row - own[position]
        return output

    return number_with_hooks(model, ids, on_experts(model, given, exchange))


def by_hand(model, nodes, texts):
    places = {(node.layer, node.number) for node in nodes}
    terms = [noted(model, ids, places) for ids in texts]
    changes = []
    for i, ids in enumerate(texts):
        given = {place: {} for place in places}
        for node in nodes:
            place = node.layer, node.number
            other = terms[1 - i][place][node.position] if len(texts) > 1 else 0
            given[place][node.position] = other
        change = number_with(model, ids, given) - number_with_hooks(model, ids)
        changes.append((-1) ** i * change)
    return sum(changes) / len(changes)


@pytest.mark.parametrize("name", ["mixtral", "qwen3-experts"])
def test_experts_are_removed_as_by_own_hooks(name):
    view, texts = family_view(name), TEXTS
    model = view.model
    split = flow(view, texts[0], "t5", minus="t6", against=texts[1], labels=0)
    nodes = [node for layer in range(3) for node in split.experts(layer, 4)[:2]]
    for node, effect in zip(nodes, measure(view, split, nodes), strict=True):
        assert effect.actual == pytest.approx(by_hand(model, [node], texts), rel=1e-3, abs=1e-7)
        assert effect.part.startswith(f"expert.{node.layer}.{node.number}@4")
    together = remove(view, split, nodes)
    assert together.actual == pytest.approx(by_hand(model, nodes, texts), rel=1e-3)
    assert abs(together.actual - sum(x.actual for x in measure(view, split, nodes))) > 1e-6


def test_flows_of_experts_add_up_to_that_of_their_mlp():
    view = family_view("mixtral")
    split = flow(view, TEXTS[0], "t5", against=TEXTS[1], labels=0)
    for layer in range(3):
        for position in (2, 6):
            total = sum(node.flow for node in split.experts(layer, position))
            assert total == pytest.approx(float(split.mlps[layer, position]), rel=1e-6, abs=1e-12)
    # The last layer's experts at the last position are read by the logit alone.
    graph = split.graph(split.experts(2, 6))
    flows = torch.tensor([node.flow for node in graph.nodes[1:]]).to(graph.edges)
    torch.testing.assert_close(graph.edges[0, 1:], flows)


def test_experts_are_patched_by_their_addresses():
    view = family_view("mixtral")
    model = view.model

    def number(*addresses):
        with patched(view, addresses, TEXTS[1]):
            return number_with_hooks(model, TEXTS[0])

    terms = noted(model, TEXTS[1], [(1, 2)])
    expected = number_with(model, TEXTS[0], {(1, 2): dict(enumerate(terms[1, 2]))})
    assert number("expert.1.2") == pytest.approx(expected)
    assert expected != pytest.approx(number_with_hooks(model, TEXTS[0]))


def test_addresses_of_experts():
    view = ResidualModel(tiny("qwen3-dense"))
    for address in ("expert.1.3", "expert.1.0@4"):
        assert str(Part.parse(address, view)) == address
