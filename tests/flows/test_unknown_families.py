"""Models whose weights' maps are not known have flows, patches, circuits and directions."""

import pytest
import torch
from experiments.families import make, texts

import bilens
from bilens.circuits import Cases, circuit, patch, task_directions
from bilens.errors import BilensError
from bilens.flows import Question
from bilens.flows.ablation import measure
from bilens.transformer import ResidualModel
from bilens.transformer.families import known_families
from tests.flows.flows import answered, falls, nodes_of
from tests.models import toy_tokenizer
from tests.nightly import nightly

KINDS = (
    *("gpt_neo", "opt", "gptj", "bloom", "falcon", "mpt", "mamba", "jamba", "rwkv"),
    *("qwen3_5", "deepseek_v32", "gemma4_text", "nanochat"),
)
"""Learned positions, rotary ones, biases by distance, parallel layers, layers without heads, the
delta rule, attention to chosen tokens, embeddings of tokens that each layer reads, and a norm that
runs before and after all layers."""
DAILY = ("opt", "bloom", "jamba", "gemma4_text")
TEXTS = [ids % 30 for ids in texts()]


@pytest.fixture(scope="module", params=nightly(KINDS, DAILY))
def view(request):
    model = make(request.param)
    assert type(model).__name__ not in known_families()
    return ResidualModel(model, toy_tokenizer())


def number(view, ids):
    logits = view.logits(ids[None])[0, -1]
    return float(logits[5] - logits[6])


def test_flows_add_up_to_the_models_own_logits(view):
    first, second = (number(view, ids) for ids in TEXTS)
    between = bilens.flow(view, TEXTS[0], "t5", minus="t6", against=TEXTS[1], ablate=20)
    assert between.value == pytest.approx(first - second, rel=1e-5, abs=1e-7)
    alone = bilens.flow(view, TEXTS[0], "t5", minus="t6", labels=0)
    assert alone.values[0] == pytest.approx(first, rel=1e-5, abs=1e-7)
    measured = [node for node in between.nodes if node.measured is not None]
    # Labels need layers that read no more than the stream.
    named = [node for node in measured if node.raises or view.places.crosses]
    assert any(abs(node.measured) > 1e-4 for node in named)


def test_a_measured_token_is_that_of_the_other_text(view):
    result = bilens.flow(view, TEXTS[0], "t5", minus="t6", against=TEXTS[1], labels=0)
    (node,) = nodes_of(result, kind="token", position=2)
    changes = []
    for text, other in (TEXTS, TEXTS[::-1]):
        changed = text.clone()
        changed[2] = other[2]
        changes.append(number(view, changed) - number(view, text))
    expected = (changes[0] - changes[1]) / 2
    (measured,) = measure(view, result, [node])
    assert measured.actual == pytest.approx(expected, rel=1e-5, abs=1e-7)
    assert abs(expected) > 1e-4


@pytest.mark.parametrize("target", ["log-probability", "probability"])
def test_targets_are_those_of_the_model(view, target):
    logs = [view.logits(ids[None])[0, -1].log_softmax(-1)[5] for ids in TEXTS]
    ends = [float(x if target == "log-probability" else x.exp()) for x in logs]
    result = bilens.flow(view, TEXTS[0], "t5", against=TEXTS[1], target=target, labels=0)
    assert result.values == pytest.approx(ends, rel=1e-5, abs=1e-9)


def test_patches_are_those_of_hooks(view):
    first, second = TEXTS
    result = patch(view, first, "t5", minus="t6", against=second)
    expected, exist = falls(view, first, second, number), view.places.exist
    assert result.noising[exist].tolist() == pytest.approx(expected[exist].tolist(), abs=1e-7)
    assert result.change == pytest.approx(number(view, first) - number(view, second), abs=1e-7)
    assert float(result.noising.abs().max()) > 1e-4


def questions():
    endings = torch.randint(3, 30, (4, 4), generator=torch.Generator().manual_seed(4))
    return [
        Question(torch.cat([TEXTS[0][:3], x]), "t5", ("t6",), torch.cat([TEXTS[1][:3], x]))
        for x in endings
    ]


def test_circuits_and_directions_are_found(view):
    cases = Cases.of(view, questions())
    everything = cases.everything.double()
    values = cases.values(torch.stack([everything, torch.ones_like(everything)]))
    torch.testing.assert_close(values[0], cases.changes, rtol=1e-5, atol=1e-9)
    torch.testing.assert_close(values[1], values[0])
    asked = answered(view, questions())
    (found,) = circuit(view, asked, level="parts", keep=0.5).circuits
    assert found.mask.any()
    assert not (found.mask & ~cases.everything).any()
    (stages,) = circuit(view, asked).circuits
    assert stages.mask.any()
    assert not (stages.mask & ~cases.by("role").everything).any()
    if all(layer.mlp is not None for layer in view.places.layers):
        assert task_directions(view, questions(), 2).r2 is not None
    else:
        with pytest.raises(BilensError, match="a layer has no MLP, expected one in each"):
            task_directions(view, questions(), 2)


def test_readings_of_weights_refuse_it_by_name(view):
    readings = [
        lambda: view.W_U,
        lambda: view.ov(0),
        lambda: view.layer(0),
        lambda: view.mlp(0),
        lambda: view.direction("t5"),
    ]
    name = type(view.model).__name__
    for read in readings:
        with pytest.raises(BilensError, match=f"model is a {name}, whose structure is not known"):
            read()
    with pytest.raises(BilensError, match=f"not known of {name}; give tokens by name or number"):
        patch(view, TEXTS[0], torch.ones(view.d_model), against=TEXTS[1])


def test_a_layer_reads_what_parts_of_earlier_ones_wrote():
    # Routers of Zaya read the states of the router before, which follow from its layer's heads.
    view = ResidualModel(make("zaya"), toy_tokenizer())
    through = bilens.flow(view, TEXTS[0], "t5", minus="t6", against=TEXTS[1], labels=0)
    nodes = [through.output, *through.nodes_above(0)]
    inflows = through.edges(nodes).sum(1).tolist()
    parts = [i for i, node in enumerate(nodes) if node.kind in ("output", "mlp", "head")]
    flows = [nodes[i].flow for i in parts]
    assert [inflows[i] for i in parts] == pytest.approx(flows, abs=3e-6 * through.absolute)
