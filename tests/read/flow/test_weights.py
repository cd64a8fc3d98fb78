"""Parts of a flow in their weights: a dense reference, effects by hand, and pairs of tokens."""

import pytest
import torch

from bilens.errors import BilensError, NotBilinearError
from bilens.read.flow import flow, open_part, read_flow, remove
from bilens.read.flow.nodes import Node
from bilens.read.language import TokenDirection, attention_pairs
from bilens.read.language.heads import output_pairs
from tests.models import random_text, view_of
from tests.read.flow.flows import nodes_of

DIRECTION = TokenDirection("t3", ("t7",))
TEXTS = [random_text(6, seed=1), random_text(6, seed=2)]
AT = 4
MLP = Node("mlp", 0.0, 0, "mlp", AT)


def flow_of(view, second):
    return flow(view, TEXTS[0], DIRECTION, against=second, ablate=0)


def inputs(view, second):
    """Return the normalised input of the first MLP in each run."""
    texts = TEXTS[: 1 + (second is not None)]
    return [view.mlp_inputs(0, ids[None])[0, AT] for ids in texts]


@pytest.mark.parametrize("second", [None, TEXTS[1]])
def test_eigenvectors_are_those_of_a_dense_reference(view, second):
    result = flow_of(view, second)
    opened = open_part(view, result, f"mlp.0@{AT}", k=40)
    mlp, w = view.layer(0).mlp, result.adjoint(MLP)
    gain = mlp.norm.gain()
    L, R, D = (x.weight() for x in (mlp.up, mlp.gate, mlp.down))
    L, R = L * gain, R * gain
    Q = torch.einsum("r,ri,rj->ij", w @ D, L, R)
    values, vectors = torch.linalg.eigh((Q + Q.T) / 2)
    n = inputs(view, second)
    z, other = (n[0], n[0]) if second is None else (n[0] - n[1], n[0] + n[1])
    flows = values * (z @ vectors) * (other @ vectors)
    order = flows.abs().argsort(descending=True)
    frame = opened.frame()
    torch.testing.assert_close(torch.tensor(frame.flow.values), flows[order])
    torch.testing.assert_close(torch.tensor(frame.eigenvalue.values), values[order])
    assert opened.flow == pytest.approx(float(flows.sum()))
    # All eigenvectors together write the output.
    assert opened.share == pytest.approx(1)
    v = vectors[:, order[0]]
    v = v if float(v @ z) > 0 else -v
    names = [f"t{i}" for i in (v @ mlp.norm.normalised(view.W_E).T).argsort(descending=True)]
    assert frame.tokens[0] == ", ".join(names[:4])
    assert frame["opposite tokens"][0] == ", ".join(names[:-5:-1])
    moved = view.layer(0).heads.norm.normalised(view.W_E) @ view.ov(0).dense().sum(0) @ v
    names = [f"t{i}" for i in moved.argsort(descending=True)]
    assert frame["through heads"][0] == ", ".join(names[:4])


@pytest.mark.parametrize("second", [None, TEXTS[1]])
def test_all_eigenvectors_of_an_mlp_with_biases_are_the_whole(second):
    view = view_of(n_layers=2, norm="layer", bias=True)
    opened = open_part(view, flow_of(view, second), f"mlp.0@{AT}", k=40)
    assert opened.frame().flow.sum() == pytest.approx(opened.flow)
    assert opened.share == pytest.approx(1)


@pytest.mark.parametrize("second", [None, TEXTS[1]])
@pytest.mark.parametrize("k", [1, 3])
def test_the_share_is_that_of_runs_by_hand(view, second, k):
    result = flow_of(view, second)
    opened = open_part(view, result, f"mlp.0@{AT}", k=k)
    mlp, w = view.layer(0).mlp, result.adjoint(MLP)
    L, R, D = (x.weight() for x in (mlp.up, mlp.gate, mlp.down))
    L, R = L * mlp.norm.gain(), R * mlp.norm.gain()
    Q = torch.einsum("r,ri,rj->ij", w @ D, L, R)
    _, vectors = torch.linalg.eigh((Q + Q.T) / 2)
    n = inputs(view, second)
    z, mean = (n[0], n[0]) if second is None else (n[0] - n[1], (n[0] + n[1]) / 2)
    rows = (z @ vectors)[:, None] * vectors.T
    # B(mean, v) (v . z): what each eigenvector writes.
    written = ((rows @ L.T) * (R @ mean) + (rows @ R.T) * (L @ mean)) @ D.T
    written = written / 2 if second is None else written
    order = (written @ w).abs().argsort(descending=True)
    whole, left = written.sum(0), written[order[k:]].sum(0)

    def number(ids, row):
        def change(_, __, y):
            y = y.clone()
            y[0, AT] += row
            return y

        with mlp.writer.register_forward_hook(change):
            logits = view.logits(ids[None])[0, -1]
        return float(logits[3] - logits[7])

    effects = []
    for row in (whole, left):
        lost = [number(TEXTS[0], 0 * row) - number(TEXTS[0], -row)]
        if second is not None:
            lost.append(number(second, row) - number(second, 0 * row))
        effects.append(sum(lost) / len(lost))
    assert opened.measured == pytest.approx(effects[0])
    assert opened.share == pytest.approx(1 - effects[1] / effects[0])
    assert abs(opened.share - 1) > 1e-3


@pytest.mark.parametrize("second", [None, TEXTS[1]])
def test_a_head_of_differential_attention_has_its_outputs(second):
    """No number of two tokens orders its pattern, so that it has no pairs of query and key."""
    view = view_of(n_layers=2, norm="none", attention="differential")
    result = flow_of(view, second)
    opened = open_part(view, result, "head.0.2@4")
    nodes = nodes_of(result, address="head.0.2@4")
    assert opened.flow == pytest.approx(sum(node.flow for node in nodes))
    assert opened.measured == pytest.approx(-remove(view, result, nodes).actual, rel=1e-6)
    ((name, frame),) = opened.tables().items()
    assert name == "OV of head.0.2"
    (pairs,) = output_pairs(view, [2], layer=0, k=10)
    assert frame.equals(pairs.frame())
    assert opened.about == ()


@pytest.mark.parametrize("second", [None, TEXTS[1]])
@pytest.mark.parametrize("attention", ["softmax", "bilinear"])
def test_a_head_has_its_pairs_of_tokens_and_the_rank_of_the_texts(second, attention):
    view = view_of(n_layers=2, norm="none", attention=attention)
    result = flow_of(view, second)
    opened = open_part(view, result, "head.0.2@4")
    nodes = nodes_of(result, address="head.0.2@4")
    assert opened.measured == pytest.approx(-remove(view, result, nodes).actual, rel=1e-6)
    assert opened.flow == pytest.approx(sum(node.flow for node in nodes))
    source = max(nodes, key=lambda node: abs(node.flow)).source
    n = view.W_E
    scores = [n @ qk.dense()[2] @ n.T for qk in view.qk(0, 4 - source)]
    scores = torch.stack(scores).prod(0)[TEXTS[0][4]]
    key = TEXTS[0][source]
    rank = 1 + int((scores > scores[key]).sum())
    ((name, value),) = opened.about
    assert name == f'rank of "t{int(key)}" as key of "t{int(TEXTS[0][4])}"'
    assert value == f"{rank} of {view.vocab_size}"
    qk, ov = opened.tables().values()
    assert qk.equals(attention_pairs(view, [2], layer=0, k=10, distance=4 - source)[0].frame())
    assert ov.equals(output_pairs(view, [2], layer=0, k=10)[0].frame())


def test_without_a_position_the_strongest_is_taken(view):
    result = flow_of(view, TEXTS[1])
    nodes = [node for node in result.nodes if node.kind == "mlp" and node.layer == 0]
    strongest = max(nodes, key=lambda node: abs(node.flow))
    opened = open_part(view, result, "mlp.0")
    assert opened.part == f'{strongest.address} "{result.tokens[strongest.position]}"'


def test_a_command_opens_parts(view):
    reading = read_flow(
        view, "t3 t4 t5", DIRECTION, against="t3 t4 t6", weights=("mlp.1", "head.0.1@2")
    )
    titles = [section.title for section in reading.sections()]
    assert 'mlp.1@2 "t5" in its weights' in titles
    assert 'head.0.1@2 "t5" in its weights' in titles
    (mlp, head) = reading.record()["weights"]
    assert mlp["share of the strongest eigenvectors"] == reading.opened[0].share
    assert len(head["QK of head.0.1"]) == 10


def test_parts_that_cannot_be_opened_are_said(view):
    result = flow_of(view, None)
    with pytest.raises(BilensError, match="position=9, expected 0 to 5"):
        open_part(view, result, "mlp.0@9")
    same = flow(view, TEXTS[0], DIRECTION, against=TEXTS[0])
    with pytest.raises(BilensError, match="head.0.0@0 has no flow"):
        open_part(view, same, "head.0.0@0")
    gated = view_of(n_layers=2, mlp="swiglu")
    with pytest.raises(NotBilinearError, match="an activation that is not linear"):
        open_part(gated, flow_of(gated, None), "mlp.0@4")
