"""Flows between two texts: adjoints times changes, with nothing frozen."""

import gc
from copy import deepcopy
from dataclasses import replace
from itertools import product
from weakref import ref

import pytest
import torch

from bilens.errors import BilensError
from bilens.flows import Node, Question, flow
from bilens.flows.rules import RULES
from bilens.flows.split import flows
from bilens.transformer import Pass, ResidualModel
from bilens.transformer.passes import embedded
from tests.families import ALL, DAILY, EACH_READ, MIXTURES, exact_norms, family_view, some_text
from tests.flows.flows import DIRECTION, QUESTIONS, TWO, check, leaves, watched
from tests.models import toy_tokenizer, view_of
from tests.nightly import nightly


def between(view, first, second, **options):
    return flow(view, first, DIRECTION, against=second, labels=0, **options)


def arrays(result):
    """Return all flows of a result in one tensor, heads by source."""
    pairs = []
    for layer in result.pairs:
        dense = layer.flows.new_zeros(*result.heads.shape[1:], result.heads.shape[2])
        pairs.append(dense.index_put(tuple(layer.places.T), layer.flows))
    all_flows = (result.heads, result.mlps, result.embeddings, result.choices, *pairs)
    return torch.cat([flows_.flatten() for flows_ in all_flows])


@pytest.mark.parametrize(
    ("name", "dtype"),
    nightly(
        product([*ALL, *MIXTURES], [torch.bfloat16, torch.float16]),
        [(name, torch.bfloat16) for name in ("gemma2", "own-constant", "mixtral")]
        + [("gemma3", torch.float16)],
    ),
)
def test_flows_of_weights_in_16_bits_are_those_of_their_float32_copy(name, dtype):
    view = family_view(name, dtype=dtype)
    wide = ResidualModel(deepcopy(view.model).float(), toy_tokenizer())
    first, second = some_text()[:2]
    for against in ("neutral", second):
        result, expected = (between(model, first, against) for model in (view, wide))
        for each in (result, expected):
            assert leaves(each) == pytest.approx(each.value, rel=1e-4)
        # Buffers of a model in 16 bits, such as the scale of Gemma's embeddings, are rounded.
        assert result.value == pytest.approx(expected.value, rel=1e-3)
    assert {parameter.dtype for parameter in view.model.parameters()} == {dtype}


@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma3"])
def test_a_flow_that_is_larger_than_its_sum_by_far_is_an_error(name):
    """A norm multiplies embeddings of 0 by 1 / sqrt(eps), and so its secant."""
    view = family_view(name, dtype=torch.float32)
    with pytest.raises(BilensError, match="beside their rounding. Take a text or mean"):
        between(view, some_text()[0], torch.zeros(view.d_model))


def test_a_flow_between_embeddings_and_zeros_is_exact_with_positions():
    view = family_view("gpt2", dtype=torch.float32)
    result = between(view, some_text()[0], torch.zeros(view.d_model))
    assert leaves(result) == pytest.approx(result.value, rel=1e-4)


def test_the_condition_is_a_fact_and_zero_for_the_same_text(view):
    result = between(view, *TWO)
    absolute = sum(abs(node.flow) for node in result.nodes_above(0))
    assert result.absolute == pytest.approx(absolute)
    assert dict(result.facts())["condition"] == result.absolute / abs(result.value)
    same = between(view, TWO[0], TWO[0])
    assert same.condition == same.value == 0
    assert same.absolute < 1e-14


def test_nothing_of_a_flow_waits_for_the_collector(view):
    """Graphs of all layers are kept during a flow; in a circle they would stay after it."""
    between(view, *TWO)
    gc.collect()
    gc.disable()
    try:
        made = [ref(between(view, TWO[0], second).adjoints) for second in ("neutral", TWO[1])]
        assert [one() for one in made] == [None, None]
        before = sum(isinstance(kept, torch.Tensor) for kept in gc.get_objects())
        flow(view, TWO[0], DIRECTION, against=TWO[1])
        assert sum(isinstance(kept, torch.Tensor) for kept in gc.get_objects()) == before
    finally:
        gc.enable()


def activations(view, ids, rows):
    """Return mixed values and outputs of MLPs with their gradients, given the embeddings."""
    found = {}

    def keep(name, x):
        found[name] = x.requires_grad_() if x.is_leaf else x
        x.retain_grad()

    with watched(view, keep) as hooks:
        hooks.enter_context(embedded(view, rows))
        logits = view.model(ids[None]).logits[0, -1]
        (logits[3] - logits[[7, 8]].mean()).backward()
    return found


@pytest.mark.parametrize("name", [n for n in nightly(ALL, DAILY) if "gemma2" not in n.values])
def test_close_texts_have_gradient_times_change_as_their_flow(name):
    """Secants become derivatives as the texts approach each other, at every part of the model."""
    view, ids = family_view(name), some_text()[0][:8]
    rows = view.modules.embed.rows(ids)
    step = 1e-6 * torch.randn(rows.shape, generator=torch.Generator().manual_seed(0)).to(rows)
    with exact_norms():
        result = between(view, ids, rows + step)
        first, second = (activations(view, ids, x) for x in (rows, rows + step))
    for (kind, layer), x in first.items():
        terms = (x.grad * (x - second[kind, layer]))[0].detach()
        blocks = view.n_heads if kind == "head" else 1
        expected = terms.unflatten(-1, (blocks, -1)).sum(-1).T
        actual = result.heads[layer] if kind == "head" else result.mlps[layer][None]
        size = float(expected.abs().max())
        assert size > 1e-11
        torch.testing.assert_close(actual, expected, rtol=0, atol=1e-3 * size)


@pytest.mark.parametrize("name", EACH_READ)
def test_a_node_writes_its_change_and_its_flow_is_the_adjoint_times_it(name):
    view, (first, second) = family_view(name), some_text()[:2, :8]
    with exact_norms():
        result = between(view, first, second)
        rows = [view.modules.embed.rows(ids) for ids in (first, second)]
        runs = [activations(view, *x) for x in zip((first, second), rows, strict=True)]
        nodes = [Node("mlp", 0.0, layer, "mlp", 7) for layer in range(2)]
        nodes += [Node("head", 0.0, 1, "attention", 7, None, head) for head in range(view.n_heads)]
        outputs = result.written(nodes)
        adjoints = [result.adjoint(node) for node in nodes]
    for node, written, adjoint in zip(nodes, outputs, adjoints, strict=True):
        x, y = (run[node.kind, node.layer][0, 7].detach() for run in runs)
        change, through = x - y, result.mlps[node.layer, 7]
        if node.kind == "head":
            change = change.unflatten(0, (view.n_heads, -1))[node.number]
            through = result.heads[1, node.number, 7]
        torch.testing.assert_close(written, change, rtol=1e-6, atol=1e-6)
        assert float(adjoint @ written) == pytest.approx(float(through), abs=1e-12)


@pytest.mark.parametrize("attention", ["softmax", "bilinear"])
def test_heads_by_source_are_those_of_a_dense_reference(attention):
    """In one layer without norms a head is read by the logit, and by the MLP at its mean input."""
    view = view_of(norm="none", attention=attention)
    result = between(view, *TWO)
    runs = [Pass.of(view, ids) for ids in TWO]
    mlp, heads = view.layer(0).mlp, view.layer(0).heads.weights()
    L, R, D = (x.weight() for x in (mlp.up, mlp.gate, mlp.down))
    n = sum(run.layer(0).mlp_input[0, -1] for run in runs) / 2
    u = view.direction(3, [7, 8])
    w = u + ((u @ D) * (R @ n)) @ L + ((u @ D) * (L @ n)) @ R
    mixed = []
    for ids, run in zip(TWO, runs, strict=True):
        values = torch.einsum("sd,hdv->hsv", view.W_E[ids], heads.value)
        mixed.append(run.pattern(0)[0, :, -1, :, None] * values)
    expected = torch.einsum("hsv,hvd,d->hs", mixed[0] - mixed[1], heads.out, w)
    pairs = result.pairs[0]
    actual = torch.zeros(4, 9, 9).double().index_put(tuple(pairs.places.T), pairs.flows)
    torch.testing.assert_close(actual[:, -1], expected)
    assert not actual[:, :-1].any()
    torch.testing.assert_close(actual.sum(2), result.heads[0])


@pytest.mark.parametrize("name", nightly([*ALL, *MIXTURES], ["gpt2", "own-mixed", "mixtral"]))
def test_questions_side_by_side_have_their_own_flows(name):
    view = family_view(name)
    longer = Question("t3 t2 t1 t8 t9", "t5", (), "t3 t7 t1 t8 t9", target="probability")
    one_text = Question("t3 t2 t1 t8", "t5")
    asked = [QUESTIONS[0], longer, *QUESTIONS[1:], one_text, replace(QUESTIONS[1], position=2)]
    with exact_norms():
        together = flows(view, asked)
        for question, result in zip(asked, together, strict=True):
            (alone,) = flows(view, [question])
            assert result.values == pytest.approx(alone.values)
            torch.testing.assert_close(arrays(result), arrays(alone), rtol=1e-5, atol=1e-7)
            torch.testing.assert_close(result.streams, alone.streams)
            nodes = alone.strongest(5)
            edges = result.graph(nodes).edges
            torch.testing.assert_close(edges, alone.graph(nodes).edges, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("target", ["probability", "log-probability"])
@pytest.mark.parametrize("cap", [None, 2.0])
def test_probabilities_are_split_too(target, cap):
    view = view_of(n_layers=2, logit_cap=cap)
    result = between(view, *TWO, target=target)
    logs = view.logits(TWO)[:, -1].log_softmax(-1)
    numbers = logs.exp() if target == "probability" else logs
    item = numbers[:, 3] - numbers[:, [7, 8]].mean(1)
    assert result.values == pytest.approx(item.tolist(), abs=1e-12)
    check(result, float(item[0] - item[1]), tolerance=1e-12)


def test_an_operation_with_a_wrong_rule_is_found_at_each_call(view, monkeypatch):
    own = RULES["mul"]

    def too_much(mode, func, *args, **kwargs):
        y = own(mode, func, *args, **kwargs)
        if isinstance(y, torch.Tensor) and y.requires_grad:
            y.register_hook(lambda w: 1.1 * w)
        return y

    monkeypatch.setitem(RULES, "mul", too_much)
    with pytest.raises(BilensError, match="mul has no rule for what this call does"):
        flow(view, TWO[0], DIRECTION, against=TWO[1])


def test_a_second_text_is_given_in_many_ways(view):
    text, other = "t4 t5 t6", "t4 t9 t6"
    expected = flow(view, text, "t3", minus="t7", against=other).value
    ids = view.ids(other)
    rows = view.W_E[ids]
    same = [{"against": x} for x in (ids, rows, [other], [other, other])]
    for options in ({"replace": {"t5": "t9"}}, *same):
        result = flow(view, text, "t3", minus=("t7",), **options)
        assert result.value == pytest.approx(expected, abs=1e-12)
    mean = flow(view, text, "t3", against=[text, other])
    of_rows = flow(view, text, "t3", against=(view.W_E[view.ids(text)] + rows) / 2)
    assert mean.value == pytest.approx(of_rows.value, abs=1e-12)
    assert flow(view, text, "t3", against=view.W_E.mean(0)).value != 0


@pytest.mark.parametrize("name", ["gemma3", "granite", "gpt2"])
def test_given_embeddings_are_those_of_a_text(name):
    """Wherever a family scales its embeddings, and with learned positions."""
    view, (first, second) = family_view(name), some_text()[:2]
    expected = flow(view, first, DIRECTION, against=second, ablate=20)
    result = flow(view, first, DIRECTION, against=view.W_E[second], ablate=20)
    assert result.value == pytest.approx(expected.value, rel=1e-6)
    for a, b in zip(result.named, expected.named, strict=True):
        assert (a.measured or 0) == pytest.approx(b.measured or 0, rel=1e-4, abs=1e-6)
