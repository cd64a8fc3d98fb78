"""A flow adds up to the logit of every family, and conserves at every node."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from bilens.errors import BilensError
from bilens.read.flow import flow
from bilens.read.language import TokenDirection
from bilens.residual import ResidualModel
from tests.families import ALL, exact_norms, some_text, tiny
from tests.language import parts, random_model, random_text, toy_tokenizer

DIRECTION = TokenDirection("t3", ("t7", "t8"))
LEAVES = ("token", "position", "bias")


def uncapped(view, logits):
    cap = view.parts.softcap
    return logits if cap is None else cap * torch.atanh(logits / cap)


def expected(view, ids, position):
    logits = uncapped(view, view.trace(ids[: position + 1]).logits[-1])
    return float(logits[3] - logits[[7, 8]].mean())


def check(found, value, tolerance=1e-9):
    edges, flows = found.edges(), torch.tensor([n.flow for n in found.nodes], dtype=torch.float64)
    largest = max(float(edges.abs().max()), float(flows.abs().max()))
    kinds = [n.kind for n in found.nodes]
    leaf = torch.tensor([kind in LEAVES for kind in kinds])
    assert found.value == pytest.approx(value, abs=tolerance * largest)
    assert float(flows[leaf].sum()) == pytest.approx(value, abs=tolerance * largest)
    torch.testing.assert_close(edges.sum(1)[~leaf], flows[~leaf], rtol=0, atol=tolerance * largest)
    torch.testing.assert_close(edges.sum(0)[1:], flows[1:], rtol=0, atol=tolerance * largest)
    assert edges.triu().equal(edges)
    assert kinds[0] == "output"
    assert kinds.count("output") == 1


@pytest.mark.parametrize("name", ALL)
def test_a_flow_adds_up_and_conserves(name):
    view, ids = ResidualModel(tiny(name), toy_tokenizer()), some_text()[0]
    with exact_norms():
        found = flow(view, ids, DIRECTION, position=7, k=3, threshold=1e-3)
        value = expected(view, ids, 7)
    check(found, value)
    kinds = {node.kind for node in found.nodes}
    gated = view.layer(0).mlp.gate is not None
    assert {"token", "head", "rest", "eigenvector" if gated else "mlp"} <= kinds


@given(
    st.fixed_dictionaries(parts),
    st.sampled_from(["bilinear", "swiglu", "relu2"]),
    st.integers(0, 8),
    st.sampled_from([0.0, 1e-3, 0.1]),
)
def test_own_models_of_all_parts_flow(settings, mlp, position, threshold):
    view = ResidualModel(random_model(n_layers=2, mlp=mlp, **settings), toy_tokenizer())
    ids = random_text()
    found = flow(view, ids, DIRECTION, position=position, k=2, threshold=threshold)
    check(found, expected(view, ids, position))


polynomial = {
    **parts,
    "attention": st.sampled_from(["squared", "bilinear"]),
    "attention_norm": st.sampled_from(["none", "rms"]),
}


@given(st.fixed_dictionaries(polynomial), st.sampled_from([0.0, 1e-3]))
def test_patterns_are_split_too(settings, threshold):
    view = ResidualModel(random_model(n_layers=2, **settings), toy_tokenizer())
    ids = random_text(6)
    found = flow(view, ids, DIRECTION, k=2, threshold=threshold, through_patterns=True)
    check(found, expected(view, ids, len(ids) - 1))
    assert "patterns of attention" not in found.frozen


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"k": 0}, "k=0, expected a whole number"),
        ({"threshold": 1.0}, "threshold=1.0, expected a finite number, at least 0 and below 1"),
        ({"position": 9}, "position=9, expected -9 to 8"),
        ({"through_patterns": True}, "patterns of softmax attention are not polynomials"),
        ({"direction": torch.zeros(3).double()}, "direction has 3 numbers, expected 16, the width"),
        ({"direction": torch.full((16,), torch.nan).double()}, "direction holds NaN"),
        ({"direction": TokenDirection("t99")}, "token='t99', expected a single token"),
    ],
)
def test_what_cannot_be_split_is_said(change, message):
    view = ResidualModel(random_model(), toy_tokenizer())
    with pytest.raises(BilensError, match=message):
        flow(view, random_text(), **{"direction": DIRECTION, **change})


@pytest.mark.parametrize("threshold", [1e-4, 1e-2])
def test_the_bound_leaves_out_nothing_that_counts(threshold, monkeypatch):
    view = ResidualModel(random_model(n_layers=2, d_model=144, bias=True), toy_tokenizer())
    ids = random_text()
    screened = flow(view, ids, DIRECTION, k=5, threshold=threshold)
    check(screened, expected(view, ids, len(ids) - 1))
    monkeypatch.setattr("bilens.read.flow.mlp.SMALL", 1000)
    whole = flow(view, ids, DIRECTION, k=5, threshold=threshold)
    flows = [[node.flow for node in found.nodes] for found in (screened, whole)]
    assert flows[0] == pytest.approx(flows[1], abs=1e-12)
    assert any(node.kind == "eigenvector" for node in whole.nodes)
