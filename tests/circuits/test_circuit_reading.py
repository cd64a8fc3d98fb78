"""A circuit says only what is true of its questions: who found, who measures, and who answers."""

import json
from dataclasses import asdict, replace
from functools import partial
from weakref import WeakSet

import pandas as pd
import pytest
import torch

from bilens.circuits import Cases, case, circuit, patch, task_directions
from bilens.circuits.case import both_passes, make_cases
from bilens.circuits.measures import Split, part_effects
from bilens.circuits.questions import USES, heading_of, typical
from bilens.errors import BilensError
from bilens.flows import Question
from bilens.flows.fitted import fit
from bilens.sections import plain
from bilens.transformer.passes import Pass
from tests.flows.flows import answered

# Of one template; the words differ.
MANY = [
    Question(f"t{a} t2 t{b} t4", "t5", ("t6",), f"t{a} t7 t{b} t4", "one")
    for a, b in [(1, 3), (2, 9), (3, 1), (4, 8), (8, 3), (9, 1), (5, 9), (6, 3), (7, 1), (6, 8)]
]


@pytest.fixture(scope="module")
def right(view):
    return answered(view, MANY)


@pytest.fixture(scope="module")
def many(view, right):
    return circuit(view, right, level="parts", keep=0.6)


def reverse(question):
    return replace(question, text=question.against, against=question.text)


def sentence(reading):
    return reading.text(reading.answers[0])


def test_a_question_counts_by_its_absolute_change_whichever_text_is_first(view):
    questions = [MANY[0], reverse(MANY[1]), MANY[2], reverse(MANY[3])]
    cases = Cases.of(view, questions)
    whole = cases.values(torch.ones(1, *cases.shape).double())[0]
    assert whole.tolist() == pytest.approx(cases.changes.tolist())
    expected = torch.zeros(2, view.n_layers, view.n_heads + 1).double()
    for q in questions:
        effects = patch(view, q.text, q.token, minus=q.minus, against=q.against)
        sign = 1 if effects.change > 0 else -1
        expected += sign * torch.stack([effects.noising, effects.denoising])
    assert len({case.change > 0 for case in cases.cases}) == 2
    for effect in part_effects(cases, torch.ones(cases.shape, dtype=torch.bool)):
        number = view.n_heads if effect.part.number is None else effect.part.number
        by_patches = expected[:, effect.part.layer, number] / cases.changes.sum()
        assert [effect.noising, effect.denoising] == pytest.approx(by_patches.tolist())


@pytest.mark.parametrize("level", ["stages", "parts"])
def test_questions_of_both_signs_count_by_their_absolute_change(view, level):
    mixed = [q if i % 2 else reverse(q) for i, q in enumerate(MANY)]
    questions = answered(view, mixed)
    reading = circuit(view, questions, level=level)
    (found,) = reading.circuits
    uses = [one.use for one in reading.answers[0].questions]
    measuring = Cases.of(view, questions[uses.index("measures") :])
    measuring = measuring.by("role" if level == "stages" else "")
    assert 0 < sum(case.change < 0 for case in measuring.cases) < len(measuring)
    f = measuring.values(found.mask[None].double())[0]
    share = float(f.sum() / measuring.changes.sum())
    assert found.measured.restored.value == pytest.approx(share)


def test_a_circuit_says_in_how_many_questions_its_answer_is_ahead(view, right):
    reading = circuit(view, right, level="parts", keep=0.3)
    (found,) = reading.circuits
    count = 0
    for one in Cases.of(view, right[5:]).cases:
        cases = Cases(view, [one])
        rise = float(cases.values(found.mask[None].double())[0, 0])
        # One token is subtracted: the answer is ahead if the number is above 0.
        count += one.ends[1] + (rise if one.change > 0 else -rise) > 0
    assert found.measured.right == count
    assert f", and answer {count}." in sentence(reading)
    vector = view.direction("t5", minus="t6")
    asked = [replace(q, token="", minus=(), vector=vector) for q in MANY]
    reading = circuit(view, asked)
    assert reading.circuits[0].measured.right is None
    assert "of which" not in sentence(reading)
    whole = [replace(q, minus=()) for q in MANY]
    best = [view.logits(view.ids(q.text)[None])[0, -1].argmax() for q in whole]
    whole = [replace(q, token=f"t{int(token)}") for q, token in zip(whole, best, strict=True)]
    assert all(one.use != "left out" for one in circuit(view, whole).answers[0].questions)


def test_closeness_is_of_single_questions(view, right, many):
    (found,) = many.circuits
    cases = Cases.of(view, right[5:])
    f = cases.values(found.mask[None].double())[0] / cases.changes
    assert found.measured.closeness == pytest.approx(float(1 - (1 - f).abs().mean()))


def test_what_is_more_than_all_is_said(many):
    (answer,), (found,) = many.answers, many.circuits

    def text(**changed):
        other = replace(found, measured=replace(found.measured, **changed))
        return many.text(replace(answer, circuit=other))

    for value, said in ((1.19, False), (1.21, True)):
        restored = replace(found.measured.restored, value=value)
        assert ("more than all, since parts that oppose" in text(restored=restored)) == said


def test_the_heading_asks_why_only_what_is_so(view):
    for question in [*MANY, *map(reverse, MANY)]:
        texts = question.text, question.against
        logits = [view.logits(view.ids(text)[None])[0, -1] for text in texts]
        a, b = (float(x[5] - x[6]) for x in logits)
        there, here = f"{b:+#.3g} after “{texts[1]}”", f"{a:+#.3g} after “{texts[0]}”"
        expected = f'why is "t5" minus "t6" {there}, and {here}?'
        if a > 0 > b:
            expected = f'why does "t5" follow “{texts[0]}”, and not “{texts[1]}”?'
        (case,) = make_cases(view, [question])
        assert heading_of(case) == f"one: {expected}"
        (case,) = make_cases(view, [replace(question, task="")])
        assert heading_of(case) == expected.capitalize()[0] + expected[1:]


def test_the_typical_question_has_the_median_change(view, right):
    cases = make_cases(view, right)
    changes = sorted(abs(case.change) for case in cases)
    asking = [case for case in cases if case.answers == (True, False)]
    if not asking:
        assert abs(typical(cases).change) == changes[len(changes) // 2]
    assert typical(cases) in (asking or cases)


def test_a_second_run_without_a_text_has_a_name(view):
    ids = view.ids(MANY[0].against)
    for against, name in (
        (ids, f"“{MANY[0].against}”"),
        (view.W_E[ids], "other embeddings"),
        (view.W_E.mean(0), "other embeddings"),
        (("t1 t7 t3 t4", "t1 t9 t3 t4"), "the mean of “t1 t7 t3 t4”, “t1 t9 t3 t4”"),
    ):
        reading = circuit(view, [replace(MANY[0], against=against)])
        title = reading.sections()[0].title
        assert title == reading.heading
        assert (name in title, "tensor" in title) == (True, False)


@pytest.mark.parametrize(
    ("numbers", "said"),
    [
        ([0], "of the change on this question"),
        ([0] * 8, "Left out: 7 repeated questions."),
        ([0] * 8, "of the change on this question"),
        ([0, 1, 2] * 2, "of the change on 1 held-out question (too few for an interval)"),
        (range(8), "on 4 held-out questions (too few for an interval)"),
        (range(10), "on 5 held-out questions, and answer"),
    ],
)
def test_what_finds_does_not_measure(view, right, numbers, said):
    reading = circuit(view, [right[i] for i in numbers])
    assert said in sentence(reading)
    (answer,) = reading.answers
    count = len({*numbers})
    uses = {1: (0, 0, 0), 3: (1, 1, 1), 8: (2, 2, 4), 10: (2, 3, 5)}[count]
    asked = [one.use for one in answer.questions]
    assert tuple(asked.count(use) for use in USES) == uses
    assert asked.count("left out") == len(numbers) - count
    assert (answer.circuit.measured.restored.low is None) == (answer.circuit.measured.questions < 5)


def test_questions_that_are_spelled_in_another_way_are_the_same(view):
    one = replace(MANY[0], minus=("t6", "t8"))
    ids = [view.ids(text) for text in (one.text, one.against)]
    same = [
        replace(one, text=ids[0], against=ids[1]),
        replace(one, against=view.W_E[ids[1]]),
        replace(one, minus=("t8", "t6")),
        replace(one, text=f"{one.text} t1", against=f"{one.against} t9", position=-2),
    ]
    keys = {case.key for case in make_cases(view, [one, *same])}
    assert len(keys) == 1
    others = [replace(one, minus=("t6",)), replace(one, token="t9"), replace(one, position=2)]
    assert len({case.key for case in make_cases(view, [one, *others])}) == 4


@pytest.mark.parametrize("find", [circuit, task_directions])
def test_tasks_do_not_measure_with_what_found_another(view, right, find):
    def of_task(name, numbers):
        return [replace(right[i], task=name) for i in numbers]

    with pytest.raises(BilensError, match="would measure in the task 'b', but finds in another"):
        find(view, [*of_task("a", [0, 1, 2]), *of_task("b", [3, 4, 5, 6, 7, 0])])
    few = "task 'b' holds one question, expected at least two|answers 1 different question of"
    with pytest.raises(BilensError, match=few):
        find(view, [*of_task("a", [0, 1, 2]), *of_task("b", [3])])
    with pytest.raises(BilensError, match=few):
        find(view, [*of_task("a", [0, 1, 2]), *of_task("b", [3, 3, 3])])


def test_directions_are_not_measured_with_repeated_questions(view):
    found = task_directions(view, [*MANY[:4], *MANY[:4]], 2, strongest=2)
    assert found.questions == (2, 2)
    assert dict(found.facts())["repeated questions left out"] == 4


def test_a_record_is_the_fields_of_the_reading(view, right, many):
    named = [replace(q, template="ab"[i % 2]) for i, q in enumerate(right)]
    reading = circuit(view, named, level="parts", keep=0.6, controls=True)
    (row,) = json.loads(json.dumps(reading.record(), allow_nan=False))["answers"]
    found, of_parts = row["circuit"], reading.circuits[0]
    assert found["measured"] == asdict(of_parts.measured)
    effects = {str(x.part): x.noising for x in of_parts.effects}
    assert {part["part"]: part["noising"] for part in found["effects"]} == effects
    sizes = {int(size): tuple(shares) for size, shares in found["search"]["sizes"].items()}
    assert sizes == of_parts.search.sizes
    assert found["left_out"]["a"]["measured"] == asdict(of_parts.left_out["a"].measured)
    assert found["control"]["measured"] == asdict(of_parts.control.measured)
    assert [one["question"]["text"] for one in row["questions"]] == [q.text for q in named]
    assert plain(many.record()) == many.record()


@pytest.fixture(scope="module")
def two(view, right):
    others = [replace(question, task="two", minus=("t8",)) for question in right]
    others = answered(view, [replace(question, token="t9") for question in others])
    return circuit(view, [*right, *others])


def test_the_transfer_of_a_record_is_a_matrix(two):
    record = json.loads(json.dumps(two.record(), allow_nan=False))
    for number, row in enumerate(record["answers"]):
        transferred, measured = record["transfer"][number], row["circuit"]["measured"]
        assert len(transferred) == 2
        for name in ("restored", "left"):
            value = transferred[number][name]["value"]
            assert value == pytest.approx(measured[name]["value"])
        assert row["circuit"]["stages"]


def test_a_page_has_every_answer_and_all_questions(many, two, right):
    *_, questions = many.sections()
    assert questions.title == "Questions"
    assert [*questions.parts[0].frame["text"]] == [question.text for question in right]
    sections = {section.title: section for section in two.sections()}
    for answer in two.answers:
        section = sections[f"What carries {answer.circuit.task}?"]
        assert section.text == two.text(answer)
        assert section.rows[0][0].figure.axes
        assert f"Questions of {answer.circuit.task}" in sections
    assert len(two.plot().axes[0].texts) == 4


def test_questions_may_come_one_by_one(view, right, many):
    reading = circuit(view, (question for question in right), level="parts", keep=0.6)
    assert sentence(reading) == sentence(many)


@pytest.mark.long
@pytest.mark.parametrize("find", [partial(circuit, level="parts"), circuit, task_directions])
def test_passes_without_room_run_again_and_are_not_kept(view, right, find, monkeypatch):
    longer = [replace(q, text=f"t1 {q.text}", against=f"t1 {q.against}") for q in MANY]
    asked = [*right, *(replace(q, template="longer") for q in answered(view, longer))]
    kept, alive, sizes = find(view, asked), WeakSet[Pass](), list[int]()

    def both(*given):
        passes = both_passes(*given)
        alive.update(passes)
        sizes.append(sum(x.nbytes for x in alive))
        return passes

    monkeypatch.setattr(case, "both_passes", both)
    monkeypatch.setattr(case, "TOGETHER", 2 * 5 * view.d_model)  # two questions
    of_one = sum(x.nbytes for x in both_passes(view, [fit(view, asked[-1])]))
    find(view, asked)
    # Room for all.
    assert max(sizes) > 12 * of_one
    for room in (0, 3 * of_one):
        sizes.clear()
        assert not alive
        monkeypatch.setattr(case, "available_memory", lambda device, room=room: 2 * room)
        again = find(view, asked)
        # Those of two questions and of the two before, and what has room.
        assert max(sizes) <= room + 4 * of_one
        assert_same(again, kept)


@pytest.mark.parametrize(
    ("count", "sizes"), [(1, (1, 1, 1)), (3, (1, 1, 1)), (48, (6, 8, 34)), (6000, (300, 400, 5300))]
)
def test_each_question_has_a_role_and_most_of_many_measure(count, sizes):
    shares = Split.shares(range(count))
    assert tuple(map(len, shares)) == sizes
    assert count == 1 or [i for share in shares for i in share] == [*range(count)]


def assert_same(one, other):
    """Assert that two readings say the same, and have the same numbers up to rounding."""
    for (_, first), (_, second) in zip(one.facts(), other.facts(), strict=True):
        assert first == (pytest.approx(second, abs=1e-6) if isinstance(second, float) else second)
    columns = [pd.DataFrame(x.columns()) for x in (one, other)]
    pd.testing.assert_frame_equal(*columns, rtol=1e-4, atol=1e-6)


def test_three_questions_of_a_template_have_to_be_answered(view, right):
    turned = [replace(q, token=q.minus[0], minus=(q.token,)) for q in right[6:8]]
    with pytest.raises(BilensError, match="answers 2 different questions of the task 'one', expec"):
        circuit(view, [*right[:2], *turned])
