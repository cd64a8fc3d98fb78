"""Parts of a flow in their weights: a dense reference, effects by hand, and pairs of tokens."""

import pytest
import torch

from bilens.analyses import language
from bilens.errors import NotBilinearError
from bilens.flows import Node, flow, open_part, remove
from bilens.language import TokenDirection, attention_pairs
from bilens.language.heads import output_pairs
from tests.flows.flows import nodes_of
from tests.models import random_text, view_of
from tests.refusals import refused

DIRECTION = TokenDirection("t3", ("t7",))
TEXTS = [random_text(6, seed=1), random_text(6, seed=2)]
AT = 4
MLP = Node("mlp", 0.0, 0, "mlp", AT)


def flow_of(view, second=TEXTS[1]):
    return flow(view, TEXTS[0], DIRECTION, against=second, labels=0)


def inputs(view):
    """Return the change of the normalised input of the first MLP, and the sum of both."""
    first, second = (view.mlp_inputs(0, ids[None])[0, AT] for ids in TEXTS)
    return first - second, first + second


def dense_form(view, w):
    """Return the maps of the first MLP, and eigenvalues and eigenvectors of its form along w."""
    mlp = view.layer(0).mlp
    L, R, D = (x.weight() for x in (mlp.up, mlp.gate, mlp.down))
    L, R = L * mlp.norm.gain(), R * mlp.norm.gain()
    Q = torch.einsum("r,ri,rj->ij", w @ D, L, R)
    return L, R, D, *torch.linalg.eigh((Q + Q.T) / 2)


def test_eigenvectors_are_those_of_a_dense_reference(view):
    result = flow_of(view)
    opened = open_part(view, result, f"mlp.0@{AT}", k=40)
    *_, values, vectors = dense_form(view, result.adjoint(MLP))
    z, other = inputs(view)
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
    raised = v @ view.layer(0).mlp.norm.normalised(view.W_E).T
    names = [f"t{i}" for i in raised.argsort(descending=True)]
    assert frame.tokens[0] == ", ".join(names[:4])
    assert frame["opposite tokens"][0] == ", ".join(names[:-5:-1])
    moved = view.layer(0).heads.norm.normalised(view.W_E) @ view.ov(0).dense().sum(0) @ v
    names = [f"t{i}" for i in moved.argsort(descending=True)]
    assert frame["through heads"][0] == ", ".join(names[:4])


def test_all_eigenvectors_of_an_mlp_with_biases_are_the_whole():
    view = view_of(n_layers=2, norm="layer", bias=True)
    opened = open_part(view, flow_of(view), f"mlp.0@{AT}", k=40)
    assert opened.frame().flow.sum() == pytest.approx(opened.flow)
    assert opened.share == pytest.approx(1)


@pytest.mark.parametrize("k", [1, 3])
def test_the_share_is_that_of_runs_by_hand(view, k):
    result = flow_of(view)
    opened = open_part(view, result, f"mlp.0@{AT}", k=k)
    w = result.adjoint(MLP)
    L, R, D, _, vectors = dense_form(view, w)
    z, other = inputs(view)
    rows = (z @ vectors)[:, None] * vectors.T
    # B(mean, v) (v . z): what each eigenvector writes.
    written = ((rows @ L.T) * (R @ other) + (rows @ R.T) * (L @ other)) @ D.T / 2
    order = (written @ w).abs().argsort(descending=True)
    whole, left = written.sum(0), written[order[k:]].sum(0)

    def number(ids, row):
        def change(_, __, y):
            y = y.clone()
            y[0, AT] += row
            return y

        with view.layer(0).mlp.writer.register_forward_hook(change):
            logits = view.logits(ids[None])[0, -1]
        return float(logits[3] - logits[7])

    effects = []
    for row in (whole, left):
        lost = [number(TEXTS[0], 0 * row) - number(TEXTS[0], -row)]
        lost.append(number(TEXTS[1], row) - number(TEXTS[1], 0 * row))
        effects.append(sum(lost) / len(lost))
    assert opened.measured == pytest.approx(effects[0])
    assert opened.share == pytest.approx(1 - effects[1] / effects[0])
    assert abs(opened.share - 1) > 1e-3


def test_a_head_of_differential_attention_has_its_outputs():
    """No number of two tokens orders its pattern, so that it has no pairs of query and key."""
    view = view_of(n_layers=2, norm="none", attention="differential")
    result = flow_of(view)
    opened = open_part(view, result, "head.0.2@4")
    nodes = nodes_of(result, address="head.0.2@4")
    assert opened.flow == pytest.approx(sum(node.flow for node in nodes))
    assert opened.measured == pytest.approx(-remove(view, result, nodes).actual, rel=1e-6)
    ((name, frame),) = opened.tables().items()
    assert name == "OV of head.0.2"
    (pairs,) = output_pairs(view, [2], layer=0, k=10)
    assert frame.equals(pairs.frame())
    assert opened.about == ()


@pytest.mark.parametrize("attention", ["softmax", "bilinear"])
def test_a_head_has_its_pairs_of_tokens_and_the_rank_of_the_texts(attention):
    view = view_of(n_layers=2, norm="none", attention=attention)
    result = flow_of(view)
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
    strongest = max(nodes_of(result, kind="mlp", layer=0), key=lambda node: abs(node.flow))
    opened = open_part(view, result, "mlp.0")
    assert opened.part == f'{strongest.address} "{result.tokens[strongest.position]}"'


def test_a_command_opens_parts(view):
    asked = {"prompt": "t3 t4 t5", "token": "t3", "minus": "t7", "against": "t3 t4 t6"}
    reading = language.flow(view, **asked, weights="mlp.1,head.0.1@2")
    titles = {section.title for section in reading.sections()}
    assert {'mlp.1@2 "t5" in its weights', 'head.0.1@2 "t5" in its weights'} <= titles
    (mlp, head) = reading.record()["opened"]
    assert mlp["share"] == reading.opened[0].share
    assert {len(cells) for cells in head["weights"]["QK of head.0.1"].values()} == {10}


CLOSED = {
    "position=9, expected 0 to 5": lambda view: open_part(view, flow_of(view, None), "mlp.0@9"),
    "head.0.0@0 has no flow": lambda view: open_part(view, flow_of(view, TEXTS[0]), "head.0.0@0"),
}
GATED = {"an activation that is not linear": lambda v: open_part(v, flow_of(v, None), "mlp.0@4")}
test_parts_that_cannot_be_opened_are_said = refused(CLOSED)
test_gated_parts_are_not_bilinear = refused(
    GATED, NotBilinearError, given=lambda: view_of(n_layers=2, mlp="swiglu")
)
