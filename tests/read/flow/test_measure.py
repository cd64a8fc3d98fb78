"""Effects of single nodes and of groups: exact in linear models, and those of whole runs."""

import pytest
import torch

from bilens.errors import BilensError
from bilens.read.flow import flow, measure, patch, remove
from tests.families import exact_norms, family_view, some_text
from tests.language import view_of
from tests.nightly import nightly
from tests.read.flow.flows import DIRECTION, TWO, numbers_of

FEW = nightly(
    ["gpt2", "llama-biases", "gemma2", "granite", "olmo2", "cohere2", "neox"],
    ["llama-biases", "gemma2", "neox"],
)


def between(view, **options):
    return flow(view, TWO[0], DIRECTION, against=TWO[1], threshold=0, **options)


def test_nodes_that_only_the_unembedding_reads_have_their_flow():
    view = view_of(n_layers=2, norm="none")
    outcome = between(view)
    last = numbers_of(outcome, kind="mlp", layer=1, position=len(TWO[0]) - 1)
    results = measure(view, outcome, last)
    assert results
    for i, result in zip(last, results, strict=True):
        assert result.predicted == -outcome.nodes[i].flow
        assert result.actual == pytest.approx(result.predicted, abs=1e-12)


@pytest.mark.parametrize("name", FEW)
def test_all_tokens_at_once_turn_one_text_into_the_other(name):
    """Exchanging every token's change is the whole change, in both directions."""
    view, (first, second) = family_view(name), some_text()[:2]
    second = torch.cat([first[:5], second[5:6], first[6:]])
    with exact_norms():
        flows = flow(view, first, DIRECTION, against=second)
        (result,) = measure(view, flows, numbers_of(flows, kind="token", position=5))
    assert result.actual == pytest.approx(-flows.value, rel=1e-5)


@pytest.mark.parametrize("name", FEW)
def test_a_head_of_one_position_has_the_effect_of_its_patch(name):
    """All nodes of a head together write its change if no norm follows the heads."""
    view, (first, second) = family_view(name), some_text()[:2]
    if view.layer(0).heads.out_norm is not None:
        pytest.skip("a norm after the heads mixes them")
    with exact_norms():
        flows = flow(view, first, DIRECTION, position=0, against=second, threshold=0)
        patched = patch(view, first, DIRECTION, position=0, against=second)
        for head in range(view.n_heads):
            heads = numbers_of(flows, kind="head", layer=1, number=head)
            nodes = [i for i in heads if flows.nodes[i].flow]
            # At the first position a head moves one value, and its pattern is 1 in both runs.
            assert [flows.nodes[i].role for i in nodes] == ["values"]
            (result,) = measure(view, flows, nodes)
            assert -result.actual == pytest.approx(
                float(patched.heads[1, head]), rel=1e-5, abs=1e-8
            )


@pytest.mark.parametrize("against", [None, TWO[1]])
def test_one_node_is_removed_as_it_is_measured(against):
    view = view_of(n_layers=2)
    flows = flow(view, TWO[0], DIRECTION, against=against, directions=2, threshold=1e-3)
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
    view, (first, second) = family_view(name), some_text()[:2]
    with exact_norms():
        flows = flow(view, first, DIRECTION, against=second, threshold=0)
        tokens = numbers_of(flows, kind="token")
        result = remove(view, flows, tokens)
        # A direction of the last layer beside the tokens adds what does not come from them.
        above = next(i for i, n in enumerate(flows.nodes) if n.kind == "mlp")
        group = remove(view, flows, [above, *tokens])
    assert result.actual == pytest.approx(-flows.value, rel=1e-5)
    assert result.predicted == pytest.approx(-flows.value, rel=1e-5)
    inside = float(flows.edges()[above, tokens].sum())
    expected = -(flows.nodes[above].flow + flows.value - inside)
    assert group.predicted == pytest.approx(expected, rel=1e-5)


def test_what_cannot_be_measured_or_removed_is_said():
    view = view_of()
    with pytest.raises(BilensError, match="number=0 is output, expected one part of the model"):
        measure(view, between(view), [0])
    flows = flow(view, TWO[0], DIRECTION)
    with pytest.raises(BilensError, match="numbers is empty"):
        remove(view, flows, [])
    with pytest.raises(BilensError, match="number=0 is output"):
        remove(view, flows, [0])
