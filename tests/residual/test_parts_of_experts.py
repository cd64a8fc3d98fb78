"""An expert is a part of its MLP: shown, removed and exchanged as by own hooks."""

from contextlib import ExitStack
from functools import partial

import pytest
import torch

from bilens.errors import BilensError
from bilens.read.flow import flow, measure, open_part, patched, remove
from bilens.residual import ResidualModel
from bilens.residual.changes import Part
from tests.families import family_view, tiny
from tests.models import toy_tokenizer
from tests.residual.test_experts import number_with_choices

TEXTS = torch.tensor([[3, 14, 15, 9, 26, 5, 3], [3, 14, 7, 9, 2, 5, 3]])


def term(experts, args, number):
    """Return weight times output of an expert by its equations, from the arguments of a call."""
    x, index, weights = args
    gate, up = (x @ experts.gate_up_proj[number].T).chunk(2, -1)
    output = (experts.act_fn(gate) * up) @ experts.down_proj[number].T
    return ((index == number) * weights).sum(-1, keepdim=True) * output


def noted(model, ids, places):
    """Return the terms of experts in a run of the model, by layer and number."""
    terms = {}
    with ExitStack() as hooks:
        for layer, number in places:
            experts = model.model.layers[layer].mlp.experts

            def note(module, args, place=(layer, number)):
                terms[place] = term(module, args, place[1])

            hooks.enter_context(experts.register_forward_pre_hook(note))
        model(ids[None], use_cache=False)
    return terms


def number_with(model, ids, given):
    """Return a difference of logits in a run in which experts have given terms at positions."""
    with ExitStack() as hooks:
        for (layer, number), rows in given.items():
            experts = model.model.layers[layer].mlp.experts

            def exchange(module, args, output, number=number, rows=rows):
                own = term(module, args, number)
                output = output.clone()
                for position, row in rows.items():
                    output[position] += row - own[position]
                return output

            hooks.enter_context(experts.register_forward_hook(exchange))
        logits = model(ids[None], use_cache=False).logits[0, -1]
    return float(logits[5] - logits[6])


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
        change = number_with(model, ids, given) - number_with(model, ids, {})
        changes.append((-1) ** i * change)
    return sum(changes) / len(changes)


@pytest.mark.parametrize("two_texts", [True, False])
@pytest.mark.parametrize("name", ["mixtral", "qwen3-experts"])
def test_experts_are_removed_as_by_own_hooks(name, two_texts):
    model = tiny(name)
    view, texts = ResidualModel(model, toy_tokenizer()), TEXTS[: 1 + two_texts]
    against = texts[1] if two_texts else None
    split = flow(view, texts[0], "t5", minus="t6", against=against, ablate=0)
    nodes = [node for layer in range(3) for node in split.experts(layer, 4)[:2]]
    for node, effect in zip(nodes, measure(view, split, nodes), strict=True):
        assert effect.actual == pytest.approx(by_hand(model, [node], texts), rel=1e-3, abs=1e-7)
        assert effect.part.startswith(f"expert.{node.layer}.{node.number}@4")
    together = remove(view, split, nodes)
    assert together.actual == pytest.approx(by_hand(model, nodes, texts), rel=1e-3)
    assert abs(together.actual - sum(x.actual for x in measure(view, split, nodes))) > 1e-6


@pytest.mark.parametrize("two_texts", [True, False])
def test_flows_of_experts_add_up_to_that_of_their_mlp(two_texts):
    view = family_view("mixtral")
    split = flow(view, TEXTS[0], "t5", against=TEXTS[1] if two_texts else None, ablate=0)
    for layer in range(3):
        for position in (2, 6):
            experts = split.experts(layer, position)
            total = sum(node.flow for node in experts)
            assert total == pytest.approx(float(split.mlps[layer, position]), rel=1e-6, abs=1e-12)
    # The last layer's experts at the last position are read by the logit alone.
    last = split.experts(2, 6)
    graph = split.graph(last)
    flows = torch.tensor([node.flow for node in graph.nodes[1:]]).to(graph.edges)
    torch.testing.assert_close(graph.edges[0, 1:], flows)


def test_an_mlp_is_opened_to_its_experts():
    view = family_view("mixtral")
    split = flow(view, TEXTS[0], "t5", minus="t6", against=TEXTS[1], ablate=0)
    opened, nodes = open_part(view, split, "mlp.1@4"), split.experts(1, 4)
    frame = opened.frame()
    assert frame["expert"].tolist() == [node.number for node in nodes]
    assert frame["flow"].sum() == pytest.approx(opened.flow)
    effects = [-effect.actual for effect in measure(view, split, nodes)]
    assert frame["measured effect"].tolist() == pytest.approx(effects)
    with pytest.raises(BilensError, match="expected a head or an MLP; an MLP shows its experts"):
        open_part(view, split, "expert.1.0@4")


def test_experts_and_choices_are_patched_by_their_addresses():
    model = tiny("mixtral")
    view = ResidualModel(model, toy_tokenizer())
    terms = noted(model, TEXTS[1], [(1, 2)])
    given = {(1, 2): dict(enumerate(terms[1, 2]))}
    with patched(view, ["expert.1.2"], TEXTS[1]):
        logits = view.model(TEXTS[:1], use_cache=False).logits[0, -1]
    number = number_with(model, TEXTS[0], given)
    with patched(view, ["choice.0", "choice.1", "choice.2"], TEXTS[1]):
        exchanged = view.model(TEXTS[:1], use_cache=False).logits[0, -1]
    chosen = {}
    for text in TEXTS:
        with ExitStack() as hooks:
            for layer in model.model.layers:
                note = partial(chosen.__setitem__, layer.mlp.gate)
                hook = layer.mlp.gate.register_forward_hook(lambda *x, note=note: note(x[-1][2]))
                hooks.enter_context(hook)
            model(text[None], use_cache=False)
    expected = number_with_choices(model, TEXTS[0], chosen)
    assert float(exchanged[5] - exchanged[6]) == pytest.approx(expected, abs=1e-7)
    assert expected != pytest.approx(number_with_choices(model, TEXTS[0], {}), abs=3e-6)
    assert float(logits[5] - logits[6]) == pytest.approx(number)
    assert number != pytest.approx(number_with(model, TEXTS[0], {}))


def test_addresses_of_experts():
    view = ResidualModel(tiny("qwen3-dense"))
    for address in ("expert.1.3", "expert.1.0@4", "choice.1"):
        assert str(Part.parse(address, view)) == address
    for address in ("expert.1.4", "expert.0.0", "expert.3.0", "expert.1", "choice.1@2"):
        with pytest.raises(BilensError, match=f"'{address}' is n"):
            Part.parse(address, view)
    split = flow(view, TEXTS[0], view.direction(5), ablate=0)
    with pytest.raises(BilensError, match="layer=0 has no experts"):
        split.experts(0, 2)
