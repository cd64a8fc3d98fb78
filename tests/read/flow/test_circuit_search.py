"""Circuits keep what they are asked to, are those of models whose parts are known, and measure."""

import itertools
from dataclasses import replace

import numpy as np
import pytest
import torch

from bilens.analyses import language
from bilens.errors import BilensError
from bilens.read.flow import Question, circuit, patch
from bilens.read.flow.circuit_search import (
    Cases,
    everything_but,
    found_circuit,
    integrated_gradients,
    jaccards,
    parts_in,
    search,
    without,
)
from bilens.read.flow.question import read_questions
from bilens.residual import ResidualModel
from tests.families import exact_norms, family_view
from tests.language import random_model, toy_tokenizer, view_of
from tests.read.flow.flows import QUESTIONS, check_gradient, write_questions


@pytest.fixture(scope="module")
def view():
    return view_of(n_layers=2, norm="rms")


@pytest.mark.parametrize("by_position", [False, True])
@pytest.mark.parametrize("name", ["llama", "gemma3", "gpt2"])
def test_all_parts_restore_everything_and_no_parts_nothing(name, by_position):
    model = family_view(name)
    with exact_norms():
        cases = Cases.of(model, QUESTIONS[: 1 if by_position else 3], by_position=by_position)
        ends = torch.stack([torch.ones(cases.shape), torch.zeros(cases.shape)]).double()
        f = cases.faithfulness(ends)
    # What reaches the logits without any part is the embedding alone.
    assert float(f[0]) == pytest.approx(1, abs=1e-5)
    assert abs(float(f[1])) < 1
    assert float(f[1]) != pytest.approx(1, abs=1e-3)


@pytest.mark.parametrize("by_position", [False, True])
def test_gradients_of_f_are_central_differences(view, by_position):
    cases = Cases.of(view, QUESTIONS[: 1 if by_position else 2], by_position=by_position)
    check_gradient(cases)


def test_integrated_gradients_add_up_to_f(view):
    cases = Cases.of(view, QUESTIONS[:3])
    generator = torch.Generator().manual_seed(0)
    mask = torch.rand(cases.shape, generator=generator) < 0.7
    gradients = integrated_gradients(cases, mask)
    # Gauss-Legendre quadrature with three points leaves an error of the sixth derivative.
    f = cases.faithfulness(torch.stack([mask, mask & False]).double())
    assert float(gradients[mask].sum()) == pytest.approx(float(f[0] - f[1]), abs=5e-4)
    assert abs(float(f[0])) > 0.1


@pytest.mark.parametrize("keep", [0.5, 0.9])
def test_a_circuit_keeps_f_and_no_part_of_it_can_go(view, keep):
    cases = Cases.of(view, QUESTIONS[:3])
    trail = search(cases, keep)
    sizes = [int(mask.sum()) for mask in trail]
    assert sizes == sorted(sizes, reverse=True)
    mask = trail[-1]
    assert float(cases.faithfulness(mask[None].double())[0]) >= keep
    smaller = [without(mask, place) for place in mask.flatten().nonzero()]
    assert float(cases.faithfulness(torch.stack(smaller).double()).max()) < keep


def test_the_circuit_of_a_model_with_known_parts_is_these():
    """Only one head and one MLP write anything, and the MLP reads the head."""
    model = random_model(n_layers=2, norm="none", mlp="bilinear", attention="softmax")
    with torch.no_grad():
        model.blocks[0].mlp.out.weight.zero_()
        model.blocks[1].attn.out.weight.zero_()
        model.blocks[0].attn.out.weight[:, 4:].zero_()
        model.blocks[1].mlp.out.weight.mul_(30)
    view = ResidualModel(model, toy_tokenizer())
    assert view.layer(0).heads.d_head == 4
    cases = Cases.of(view, QUESTIONS[:2])
    found = found_circuit(cases, Cases.of(view, QUESTIONS[2:]), 0.999)
    assert {str(part) for part in parts_in(found.mask)} == {"head.0.0", "mlp.1"}
    assert found.restored.value == pytest.approx(1)
    assert [str(part) for part in found.needed] == ["head.0.0"]


def test_effects_of_parts_are_their_patches(view):
    case = QUESTIONS[0]
    effects = patch(view, case.text, case.token, minus=case.minus, against=case.against).frame()
    by_part = effects.set_index("part")
    cases = Cases.of(view, QUESTIONS[:1])
    found = found_circuit(cases, cases, 0.9)
    assert found.effects
    for effect in found.effects:
        expected = by_part.loc[str(effect.part)]
        assert effect.noising * cases.cases[0].change == pytest.approx(expected["noising"])
        assert effect.denoising * cases.cases[0].change == pytest.approx(expected["denoising"])
        assert len(effect.raises) <= 3
    assert any(effect.raises and effect.lowers for effect in found.effects)


def test_everything_else_has_the_needed_parts_in_place(view):
    cases = Cases.of(view, QUESTIONS[:2])
    found = found_circuit(cases, cases, 0.9)
    others = everything_but(found)
    assert (others & found.mask).sum() == len(found.needed)
    assert (others | found.mask).all()
    f = cases.faithfulness(others[None].double())
    assert found.left.value == pytest.approx(float(f[0]))


def test_several_tasks_have_a_matrix(view):
    others = [
        Question(q.text, "t9", ("t0",), q.against.replace("t7", "t5"), "two") for q in QUESTIONS
    ]
    reading = circuit(view, [*QUESTIONS, *others], finding=2)
    assert [one.task for one in reading.circuits] == ["one", "two"]
    for row, of_task in enumerate(reading.circuits):
        assert of_task.questions == (2, 2)
        assert reading.transfer.restored[row][row].value == pytest.approx(of_task.restored.value)
        assert reading.transfer.left[row][row].value == pytest.approx(of_task.left.value)
    frame = reading.transfer.frame(["one", "two"])
    assert list(frame.columns) == ["circuit", "one", "two"]
    assert set(reading.frame()["task"]) == {"one", "two"}
    assert reading.plot().data[0].type == "heatmap"
    assert "parts restore" in dict(reading.facts())["one"]


def test_circuits_of_resampled_questions_say_how_stable_one_is():
    view = view_of(norm="rms")
    cases = Cases.of(view, QUESTIONS)
    assert cases.changes.shape == (4,)
    similar = jaccards(cases, 0.9, 3)
    assert len(similar) == 3
    # The same bootstraps by hand; a circuit is equal to itself.
    drawn = np.random.default_rng(0).integers(4, size=(3, 4))
    masks = [search(Cases.of(view, [QUESTIONS[i] for i in row]), 0.9)[-1] for row in drawn]
    expected = [(a & b).sum() / (a | b).sum() for a, b in itertools.combinations(masks, 2)]
    assert similar == pytest.approx([float(x) for x in expected])
    reading = circuit(view, QUESTIONS, finding=2, bootstraps=2)
    assert "Circuits of resampled questions share" in reading.facts()[0][1]


def test_one_question_has_parts_at_positions(view):
    case = QUESTIONS[0]
    reading = language.circuit(view, case.text, case.token, minus=case.minus, against=case.against)
    assert "`bilens questions MODEL` with the same options proposes others" in reading.notes[-1]
    (found,) = reading.circuits
    assert reading.n_parts == 2 * 5 * 4
    assert all("@" in part for part in reading.frame()["part"])
    assert found.ordering >= 0.9
    assert found.restored.value == pytest.approx(found.ordering)
    assert "of the change on this question" in reading.answer(found)
    positions = {
        (node.layer, node.position) for node in reading.graph.nodes if node.layer is not None
    }
    assert positions <= {(e.part.layer, e.part.position) for e in found.effects}
    assert len(reading.sections()) == 4


def test_the_answer_says_which_parts_stay_in_place(view):
    reading = circuit(view, QUESTIONS, finding=2)
    found = reading.circuits[0]
    parts = tuple(effect.part for effect in found.effects)
    assert len(parts) > 1
    left = f"{found.left.value:.0%} is left"
    for needed, said in (
        ((), f"without them {left}"),
        (parts[:1], f"without them, with {parts[0]} in place, {left}"),
        (parts, "any circuit needs " + ", ".join(map(str, parts))),
    ):
        other = replace(found, needed=needed)
        answer = replace(reading, circuits=(other,)).answer(other)
        assert said in answer
        assert ("is left" in answer) == (needed != parts)


def test_questions_come_from_a_file(tmp_path, view):
    path = tmp_path / "pairs.tsv"
    write_questions(path, QUESTIONS[:2])
    reading = language.circuit(view, questions=str(path))
    assert not any("proposes" in note for note in reading.notes)
    assert reading.circuits[0].questions == (1, 1)
    assert reading.question.text == QUESTIONS[1].text
    path.write_text("a\tb\n")
    with pytest.raises(BilensError, match="line 1 has 2 columns; expected"):
        read_questions(path)
    path.write_text("\n")
    with pytest.raises(BilensError, match="holds no line"):
        read_questions(path)
    with pytest.raises(BilensError, match="is no file and no task"):
        read_questions(tmp_path / "none")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, "expected one of them: --prompt"),
        ({"prompt": "t1", "questions": "a.tsv"}, "expected one of them: --prompt"),
        ({"prompt": "t1 t2", "token": "t3"}, "need a second text each"),
        ({"prompt": "t4 t2", "token": "t3", "against": "t4"}, "against has"),
        ({"prompt": "t4 t2", "token": "t3", "against": "t4 t2"}, "have the same logit"),
    ],
)
def test_what_is_no_question_is_said(view, arguments, message):
    with pytest.raises(BilensError, match=message):
        language.circuit(view, **arguments)
