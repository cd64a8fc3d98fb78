"""Directions of a task: a dense reference, the flows that they hold, and exchanges by hand."""

from dataclasses import replace

import pytest
import torch

from bilens.analyses import language
from bilens.circuits import Cases, MLPDirections, edit_mlp_along, task_directions
from bilens.circuits.directions import Snapshots, balance, find_directions, share_held
from bilens.flows.split import flows as flows_of
from bilens.transformer import Pass
from tests.families import exact_norms, family_view
from tests.flows.flows import QUESTIONS, write_questions
from tests.models import view_of


@pytest.fixture(scope="module")
def found(biased):
    return task_directions(biased, QUESTIONS, k=3, strongest=4)


def rows(n, d=7, rank=7, seed=0):
    torch.manual_seed(seed)
    return torch.randn(n, rank).double() @ torch.randn(rank, d).double()


@pytest.mark.parametrize(("n", "rank"), [(40, 7), (7, 7), (4, 7), (40, 3), (1, 1)])
@pytest.mark.parametrize("k", [1, 3, 7])
def test_directions_are_those_of_a_dense_reference(n, rank, k):
    changes, adjoints = rows(n, rank=rank), rows(n, rank=rank, seed=1)
    (t, r), values = balance(changes, adjoints, k)
    count = min(k, n, rank)
    assert t.shape == r.shape == (count, 7)
    torch.testing.assert_close(r @ t.T, torch.eye(count).double(), atol=1e-9, rtol=0)
    P, A = changes.T @ changes, adjoints.T @ adjoints
    expected = torch.linalg.eigvals(P @ A).real.sort(descending=True)[0]
    torch.testing.assert_close(values.square(), expected[:count])
    torch.testing.assert_close(P @ A @ t.T, t.T * values.square())
    torch.testing.assert_close(A @ P @ r.T, r.T * values.square())
    # Both moments are the singular values in these coordinates.
    torch.testing.assert_close(r @ P @ r.T, values.diag())
    torch.testing.assert_close(t @ A @ t.T, values.diag())


def test_a_share_of_the_identity_is_added_to_both_moments():
    changes, adjoints = rows(4), rows(4, seed=1)
    (t, r), values = balance(changes, adjoints, 7, shrink=0.5)
    assert t.shape == (7, 7)
    for size, moment, given in ((r, changes.T @ changes, t), (t, adjoints.T @ adjoints, r)):
        shrunk = moment + 0.5 * moment.trace() / 7 * torch.eye(7).double()
        torch.testing.assert_close(size @ shrunk @ size.T, values.diag())
        torch.testing.assert_close(size @ given.T, torch.eye(7).double())


def test_directions_do_not_depend_on_coordinates():
    changes, adjoints, M = rows(20), rows(20, seed=1), rows(7, seed=2)
    (t, r), values = balance(changes, adjoints, 3)
    (u, s), others = balance(changes @ M.T, adjoints @ torch.linalg.inv(M), 3)
    torch.testing.assert_close(others, values)
    torch.testing.assert_close(u.T @ s, M @ t.T @ r @ torch.linalg.inv(M))


@pytest.mark.parametrize("name", ["llama", "gemma3", "gpt2", "mixtral"])
def test_flows_and_remainders_are_the_flow_through_the_mlp(name):
    model = family_view(name)
    with torch.no_grad(), exact_norms():
        snapshots = Snapshots.of(model, QUESTIONS[0])
        (through,) = flows_of(model, QUESTIONS[:1])
    of_mlps = through.mlps / abs(through.value)
    torch.testing.assert_close((snapshots.changes * snapshots.adjoints).sum(-1), of_mlps)
    assert float(of_mlps.abs().max()) > 1e-4
    directions, _ = find_directions([snapshots], model.d_model)
    for layer, of_layer in enumerate(directions):
        flows = of_layer.flows(snapshots.changes[layer], snapshots.adjoints[layer])
        torch.testing.assert_close(flows.sum(-1), of_mlps[layer], atol=1e-9, rtol=1e-6)
    few, _ = find_directions([snapshots], 1)
    share, _ = share_held([snapshots], few)
    assert 0 < share < share_held([snapshots], directions)[0] == pytest.approx(1)


def test_all_directions_leave_nothing_on_any_text(biased):
    with torch.no_grad():
        snapshots = [Snapshots.of(biased, question) for question in QUESTIONS]
    everything = MLPDirections(*torch.eye(biased.d_model).double().expand(2, -1, -1))
    nothing = MLPDirections(*torch.zeros(2, 0, biased.d_model).double())
    share, shares = share_held(snapshots, [everything, nothing])
    assert shares.tolist() == pytest.approx([1, 0])
    sizes = torch.stack([(m.changes * m.adjoints).sum(-1).abs().sum(1) for m in snapshots]).sum(0)
    assert share == pytest.approx(float(sizes[0] / sizes.sum()))


def test_remainders_of_two_positions_do_not_cancel():
    one = torch.ones(1, 2, 1).double()
    snapshots = Snapshots(one, torch.tensor([[[1.0], [-1.0]]]).double())
    twice = MLPDirections(2 * one[0, :1], one[0, :1])
    assert share_held([snapshots], [twice])[0] == 0
    still = Snapshots(0 * one, one)
    assert share_held([snapshots, still], [twice])[1].tolist() == [0]
    share, shares = share_held([still], [twice])
    assert (share, shares.tolist()) == (0, [0])


def test_a_layer_that_writes_one_direction_has_it():
    view = view_of(n_layers=2, norm="rms")
    v, weight = view.W_U[:, 5] - view.W_U[:, 6], view.model.blocks[1].mlp.out.weight
    weight.copy_(torch.outer(v, weight[0]))
    found = task_directions(view, QUESTIONS, k=3)
    t = found.directions[1].written[0]
    assert float(torch.cosine_similarity(t, v, dim=0).abs()) > 0.99
    assert float(found.shares[1]) > 0.95
    part = next(part for part in found.strongest if part.layer == 1)
    with torch.no_grad():
        snapshots = [Snapshots.of(view, question) for question in QUESTIONS]
    amounts = [(m.changes[1] @ v * (m.adjoints[1] @ v).abs()).sum() for m in snapshots]
    rises = sum(float(amount.sign()) for amount in amounts)
    raised, lowered = (part.raises, part.lowers) if rises > 0 else (part.lowers, part.raises)
    assert "t5" in raised
    assert "t6" in lowered


@pytest.mark.parametrize("name", [None, "gemma3", "mixtral"])
def test_effects_are_exchanges_by_hand(name):
    view = family_view(name) if name else view_of(n_layers=2, norm="rms", residual_scale=0.7)
    found = task_directions(view, QUESTIONS, k=3, strongest=4)
    part = found.strongest[0]
    t, r = (of_side[part.number - 1] for of_side in found.directions[part.layer])
    mlp = view.modules.layers[part.layer].mlp
    effects, flows, changes = [], [], []
    for question in QUESTIONS[2:]:
        ids = [view.ids(text) for text in (question.text, question.against)]
        writes = []
        with torch.no_grad():
            with mlp.module.register_forward_hook(lambda _, __, y, w=writes: w.append(y)):
                logits = [view.logits(text[None])[0, -1] for text in ids]
            amounts = (writes[0] - writes[1])[0].double() @ r
            added = (amounts[:, None] * t).to(writes[0])
            moved = []
            for text, rows in zip(ids, (-added, added), strict=True):
                with mlp.module.register_forward_hook(lambda _, __, y, rows=rows: y + rows):
                    moved.append(view.logits(text[None])[0, -1])
            m = Snapshots.of(view, question)
        first, second, less, more = (float(x[5] - x[6]) for x in (*logits, *moved))
        effects.append((first - less + more - second) / 2)
        changes.append(first - second)
        flow = (m.adjoints[part.layer] @ t) * (m.changes[part.layer] @ r)
        flows.append(float(flow.sum()) * abs(changes[-1]))
    signs, size = torch.tensor(changes).sign(), sum(map(abs, changes))
    assert part.effect == pytest.approx(float(signs @ torch.tensor(effects)) / size, rel=1e-3)
    assert part.flow == pytest.approx(float(signs @ torch.tensor(flows)) / size, rel=1e-3)
    assert abs(part.effect) > 1e-3


def test_r2_is_that_of_all_exchanges(biased):
    alone = task_directions(biased, [QUESTIONS[0], QUESTIONS[2]], k=2, strongest=4)
    change = float(Cases.of(biased, QUESTIONS[2:3]).changes[0])
    numbers = torch.tensor([[x.effect, x.flow] for x in alone.strongest]).double() * change
    errors = (numbers[:, 0] - numbers[:, 1]).square().sum()
    around = (numbers[:, 0] - numbers[:, 0].mean()).square().sum()
    assert alone.r2 == pytest.approx(1 - float(errors / around))


def test_the_order_of_the_texts_turns_names_and_no_number(biased, found):
    turned = [replace(q, text=q.against, against=q.text) for q in QUESTIONS]
    other = task_directions(biased, turned, k=3, strongest=4)
    assert other.share == pytest.approx(found.share)
    for a, b in zip(found.strongest, other.strongest, strict=True):
        assert (a.layer, a.number) == (b.layer, b.number)
        assert (a.flow, a.effect) == pytest.approx((b.flow, b.effect), rel=1e-3)


def test_the_first_half_of_each_task_finds(biased):
    others = [replace(question, task="two") for question in QUESTIONS[:3]]
    both = task_directions(biased, [*QUESTIONS, *others], k=2, strongest=1)
    assert both.questions == (4, 3)
    with torch.no_grad():
        snapshots = [Snapshots.of(biased, question) for question in (*QUESTIONS[:2], *others[:2])]
    directions, values = find_directions(snapshots, 2)
    torch.testing.assert_close(both.values, tuple(values))
    assert torch.equal(both.directions[0].written, directions[0].written)


def test_the_reading_of_a_file(biased, found, tmp_path):
    path = tmp_path / "pairs.tsv"
    write_questions(path, QUESTIONS)
    reading = language.task_directions(biased, questions=str(path), k=3, strongest=4)
    frame = reading.frame()
    assert frame.equals(found.frame())
    assert list(frame.columns) == ["layer", "number", "flow", "measured effect", "raises", "lowers"]
    facts = dict(reading.facts())
    assert (facts["questions that find"], facts["questions that measure"]) == (2, 2)
    assert facts["R2 of exchanges by flows"] == found.r2 <= 1
    assert dict(replace(reading, r2=None).facts()).keys() < facts.keys()
    assert reading.sections()[0].title == "Directions of a task"


@pytest.mark.parametrize("scale", [0.0, -1.0])
def test_an_edit_scales_directions_of_the_output(biased, found, scale):
    t, r = found.directions[1]
    ids = biased.ids(QUESTIONS[0].text)
    edited = edit_mlp_along(biased, t, r, layer=1, scale=scale)
    before, after = (Pass.of(model, ids[None]).outputs[1].double() for model in (biased, edited))
    expected = before - (1 - scale) * before @ r.T @ t
    torch.testing.assert_close(after, expected, atol=1e-5, rtol=1e-4)
    assert not torch.allclose(after, before, atol=1e-3)
    unchanged = (Pass.of(model, ids[None]).outputs[0] for model in (edited, biased))
    torch.testing.assert_close(*unchanged)
