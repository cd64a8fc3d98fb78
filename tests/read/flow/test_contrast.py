"""A flow between two texts adds up to the change of the logit, with nothing frozen."""

import gc
from copy import deepcopy
from itertools import product
from weakref import ref

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn import functional

from bilens.errors import BilensError
from bilens.read.flow import flow
from bilens.read.flow.graph import FlowBuilder
from bilens.read.flow.question import Question
from bilens.read.flow.split import split
from bilens.residual import Moment, ResidualModel
from tests.families import ALL, EACH_READ, exact_norms, family_view, some_text
from tests.language import parts, random_model, random_text, toy_tokenizer, view_of
from tests.nightly import nightly
from tests.read.flow.flows import DIRECTION, TWO, check, leaves, logit, numbers_of
from tests.residual.test_experts import MIXTURES, mixture


@pytest.fixture
def exact_softmax(monkeypatch):
    """Softmax of transformers rounds to float32 inside; here it keeps the dtype of the scores."""
    softmax = functional.softmax
    monkeypatch.setattr(functional, "softmax", lambda x, dim, dtype=None: softmax(x, dim))


@pytest.mark.parametrize("name", EACH_READ)
@pytest.mark.usefixtures("exact_softmax")
def test_every_family_adds_up_and_conserves(name):
    view, (first, second) = family_view(name), some_text()[:2]
    with exact_norms():
        result = flow(
            view, first, DIRECTION, position=7, against=second, directions=3, threshold=1e-3
        )
        change = logit(view, first[:8]) - logit(view, second[:8])
    # Cohere's rotary positions round to float32.
    check(result, change, tolerance=1e-7 if name == "cohere2" else 1e-12)
    assert result.frozen == ()
    assert {n.role for n in result.nodes if n.kind == "head"} == {"values", "queries", "keys"}
    assert result.values[0] - result.values[1] == pytest.approx(change, abs=1e-7)


@pytest.mark.parametrize(
    ("name", "dtype"),
    nightly(
        product(ALL, [torch.bfloat16, torch.float16]),
        [("gemma2", torch.bfloat16), ("own-constant", torch.bfloat16), ("gemma3", torch.float16)],
    ),
)
def test_flows_of_weights_in_16_bits_are_those_of_their_float32_copy(name, dtype):
    view = family_view(name, dtype=dtype)
    wide = ResidualModel(deepcopy(view.model).float(), toy_tokenizer())
    first, second = some_text()[:2]
    for against in (None, second):
        result = flow(view, first, DIRECTION, against=against, threshold=0.1)
        expected = flow(wide, first, DIRECTION, against=against, threshold=0.1)
        for each in (result, expected):
            assert leaves(each) == pytest.approx(each.value, rel=1e-4)
        # Buffers of a model in 16 bits, such as the scale of Gemma's embeddings, are rounded.
        assert result.value == pytest.approx(expected.value, rel=1e-3)
    assert {parameter.dtype for parameter in view.model.parameters()} == {dtype}


@pytest.mark.parametrize("name", MIXTURES)
def test_flows_of_experts_in_16_bits_add_up(name):
    view = ResidualModel(mixture(name).to(torch.bfloat16), toy_tokenizer())
    result = flow(view, some_text()[0], DIRECTION, against=some_text()[1], threshold=0.1)
    assert leaves(result) == pytest.approx(result.value, rel=1e-4)


@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma3", "gpt2"])
def test_a_flow_that_is_larger_than_its_sum_by_far_is_an_error_or_exact(name):
    """A norm multiplies embeddings of 0 by 1 / sqrt(eps), and so its secant."""
    view = family_view(name, dtype=torch.float32)
    first, zeros = some_text()[0], torch.zeros(view.d_model)
    if name != "gpt2":
        with pytest.raises(BilensError, match="terms cancel beyond rounding. Take a text or mean"):
            flow(view, first, DIRECTION, against=zeros)
        return
    # Its positions are not 0.
    result = flow(view, first, DIRECTION, against=zeros)
    assert leaves(result) == pytest.approx(result.value, rel=1e-4)


def test_the_condition_is_a_fact_and_zero_for_the_same_text():
    view = view_of(n_layers=2)
    result = flow(view, TWO[0], DIRECTION, against=TWO[1])
    absolute = sum(abs(node.flow) for node in result.nodes[1:])
    assert dict(result.facts())["condition"] == absolute / abs(result.value) == result.condition
    same = flow(view, TWO[0], DIRECTION, against=TWO[0])
    assert same.condition == same.value == 0
    assert all(node.flow == 0 for node in same.nodes)


def test_nothing_of_a_flow_waits_for_the_collector():
    """Linear maps of all layers are kept during a flow; in a circle they would stay after it."""
    view = view_of(n_layers=2)
    flow(view, TWO[0], DIRECTION, against=TWO[1])
    gc.collect()
    gc.disable()
    try:
        made = [
            ref(split(view, Question.of(TWO[0], DIRECTION, against=second)))
            for second in (None, TWO[1])
        ]
        assert [one() for one in made] == [None, None]
        before = sum(isinstance(kept, torch.Tensor) for kept in gc.get_objects())
        flow(view, TWO[0], DIRECTION, against=TWO[1])
        assert sum(isinstance(kept, torch.Tensor) for kept in gc.get_objects()) == before
    finally:
        gc.enable()


@given(
    st.fixed_dictionaries({**parts, "attention_norm": st.sampled_from(["none", "sum", "rms"])}),
    st.sampled_from(["bilinear", "swiglu", "reglu", "relu2", "gelu"]),
    st.sampled_from([0.0, 1e-3, 0.1]),
    st.integers(0, 1000),
)
def test_own_models_of_all_parts(settings, mlp, threshold, seed):
    norms = {"squared": ("none", "sum", "rms"), "bilinear": ("none", "rms")}
    if settings["attention_norm"] not in norms.get(settings["attention"], ("none",)):
        settings = {**settings, "attention_norm": "none"}
    model = random_model(n_layers=2, mlp=mlp, seed=seed % 7, **settings)
    view = ResidualModel(model, toy_tokenizer())
    first, second = random_text(6, seed), random_text(6, seed + 1)
    result = flow(view, first, DIRECTION, against=second, directions=2, threshold=threshold)
    check(result, logit(view, first) - logit(view, second), tolerance=1e-10)


def test_close_texts_have_the_gradient_as_their_flow():
    """Secants become derivatives as the texts approach each other."""
    view = view_of(n_layers=2, norm="layer", mlp="swiglu")
    ids = random_text()
    step = 1e-5 * torch.randn(len(ids), view.d_model, generator=torch.Generator().manual_seed(0))
    given_ = view.W_E[ids] + step.double()
    result = flow(view, ids, DIRECTION, against=given_, threshold=0)
    embedding = view.W_E[ids].clone().requires_grad_()
    with view.parts.embed.module.register_forward_hook(lambda *_: embedding[None]):
        logits = view.model(ids[None]).logits[0, -1]
    (gradient,) = torch.autograd.grad(logits[3] - logits[[7, 8]].mean(), embedding)
    tokens = torch.tensor([n.flow for n in result.nodes if n.kind == "token"]).double()
    expected = -(gradient * step).sum(-1)
    torch.testing.assert_close(tokens, expected, rtol=1e-4, atol=1e-9)


@pytest.mark.parametrize("target", ["probability", "log-probability"])
@pytest.mark.parametrize("cap", [None, 2.0])
def test_probabilities_are_split_too(target, cap):
    view = view_of(n_layers=2, logit_cap=cap)
    result = flow(view, TWO[0], DIRECTION, against=TWO[1], target=target, threshold=0)
    logs = torch.stack([view.trace(ids).logits[-1].log_softmax(-1) for ids in TWO])
    numbers = logs.exp() if target == "probability" else logs
    item = numbers[:, 3] - numbers[:, [7, 8]].mean(1)
    assert result.values == pytest.approx(item.tolist(), abs=1e-12)
    check(result, float(item[0] - item[1]), tolerance=1e-12)


def test_heads_and_mlps_of_the_pass_are_sums_of_nodes():
    view = view_of(n_layers=2)
    through = split(view, Question.of(TWO[0], DIRECTION, against=TWO[1]))
    result = through.run(4, 0.0)

    def total(**wanted):
        return sum(result.nodes[i].flow for i in numbers_of(result, **wanted))

    for layer in range(2):
        for role, flows in through.heads[layer].items():
            for head, flow_ in enumerate(flows.sum(-1).tolist()):
                assert total(kind="head", layer=layer, number=head, role=role) == pytest.approx(
                    flow_, abs=1e-12
                )
        of_mlp = float(through.mlps[layer].sum())
        assert total(kind="direction", layer=layer) == pytest.approx(of_mlp, abs=1e-12)


@pytest.mark.parametrize("against", [None, TWO[1]])
def test_each_call_checks_the_cut_before_every_layer(monkeypatch, against):
    """Nodes of layer 1 that read too much are found, though tokens still add up."""
    view = view_of(n_layers=3)
    right = flow(view, TWO[0], DIRECTION, against=against)

    def read_too_much(self, nodes, position, moment, vectors):
        factor = 1.5 if moment == Moment.attention(1) else 1.0
        self._row("reads", nodes, position, moment, factor * vectors)

    monkeypatch.setattr(FlowBuilder, "read", read_too_much)
    layer = r"The flow into layer 1 and all later ones adds up to -?[\d.e-]+, expected "
    with pytest.raises(BilensError, match=f"{layer}{right.value:.6g}, the model's own number"):
        flow(view, TWO[0], DIRECTION, against=against)


def test_a_second_text_is_given_in_many_ways():
    view = view_of(n_layers=2)
    text, other = "t4 t5 t6", "t4 t9 t6"
    expected = flow(view, text, "t3", minus="t7", against=other).value
    ids = view.ids(other)
    rows = view.W_E[ids]
    same = [
        {"replace": {"t5": "t9"}},
        {"against": ids},
        {"against": rows},
        {"against": [other]},
        {"against": [other, other]},
    ]
    for options in same:
        result = flow(view, text, "t3", minus=("t7",), **options)
        assert result.value == pytest.approx(expected, abs=1e-12)
    mean = flow(view, text, "t3", against=[text, other], threshold=0)
    of_rows = flow(view, text, "t3", against=(view.W_E[view.ids(text)] + rows) / 2, threshold=0)
    assert mean.value == pytest.approx(of_rows.value, abs=1e-12)
    assert flow(view, text, "t3", against=view.W_E.mean(0)).value != 0


@pytest.mark.parametrize("name", ["gemma3", "granite", "gpt2"])
def test_given_embeddings_are_those_of_a_text(name):
    """Wherever a family scales its embeddings, and with learned positions."""
    view, (first, second) = family_view(name), some_text()[:2]
    expected = flow(view, first, DIRECTION, against=second).value
    result = flow(view, first, DIRECTION, against=view.W_E[second])
    assert result.value == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"against": "t4 t5"}, r"against has 2 tokens, expected 3, .* from token 2: text \|t4\|t5"),
        (
            {"against": torch.zeros(2, 16).double()},
            r"against has shape \(2, 16\), expected \(3, 16",
        ),
        ({"against": []}, "against holds no texts"),
        ({"replace": {"t9": "t4"}}, "replace names 't9', which is not a word of 't4 t5 t6'"),
        ({"replace": {"t4": "t9"}, "against": "t4 t5 t7"}, "expected one of them"),
        ({"against": "t4 t5 t7", "through_patterns": True}, "through_patterns=True with a second"),
        ({"target": "probability"}, "target='probability' needs two runs"),
        ({"target": "odds", "against": "t4 t5 t7"}, "target='odds', expected"),
    ],
)
def test_what_does_not_fit_is_said(options, message):
    view = view_of(attention="bilinear")
    with pytest.raises(BilensError, match=message):
        flow(view, "t4 t5 t6", "t3", minus="t7", **options)


def test_a_pattern_that_queries_and_keys_do_not_make_is_an_error(monkeypatch):
    view = family_view("llama")
    attention = view.layer(0).heads.module
    monkeypatch.setattr(attention, "scaling", 1.0)
    trace = view.trace

    def other(ids):
        monkeypatch.setattr(attention, "scaling", 0.5)
        run = trace(ids)
        monkeypatch.setattr(attention, "scaling", 1.0)
        return run

    monkeypatch.setattr(view, "trace", other)
    with pytest.raises(
        BilensError, match="Attention of layer 0 mixes values up to .* that differ by"
    ):
        flow(view, some_text()[0], DIRECTION, against=some_text()[1])
