"""A flow adds up to the logit of every family, and conserves at every node."""

from inspect import signature

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn import functional

from bilens.errors import BilensError
from bilens.read.flow import flow
from bilens.read.flow.reading import answer_question, read_flow
from bilens.read.language import TokenDirection
from tests.families import EACH_READ, exact_norms, family_view, some_text
from tests.language import parts, random_text, view_of
from tests.nightly import nightly
from tests.read.flow.flows import DIRECTION, check, logit, numbers_of


@pytest.mark.parametrize("name", EACH_READ)
def test_a_flow_adds_up_and_conserves(name):
    view, ids = family_view(name), some_text()[0]
    with exact_norms():
        result = flow(view, ids, DIRECTION, position=7, directions=3, threshold=1e-3)
        value = logit(view, ids[:8])
    # Cohere's rotary positions round to float32.
    check(result, value, tolerance=1e-7 if name == "cohere2" else 1e-9)
    kinds = {node.kind for node in result.nodes}
    assert {"token", "head", "rest", "direction"} <= kinds


@given(
    st.fixed_dictionaries(parts),
    st.sampled_from(["bilinear", "swiglu", "relu2"]),
    st.integers(0, 8),
    st.sampled_from([0.0, 1e-3, 0.1]),
)
def test_own_models_of_all_parts_flow(settings, mlp, position, threshold):
    view = view_of(n_layers=2, mlp=mlp, **settings)
    ids = random_text()
    result = flow(view, ids, DIRECTION, position=position, directions=2, threshold=threshold)
    check(result, logit(view, ids[: position + 1]))


polynomial = {
    **parts,
    "attention": st.sampled_from(["squared", "bilinear"]),
    "attention_norm": st.sampled_from(["none", "rms"]),
}


@given(st.fixed_dictionaries(polynomial), st.sampled_from([0.0, 1e-3]))
def test_patterns_are_split_too(settings, threshold):
    view = view_of(n_layers=2, **settings)
    ids = random_text(6)
    result = flow(view, ids, DIRECTION, directions=2, threshold=threshold, through_patterns=True)
    check(result, logit(view, ids))
    assert "patterns of attention" not in result.frozen


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"directions": 1}, "directions=1, expected "),
        ({"threshold": 1.0}, "threshold=1.0, expected a finite number, at least 0 and below 1"),
        ({"position": 9}, "position=9, expected -9 to 8"),
        ({"through_patterns": True}, "patterns of softmax attention are not polynomials"),
        ({"token": torch.zeros(3).double()}, "direction has 3 numbers, expected 16, the width"),
        ({"token": TokenDirection("t99")}, "token='t99', expected a single token"),
    ],
)
def test_what_cannot_be_split_is_said(change, message):
    view = view_of()
    with pytest.raises(BilensError, match=message):
        flow(view, random_text(), **{"token": DIRECTION, **change})


def dense_map(view, first, second, layer, position):
    """Return J of an MLP by its definition, from the weights and both runs."""
    mlp = view.layer(layer).mlp
    runs = [view.trace(ids).layers[layer].mlp_n[position] for ids in (first, second)]
    gain = mlp.norm.gain()
    inputs = [n * gain for n in runs]
    ups, gates = ([part.weight() @ n + part.bias() for n in inputs] for part in (mlp.up, mlp.gate))
    acts = [mlp.act(gate) for gate in gates]
    slope = (acts[0] - acts[1]) / (gates[0] - gates[1])
    hidden = (acts[0] + acts[1])[:, None] / 2 * mlp.up.weight()
    hidden = hidden + ((ups[0] + ups[1]) / 2 * slope)[:, None] * mlp.gate.weight()
    return mlp.down.weight() @ hidden * gain


@pytest.mark.parametrize("m", nightly([2, 3, 8, "all"], [3, "all"]))
def test_directions_between_texts_are_exact_at_every_resolution(m):
    """They write orthonormal vectors, read orthogonal ones, and leave nothing."""
    view = view_of(n_layers=2, bias=True, norm="rms", mlp="swiglu")
    ids, second = random_text(seed=1), random_text(seed=2)
    result = flow(view, ids, DIRECTION, against=second, directions=m, threshold=0)
    check(result, float(result.values[0] - result.values[1]), tolerance=1e-11)
    assert not [n for n in result.nodes if n.kind == "rest" and n.part == "mlp"]
    at = numbers_of(result, kind="direction", layer=0, position=4)
    assert len(at) == (16 if m == "all" else m)
    J = dense_map(view, ids, second, 0, 4)
    writes = torch.stack([result.writes.vector[result.writes.node == i][0] for i in at])
    vectors = torch.stack([result.vector(i)[:-1] for i in at])
    for rows in (functional.normalize(writes, dim=-1), vectors):
        torch.testing.assert_close(rows @ rows.T, torch.eye(len(at)).double(), atol=1e-7, rtol=0)
    pulled = functional.normalize(writes, dim=-1) @ J
    values = torch.tensor([result.nodes[i].eigenvalue for i in at]).double()
    torch.testing.assert_close(pulled.square().sum(-1), values)
    aligned = functional.cosine_similarity(pulled, vectors)
    torch.testing.assert_close(aligned.abs(), torch.ones(len(at)).double())
    if m == "all":
        singular = torch.linalg.svdvals(J)
        torch.testing.assert_close(values.sort(descending=True)[0], singular.square())


@pytest.mark.parametrize("m", nightly([2, 3, 8, "all"], [3, "all"]))
def test_directions_of_one_text_are_exact_at_every_resolution(m):
    """They are orthonormal in what they read."""
    view = view_of(n_layers=2, bias=True)
    result = flow(view, random_text(seed=1), DIRECTION, directions=m, threshold=0)
    check(result, result.value, tolerance=1e-11)
    assert not [n for n in result.nodes if n.kind == "rest" and n.part == "mlp"]
    at = numbers_of(result, kind="direction", layer=0, position=4)
    assert len(at) == (17 if m == "all" else m)
    vectors = torch.stack([result.vector(i) for i in at])
    torch.testing.assert_close(vectors @ vectors.T, torch.eye(len(at)).double(), atol=1e-10, rtol=0)


def test_each_way_to_ask_for_a_flow_has_the_same_defaults():
    ways = [signature(ask).parameters for ask in (flow, read_flow, answer_question)]
    for name in ("directions", "threshold", "through_patterns", "ablate"):
        assert len({way[name].default for way in ways}) == 1, name
