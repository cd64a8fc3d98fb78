"""Effects of single nodes: exact in linear models, and first-order ones are gradients."""

import sys

import pytest
import torch

from bilens.errors import BilensError
from bilens.read.flow import account, flow, measure, patch, remove
from bilens.read.flow.account import estimates
from bilens.read.language import TokenDirection
from bilens.residual import ResidualModel
from tests.families import exact_norms, some_text, tiny
from tests.language import random_model, random_text, toy_tokenizer

DIRECTION = TokenDirection("t3", ("t7", "t8"))
TWO = random_text(seed=1), random_text(seed=2)
FEW = ["gpt2", "llama-biases", "gemma2", "granite", "olmo2", "cohere2", "neox"]


def between(view, **options):
    return flow(view, TWO[0], DIRECTION, against=TWO[1], threshold=0, **options)


def test_nodes_that_only_the_unembedding_reads_have_their_flow():
    view = ResidualModel(random_model(n_layers=2, norm="none"), toy_tokenizer())
    outcome = between(view)
    last = [i for i, n in enumerate(outcome.nodes) if n.kind == "direction" and n.layer == 1]
    last = [i for i in last if outcome.nodes[i].position == len(TWO[0]) - 1]
    results = measure(view, outcome, last, batch_size=3)
    assert results
    for i, result in zip(last, results, strict=True):
        assert result.predicted == -outcome.nodes[i].flow
        assert result.actual == pytest.approx(result.predicted, abs=1e-12)
        assert float(estimates(view, outcome)[i]) == pytest.approx(outcome.nodes[i].flow)


@pytest.mark.parametrize("name", FEW)
def test_all_tokens_at_once_turn_one_text_into_the_other(name):
    """Exchanging every token's change is the whole change, in both directions."""
    view, (first, second) = ResidualModel(tiny(name), toy_tokenizer()), some_text()[:2]
    second = torch.cat([first[:5], second[5:6], first[6:]])
    with exact_norms():
        flows = flow(view, first, DIRECTION, against=second)
        (changed,) = [i for i, n in enumerate(flows.nodes) if n.kind == "token" and n.position == 5]
        (result,) = measure(view, flows, [changed])
    assert result.actual == pytest.approx(-flows.value, rel=1e-5)


@pytest.mark.parametrize("name", FEW)
def test_a_head_of_one_position_has_the_effect_of_its_patch(name):
    """All nodes of a head together write its change if no norm follows the heads."""
    view, (first, second) = ResidualModel(tiny(name), toy_tokenizer()), some_text()[:2]
    if view.layer(0).heads.out_norm is not None:
        pytest.skip("a norm after the heads mixes them")
    with exact_norms():
        flows = flow(view, first, DIRECTION, position=0, against=second, threshold=0)
        patched = patch(view, first, DIRECTION, position=0, against=second)
        for head in range(view.n_heads):
            nodes = [
                i
                for i, n in enumerate(flows.nodes)
                if (n.kind, n.layer, n.number) == ("head", 1, head) and n.flow
            ]
            # At the first position a head moves one value, and its pattern is 1 in both runs.
            assert [flows.nodes[i].role for i in nodes] == ["values"]
            (result,) = measure(view, flows, nodes)
            assert -result.actual == pytest.approx(
                float(patched.heads[1, head]), rel=1e-5, abs=1e-8
            )


@pytest.mark.parametrize("two", [True, False])
@pytest.mark.parametrize("settings", [{}, {"embed_mix": True, "positions": "learned"}])
def test_estimates_are_gradients(two, settings):
    """By central differences of the running model, at every token and one node of each part."""
    model = random_model(n_layers=2, norm="rms", mlp="swiglu", **settings)
    view = ResidualModel(model, toy_tokenizer())
    near = view.W_E[TWO[0]] + 1e-4 * view.W_E[TWO[1]]
    flows = flow(view, TWO[0], DIRECTION, threshold=0, **({"against": near} if two else {}))
    slopes = estimates(view, flows)
    if two:
        # Between close texts the measured effect is the gradient times the change.
        numbers = [i for i, n in enumerate(flows.nodes) if n.kind in ("token", "head", "direction")]
        results = measure(view, flows, numbers)
        measured = torch.tensor([-r.actual for r in results]).double()
        torch.testing.assert_close(slopes[numbers], measured, rtol=1e-3, atol=1e-8)
        return
    tokens = [i for i, n in enumerate(flows.nodes) if n.kind == "token"]
    rows = view.W_E[TWO[0]]
    for position, number in enumerate(tokens):
        step = torch.zeros_like(rows)
        step[position] = 1e-5 * rows[position]
        ends = [
            flow(view, TWO[0], DIRECTION, against=rows + sign * step).values[1] for sign in (1, -1)
        ]
        slope = (ends[0] - ends[1]) / 2e-5
        assert float(slopes[number]) == pytest.approx(slope, rel=1e-5, abs=1e-8)


@pytest.mark.parametrize("at_once", [1, 3, 8])
def test_estimates_between_texts_are_integrated_gradients(monkeypatch, at_once):
    """The mean of automatic gradients at 8 points between the embeddings, times the change."""
    monkeypatch.setattr(sys.modules[estimates.__module__], "TOKENS", at_once * len(TWO[0]))
    view = ResidualModel(random_model(n_layers=2, norm="rms", mlp="swiglu"), toy_tokenizer())
    flows = between(view)
    first, second = (view.W_E[ids] for ids in TWO)
    slopes = []
    for point in range(8):
        x = (second + (point + 0.5) / 8 * (first - second)).requires_grad_()
        with view.parts.embed.module.register_forward_hook(lambda *_, x=x: x[None]):
            logits = view.model(TWO[0][None]).logits[0, -1]
        slopes += torch.autograd.grad(logits[3] - logits[[7, 8]].mean(), x)
    expected = (torch.stack(slopes).mean(0) * (first - second)).sum(-1)
    tokens = [i for i, n in enumerate(flows.nodes) if n.kind == "token"]
    torch.testing.assert_close(estimates(view, flows)[tokens], expected)


@pytest.mark.parametrize("against", [None, TWO[1]])
def test_an_account_has_three_numbers(against):
    view = ResidualModel(random_model(n_layers=2), toy_tokenizer())
    flows = flow(view, TWO[0], DIRECTION, against=against)
    full = account(view, flows, measured=5)
    assert [n.flow for n in full.nodes] == [n.flow for n in flows.nodes]
    assert all(n.estimated is not None for n in full.nodes)
    measured = [n for n in full.nodes if n.measured is not None]
    assert len(measured) == 5
    results = measure(view, flows, [full.nodes.index(n) for n in measured])
    assert [n.measured for n in measured] == pytest.approx([-r.actual for r in results])


def test_the_logit_cannot_be_measured():
    view = ResidualModel(random_model(), toy_tokenizer())
    with pytest.raises(BilensError, match="number=0 is output, expected one part of the model"):
        measure(view, between(view), [0])


@pytest.mark.parametrize("against", [None, TWO[1]])
def test_one_node_is_removed_as_it_is_measured(against):
    view = ResidualModel(random_model(n_layers=2), toy_tokenizer())
    flows = flow(view, TWO[0], DIRECTION, against=against, m=2, threshold=1e-3)
    kinds = {"token", "head", "direction"}
    first = {n.kind: i for i, n in reversed([*enumerate(flows.nodes)]) if n.kind in kinds}
    assert len(first) == 3
    for number, result in zip(first.values(), measure(view, flows, [*first.values()]), strict=True):
        together = remove(view, flows, [number, number])
        assert together.actual == pytest.approx(result.actual, abs=1e-10)
        assert together.predicted == pytest.approx(result.predicted)
        assert together.part == flows.nodes[number].name(flows.tokens)


@pytest.mark.parametrize("name", FEW)
def test_all_tokens_removed_together_leave_no_change(name):
    """Runs of both texts exchange all of their tokens; the flow of the group counts once."""
    view, (first, second) = ResidualModel(tiny(name), toy_tokenizer()), some_text()[:2]
    with exact_norms():
        flows = flow(view, first, DIRECTION, against=second, threshold=0)
        tokens = [i for i, n in enumerate(flows.nodes) if n.kind == "token"]
        result = remove(view, flows, tokens)
        # A direction of the last layer beside the tokens adds what does not come from them.
        above = next(i for i, n in enumerate(flows.nodes) if n.kind == "direction")
        group = remove(view, flows, [above, *tokens])
    assert result.actual == pytest.approx(-flows.value, rel=1e-5)
    assert result.predicted == pytest.approx(-flows.value, rel=1e-5)
    inside = float(flows.edges()[above, tokens].sum())
    expected = -(flows.nodes[above].flow + flows.value - inside)
    assert group.predicted == pytest.approx(expected, rel=1e-5)


def test_nothing_to_remove_is_said():
    view = ResidualModel(random_model(), toy_tokenizer())
    flows = flow(view, TWO[0], DIRECTION)
    with pytest.raises(BilensError, match="numbers is empty"):
        remove(view, flows, [])
    with pytest.raises(BilensError, match="number=0 is output"):
        remove(view, flows, [0])
