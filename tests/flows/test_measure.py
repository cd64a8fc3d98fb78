"""Effects of nodes alone and together are those of the model's own forward passes with hooks."""

import pytest

from bilens.circuits import patch
from bilens.circuits.patching import all_parts
from bilens.errors import BilensError
from bilens.flows import flow, measure, remove
from bilens.flows.ablation import without_parts
from bilens.transformer.exchange import exchange
from bilens.transformer.passes import Pass
from tests.families import EACH_READ, MIXTURES, exact_norms, family_view, some_text
from tests.flows.flows import DIRECTION, TWO, nodes_of
from tests.flows.own_runs import by_hand
from tests.models import view_of
from tests.nightly import nightly

FEW = nightly(
    ["gpt2", "llama-biases", "gemma2", "granite", "olmo2", "cohere2", "neox"],
    ["llama-biases", "gemma2", "neox"],
)
STRAIGHT = {"n_layers": 2, "norm": "none", "bias": True, "attention": "softmax"}


def asked(logits):
    return logits[3] - logits[[7, 8]].mean()


@pytest.mark.long
@pytest.mark.parametrize(
    "name", [*EACH_READ, *nightly(MIXTURES, ("mixtral", "qwen3-experts")), "neox", "gemma3"]
)
def test_effects_are_those_of_own_passes(name):
    view, texts = family_view(name), some_text()[:2, :8]
    with exact_norms():
        result = flow(view, texts[0], DIRECTION, against=texts[1], labels=0)
        heads, mlps = nodes_of(result, kind="head"), nodes_of(result, kind="mlp")
        if name == "own-mixed":  # later heads mix values of the first layer, too
            heads = [node for node in heads if node.layer == 0]
        nodes = [*nodes_of(result, kind="token")[:3], *heads[:3], *mlps[:3]]
        for node, effect in zip(nodes, measure(view, result, nodes), strict=True):
            expected = by_hand(view, [node], texts, asked)
            assert effect.actual == pytest.approx(expected, rel=1e-4, abs=1e-6)
            assert effect.predicted == -node.flow
            assert effect.part == node.name(result.tokens, result.second)
        # More heads, so that some read others: none is changed a second time.
        nodes += heads[3:12]
        together = remove(view, result, [*nodes, nodes[0]])
        expected = by_hand(view, nodes, texts, asked)
    assert together.actual == pytest.approx(expected, rel=1e-4, abs=1e-6)
    inside = float(result.edges(nodes).sum())
    assert together.predicted == pytest.approx(inside - sum(node.flow for node in nodes))


@pytest.mark.parametrize("against", ["neutral", TWO[1]])
def test_what_only_the_unembedding_reads_changes_the_logit_by_its_flow(against):
    view = view_of(**STRAIGHT)
    result = flow(view, TWO[0], DIRECTION, against=against, labels=0)
    last = nodes_of(result, kind="mlp", layer=1, position=len(TWO[0]) - 1)
    (effect,) = measure(view, result, last)
    assert effect.actual == pytest.approx(effect.predicted, abs=1e-12)
    assert abs(effect.actual) > 1e-3


@pytest.mark.parametrize("against", ["neutral", TWO[1]])
def test_no_node_has_no_effect(against):
    view = view_of(**STRAIGHT)
    assert measure(view, flow(view, TWO[0], DIRECTION, against=against, labels=0), []) == []
    texts = Pass.of(view, TWO)
    assert exchange(texts, texts, []).shape == (0, *TWO.shape, view.d_model)


@pytest.mark.parametrize("name", FEW)
def test_all_tokens_removed_together_leave_no_change(name):
    """Runs of both texts exchange all of their tokens; the flow of the group counts once."""
    view, (first, second) = family_view(name), some_text()[:2]
    with exact_norms():
        flows = flow(view, first, DIRECTION, against=second, labels=0)
        result = remove(view, flows, nodes_of(flows, kind="token"))
    assert result.actual == pytest.approx(-flows.value, rel=1e-5)
    assert result.predicted == pytest.approx(-flows.value, rel=1e-5)


@pytest.mark.parametrize("name", FEW)
def test_parts_exchanged_together_are_those_of_patches_and_leave_no_change_at_last(name):
    view, (first, second) = family_view(name), some_text()[:2].clone()
    second[-1] = first[-1]
    with exact_norms():
        flows = flow(view, first, DIRECTION, against=second, labels=0)
        patched = patch(view, first, DIRECTION, against=second)
        places, everything = range(len(first)), []
        for part in all_parts(view):
            alone = [part._replace(position=position) for position in places]
            number = view.n_heads if part.kind == "mlp" else part.number
            effects = (patched.noising, patched.denoising)
            expected = sum(float(x[part.layer, number]) for x in effects) / 2
            actual = without_parts(view, flows, alone)
            assert -actual == pytest.approx(expected, rel=1e-4, abs=1e-6)
            everything += alone
        # Each has its value of the other text, and is not changed a second time by those before it.
        left = flows.value + without_parts(view, flows, everything)
    assert left == pytest.approx(0, abs=1e-5 * abs(flows.value))


def test_what_cannot_be_removed_is_said(biased):
    result = flow(biased, TWO[0], DIRECTION, labels=0)
    for call in (measure, remove):
        with pytest.raises(BilensError, match="the logit is no part that can be removed"):
            call(biased, result, [result.output])
