"""A circuit says only what is true of its questions: who found, who measures, and who answers."""

import json
from dataclasses import replace

import pytest
import torch

from bilens import memory
from bilens.circuits import Cases, circuit, part_effects, patch, task_directions
from bilens.circuits.case import make_cases
from bilens.errors import BilensError
from bilens.flows import Question
from bilens.memory import MemoryLimitError
from bilens.sections import plain
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
    return circuit(view, right, keep=0.6)


def reverse(question):
    return replace(question, text=question.against, against=question.text)


def sentence(reading):
    return reading.answer(reading.circuits[0])


def test_a_question_counts_by_its_absolute_change_whichever_text_is_first(view):
    questions = [MANY[0], reverse(MANY[1]), MANY[2], reverse(MANY[3])]
    cases = Cases.of(view, questions)
    whole = cases.values(torch.ones(1, *cases.shape).double())[0]
    assert whole.tolist() == pytest.approx(cases.changes.tolist())
    expected = torch.zeros(view.n_layers, view.n_heads + 1).double()
    for q in questions:
        effects = patch(view, q.text, q.token, minus=q.minus, against=q.against)
        expected += effects.noising if effects.change > 0 else -effects.noising
    assert len({case.change > 0 for case in cases.cases}) == 2
    for effect in part_effects(cases, torch.ones(cases.shape, dtype=torch.bool)):
        number = view.n_heads if effect.part.number is None else effect.part.number
        by_patches = float(expected[effect.part.layer, number] / cases.changes.sum())
        assert effect.noising == pytest.approx(by_patches)


def test_questions_of_both_signs_end_and_say_so(view):
    mixed = [q if i % 2 else reverse(q) for i, q in enumerate(MANY)]
    questions = answered(view, mixed)
    reading = circuit(view, questions, keep=0.6)
    (found,) = reading.circuits
    assert found.questions == (2, 3, 5)
    measuring = Cases.of(view, questions[5:])
    assert found.opposite == sum(case.change < 0 for case in measuring.cases)
    assert 0 < found.opposite < 5
    assert "of the absolute change on 5 other questions" in sentence(reading)
    said = f"In {found.opposite} of 5 the answer is the other way round: the number is smaller"
    assert f"{said} after the first text" in sentence(reading)
    left = measuring.values(found.others[None].double())[0]
    share = float(left.sum() / measuring.changes.sum())
    assert found.measured.left.value == pytest.approx(share)


def test_questions_that_the_model_answers_otherwise_are_left_out(view, right):
    turned = [replace(q, token=q.minus[0], minus=(q.token,)) for q in right[6:8]]
    reading = circuit(view, [*right[:6], *turned, *right[8:]], keep=0.6)
    (found,) = reading.circuits
    assert found.questions == (2, 2, 4)
    assert found.wrong == tuple(f"“{question.text}”" for question in turned)
    assert "Left out: 2 questions that the model answers otherwise." in sentence(reading)
    assert reading.record()["circuits"][0]["answered otherwise"] == list(found.wrong)
    same = circuit(view, [*right[:6], *right[8:]], keep=0.6)
    assert same.circuits[0].measured == found.measured
    with pytest.raises(BilensError, match="answers 2 different questions of the task 'one', expec"):
        circuit(view, [*right[:2], *turned], keep=0.6)


def test_a_circuit_says_in_how_many_questions_its_answer_is_ahead(view, right):
    reading = circuit(view, right, keep=0.3, left=1.0)
    (found,) = reading.circuits
    count = 0
    for case in Cases.of(view, right[5:]).cases:
        cases = Cases(view, [case])
        rise = float(cases.values(found.mask[None].double())[0, 0])
        # One token is subtracted: the answer is ahead if the number is above 0.
        count += case.ends[1] + (rise if case.change > 0 else -rise) > 0
    assert found.measured.right == count
    assert f", and answer {count} of them" in sentence(reading)
    vector = view.direction("t5", minus="t6")
    asked = [replace(q, token="", minus=(), vector=vector) for q in MANY]
    reading = circuit(view, asked, keep=0.6)
    assert reading.circuits[0].measured.right is None
    assert "of them" not in sentence(reading)
    whole = [replace(q, minus=()) for q in MANY]
    best = [view.logits(view.ids(q.text)[None])[0, -1].argmax() for q in whole]
    whole = [replace(q, token=f"t{int(token)}") for q, token in zip(whole, best, strict=True)]
    assert circuit(view, whole, keep=0.6).circuits[0].wrong == ()


def test_closeness_is_of_single_questions(view, right, many):
    (found,) = many.circuits
    cases = Cases.of(view, right[5:])
    f = cases.values(found.mask[None].double())[0] / cases.changes
    assert found.measured.closeness == pytest.approx(float(1 - (1 - f).abs().mean()))


def test_what_is_more_than_all_is_said(many):
    (found,) = many.circuits
    for value, said in ((1.19, False), (1.21, True)):
        restored = replace(found.measured.restored, value=value)
        other = replace(found, measured=replace(found.measured, restored=restored))
        assert ("more than all, since parts that oppose" in many.answer(other)) == said
    for value, said in ((0.09, False), (0.11, True)):
        left = replace(found.measured.left, value=value)
        other = replace(found, measured=replace(found.measured, left=left))
        assert ("more than the 10% that were asked for" in many.answer(other)) == said


def test_the_heading_asks_why_only_what_is_so(view):
    for question in [*MANY, *map(reverse, MANY)]:
        texts = question.text, question.against
        logits = [view.logits(view.ids(text)[None])[0, -1] for text in texts]
        a, b = (float(x[5] - x[6]) for x in logits)
        there, here = f"{b:+#.3g} after “{texts[1]}”", f"{a:+#.3g} after “{texts[0]}”"
        expected = f'Why is "t5" minus "t6" {there}, and {here}?'
        if a > 0 > b:
            expected = f'Why does "t5" follow “{texts[0]}”, and not “{texts[1]}”?'
        assert circuit(view, [question], keep=0.5).heading == expected


def test_a_second_run_without_a_text_has_a_name(view):
    ids = view.ids(MANY[0].against)
    for against, name in (
        (ids, f"“{MANY[0].against}”"),
        (view.W_E[ids], "other embeddings"),
        (view.W_E.mean(0), "other embeddings"),
        (("t1 t7 t3 t4", "t1 t9 t3 t4"), "the mean of “t1 t7 t3 t4”, “t1 t9 t3 t4”"),
    ):
        reading = circuit(view, [replace(MANY[0], against=against)], keep=0.5)
        title = reading.sections()[0].title
        assert title == reading.heading
        assert (name in title, "tensor" in title) == (True, False)


@pytest.mark.parametrize(
    ("numbers", "said"),
    [
        ([0], "on this question."),
        ([0] * 8, "on this question."),
        ([0] * 8, "Left out: 7 repeated questions."),
        (range(3), "on 1 other question of the same template (too few for an interval),"),
        ([0, 1, 2] * 2, "on 1 other question of the same template (too few for an interval),"),
        (range(8), "on 4 other questions of the same template (too few for an interval),"),
        (range(10), "on 5 other questions of the same template,"),
    ],
)
def test_what_finds_does_not_measure(view, right, numbers, said):
    reading = circuit(view, [right[i] for i in numbers], keep=0.5)
    assert said in sentence(reading)
    (found,) = reading.circuits
    count = len({*numbers})
    questions = {1: (1, 1, 0), 3: (1, 1, 1), 8: (2, 2, 4), 10: (2, 3, 5)}
    assert found.questions == questions[count]
    assert found.repeated == len(numbers) - count
    assert (found.measured.restored.low is None) == (found.questions[2] < 5)
    assert ("other question" in sentence(reading)) == (count > 1)


def test_a_question_at_an_earlier_position_is_the_same(view):
    reading = circuit(view, [MANY[0], replace(MANY[0], position=3)], keep=0.5)
    assert "Left out: 1 repeated question." in sentence(reading)


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


@pytest.mark.parametrize("find", [lambda *a: circuit(*a, keep=0.5), task_directions])
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
    with pytest.raises(BilensError, match="task 'one' holds one question, expected at least"):
        task_directions(view, MANY[:1] * 3, 2)


def test_a_circuit_says_whether_other_templates_measure(view, right):
    others = []
    for question in right[5:]:
        first, _, third, _ = question.text.split()
        start = f"t8 t8 {first} {third} t8"
        others.append(replace(question, text=f"{start} t2", against=f"{start} t7"))
    others = answered(view, others)
    reading = circuit(view, [*right[:5], *others], keep=0.5)
    assert "on 5 other questions of other templates" in sentence(reading)
    reading = circuit(view, [*right[:5], *others[:2], *right[5:8]], keep=0.5)
    assert "on 5 other questions, of which 2 are of other templates," in sentence(reading)


def test_numbers_of_a_record_are_numbers(view, right, many):
    named = [replace(q, template="ab"[i % 2]) for i, q in enumerate(right)]
    reading = circuit(view, named, keep=0.6, controls=True)
    record = json.loads(json.dumps(reading.record(), allow_nan=False))
    (row,), (found,) = record["circuits"], reading.circuits
    shown = make_cases(view, [q for q in named if q.template == "a"][2:3])[0]
    asked = {"prompt": shown.question.text, "against": shown.question.against}
    asked |= {"values": list(shown.ends), "keep": 0.6, "left at most": 0.1}
    assert {name: record[name] for name in asked} == asked
    measured, restored, left = found.measured, found.measured.restored, found.measured.left
    expected = {"restored": restored.value, "low": restored.low, "high": restored.high}
    expected |= {"left": left.value, "left low": left.low, "right": measured.right}
    expected |= {"questions that measure": 6, "closeness": measured.closeness}
    expected |= {"holds": found.found.holds}
    assert {name: row[name] for name in expected} == expected
    assert [part["part"] for part in row["parts"]] == [str(x.part) for x in found.effects]
    assert [part["noising"] for part in row["parts"]] == [x.noising for x in found.effects]
    sizes = {x["size"]: tuple(x["restored"]) for x in row["sizes"]}
    assert sizes == {size: tuple(shares) for size, shares in found.found.sizes.items()}
    for rows, circuits in ((row["left out"], found.left_out), (row["controls"], found.controls)):
        values = [x.measured.restored.value for x in circuits.values()]
        assert [x["restored"] for x in rows] == values
    for rows in (row["templates"], row["left out"]):
        assert [x["template"] for x in rows] == ["a", "b"]
    assert "transfer" not in record
    assert plain(many.record()) == many.record()


def test_the_transfer_of_a_record_is_a_matrix(view, right):
    others = [replace(question, task="two", minus=("t8",)) for question in right]
    others = answered(view, [replace(question, token="t9") for question in others])
    reading = circuit(view, [*right, *others], keep=0.6)
    record = json.loads(json.dumps(reading.record(), allow_nan=False))
    restored, left = torch.tensor(record["transfer"]), torch.tensor(record["transfer left"])
    assert restored.shape == left.shape == (2, 2)
    for number, row in enumerate(record["circuits"]):
        assert float(restored[number, number]) == pytest.approx(row["restored"])
        assert float(left[number, number]) == pytest.approx(row["left"])


def test_a_page_has_every_answer_and_the_questions_that_found_it(view, many):
    *_, found_by = many.sections()
    assert found_by.title == "Questions that found it"
    assert [*found_by.parts[0].frame["text"]] == [question.text for question in MANY[:5]]
    others = answered(view, [replace(q, task="two", token="t9") for q in MANY])
    ones = answered(view, MANY)
    reading = circuit(view, [*ones, *others], keep=0.6)
    first, *_ = reading.sections()
    assert first.title == "Which few parts answer one and two?"
    for circuit_, line in zip(reading.circuits, first.text.splitlines(), strict=True):
        assert line == f"{circuit_.task}: {reading.answer(circuit_)}"
    assert len(reading.plot().axes[0].texts) > 1


def test_the_picture_measures_the_parts_of_the_circuit(view, many):
    measured = [node for node in many.graph.nodes if node.measured is not None]
    parts = {(x.part.layer, x.part.number) for x in many.circuits[0].effects}
    assert measured
    for node in measured:
        if node.kind != "token":
            assert (node.layer, node.number if node.kind == "head" else None) in parts


def test_questions_may_come_one_by_one(view, right, many):
    reading = circuit(view, (question for question in right), keep=0.6)
    assert sentence(reading) == sentence(many)


@pytest.mark.parametrize("find", [circuit, task_directions])
def test_more_questions_than_fit_into_memory_are_refused_before(view, find, monkeypatch):
    monkeypatch.setattr(memory, "available_memory", lambda device: 200_000)
    with pytest.raises(MemoryLimitError, match="The passes of 1,000 questions need 0.0"):
        find(view, MANY * 100)
