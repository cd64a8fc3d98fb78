"""A circuit says only what is true of its questions: who found, who measures, and who answers."""

import json
from dataclasses import replace

import pytest
import torch

from bilens import memory
from bilens.errors import BilensError
from bilens.memory import MemoryLimitError
from bilens.read.flow import Question, circuit, patch, task_directions
from bilens.read.flow.case import make_cases
from bilens.read.flow.circuit_search import Cases, everything_but, part_effects
from bilens.sections import plain
from tests.language import view_of
from tests.read.flow.flows import QUESTIONS

# Of one template; the words differ.
MANY = [
    Question(f"t{a} t2 t{b} t4", "t5", ("t6",), f"t{a} t7 t{b} t4", "one")
    for a, b in [(1, 3), (2, 9), (3, 1), (4, 8), (8, 3), (9, 1), (5, 9), (6, 3), (7, 1), (6, 8)]
]


@pytest.fixture(scope="module")
def view():
    return view_of(n_layers=2, norm="rms")


@pytest.fixture(scope="module")
def many(view):
    return circuit(view, MANY, keep=0.6)


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


@pytest.mark.parametrize("level", ["parts", "edges"])
def test_questions_of_both_signs_end_and_say_so(view, level):
    questions = [q for pair in MANY[:6] for q in (pair, reverse(pair))]
    reading = circuit(view, questions, level=level, keep=0.6)
    (found,) = reading.circuits
    assert found.questions == (6, 6)
    assert found.opposite == 3
    assert 0.6 <= found.ordering < 3
    assert "of the absolute change on 6 other questions" in sentence(reading)
    assert (
        "In 3 of 6 the answer is the other way round: the number is smaller after the first text"
        in sentence(reading)
    )
    measuring = Cases.of(view, questions[6:])
    left = measuring.values(everything_but(found)[None].double())[0]
    assert found.left.value == pytest.approx(float(left.sum() / measuring.changes.sum()))


def test_answers_the_wrong_way_round_are_said(view):
    cases = Cases.of(view, MANY).cases
    wrong = [x.question if x.change < 0 else reverse(x.question) for x in cases]
    reading = circuit(view, wrong, keep=0.6)
    assert "In 5 of 5 the answer is the other way round" in sentence(reading)
    assert reading.heading.startswith('Why is "t5" minus "t6" ')
    right = [reverse(question) for question in wrong]
    assert "the other way round" not in sentence(circuit(view, right, keep=0.6))


def test_a_circuit_says_how_many_questions_the_model_answers(view):
    turned = [replace(q, token="t6", minus=("t5",)) for q in MANY[6:8]]
    questions = [*MANY[:6], *turned, *MANY[8:]]
    right = 0
    for question in questions[5:]:
        logits = view.logits(view.ids(question.text)[None])[0, -1]
        token, minus = view.token(question.token), view.token(question.minus[0])
        right += bool(logits[token] > logits[minus])
    assert 0 < right < 5
    reading = circuit(view, questions, keep=0.6)
    assert reading.circuits[0].right == right
    assert f"The model itself is right in {right} of 5." in sentence(reading)
    vector = view.direction("t5", minus="t6")
    asked = [replace(q, token="", minus=(), vector=vector) for q in MANY]
    assert "is right" not in sentence(circuit(view, asked, keep=0.6))


def test_the_heading_asks_why_only_what_is_so(view):
    for question in [*MANY, *map(reverse, MANY)]:
        ends = []
        for text in (question.text, question.against):
            logits = view.logits(view.ids(text)[None])[0, -1]
            ends.append(float(logits[5] - logits[6]))
        heading = circuit(view, [question], keep=0.5).heading
        follows = f"Why does t5 follow “{question.text}”, and not “{question.against}”?"
        assert (heading == follows) == (ends[0] > 0 > ends[1])
        if heading != follows:
            assert heading == (
                f'Why is "t5" minus "t6" {ends[1]:+#.3g} after “{question.against}”, and '
                f"{ends[0]:+#.3g} after “{question.text}”?"
            )


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
        assert name in title
        assert "tensor" not in title


@pytest.mark.parametrize(
    ("questions", "options", "said"),
    [
        (MANY[:1], {}, "on this question;"),
        (MANY[:1], {"level": "edges"}, "on this question;"),
        (MANY[:1] * 8, {}, "on this question;"),
        (MANY[:1] * 8, {}, "Left out: 7 repeated questions."),
        (MANY[:1] * 8, {"level": "edges"}, "on this question;"),
        ([MANY[0], replace(MANY[0], position=3)], {}, "Left out: 1 repeated question."),
        (MANY[:2], {}, "on 1 other question of the same template (too few for an interval);"),
        ([*MANY[:2], *MANY[:2]], {}, "on 1 other question of the same template (too few"),
        (MANY[:8], {}, "on 4 other questions of the same template (too few for an interval);"),
        (MANY, {}, "on 5 other questions of the same template;"),
    ],
)
def test_what_finds_does_not_measure(view, questions, options, said):
    reading = circuit(view, questions, keep=0.5, **options)
    assert said in sentence(reading)
    (found,) = reading.circuits
    different = len({question.text for question in questions})
    assert found.questions == (max(1, different // 2), different - max(1, different // 2))
    assert found.repeated == len(questions) - different
    assert (found.restored.low is None) == (found.questions[1] < 5)
    assert ("other" in sentence(reading)) == (different > 1)


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
def test_tasks_do_not_measure_with_what_found_another(view, find):
    def of_task(name, numbers):
        return [replace(MANY[i], task=name) for i in numbers]

    with pytest.raises(BilensError, match="would measure in the task 'b', but finds in another"):
        find(view, [*of_task("a", [0, 1]), *of_task("b", [2, 0])])
    with pytest.raises(BilensError, match="task 'b' holds one question, expected at least two"):
        find(view, [*of_task("a", [0, 1]), *of_task("b", [2])])
    with pytest.raises(BilensError, match="task 'b' holds one question, expected at least two"):
        find(view, [*of_task("a", [0, 1]), *of_task("b", [2, 2, 2])])


def test_directions_are_not_measured_with_repeated_questions(view):
    found = task_directions(view, [*MANY[:4], *MANY[:4]], 2, strongest=2)
    assert found.questions == (2, 2)
    assert dict(found.facts())["repeated questions left out"] == 4
    with pytest.raises(BilensError, match="questions holds one question, expected at least two"):
        task_directions(view, MANY[:1] * 3, 2)


def test_a_circuit_says_whether_other_templates_measure(view):
    others = []
    for question in MANY[5:]:
        first, _, third, _ = question.text.split()
        start = f"t8 t8 {first} {third} t8"
        others.append(replace(question, text=f"{start} t2", against=f"{start} t7"))
    assert "on 5 other questions of other templates" in sentence(
        circuit(view, [*MANY[:5], *others], keep=0.5)
    )
    reading = circuit(view, [*MANY[:5], *others[:2], *MANY[5:8]], keep=0.5)
    assert "on 5 other questions, of which 2 are of other templates;" in sentence(reading)


def test_numbers_of_a_record_are_numbers(view, many):
    reading = circuit(view, MANY, keep=0.6, level="edges", bootstraps=2)
    record = json.loads(json.dumps(reading.record(), allow_nan=False))
    (row,), (found,) = record["circuits"], reading.circuits
    assert (record["prompt"], record["against"]) == (MANY[5].text, MANY[5].against)
    assert record["values"] == list(make_cases(view, MANY[5:6])[0].ends)
    assert (row["restored"], row["low"], row["high"]) == (
        found.restored.value,
        found.restored.low,
        found.restored.high,
    )
    assert (row["left"], row["left low"]) == (found.left.value, found.left.low)
    assert (row["right"], row["questions that measure"]) == (found.right, 5)
    assert [part["part"] for part in row["parts"]] == [str(x.part) for x in found.effects]
    assert [part["noising"] for part in row["parts"]] == [x.noising for x in found.effects]
    assert [edge["share"] for edge in row["edges"]] == [x.share for x in reading.edges[0].edges]
    assert row["restored by edges"] == reading.edges[0].restored.value
    assert [size["restored"] for size in row["sizes"]] == [f for _, f in found.curve]
    assert row["similar"] == list(found.similar)
    assert "transfer" not in record
    assert plain(many.record()) == many.record()


def test_the_transfer_of_a_record_is_a_matrix(view):
    others = [replace(question, task="two", token="t9") for question in QUESTIONS]
    reading = circuit(view, [*QUESTIONS, *others], finding=2)
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
    others = [replace(question, task="two", token="t9") for question in QUESTIONS]
    ones = [replace(question, task="one") for question in QUESTIONS]
    reading = circuit(view, [*ones, *others], finding=2)
    first, *_ = reading.sections()
    assert first.title == "Which few parts answer one and two?"
    for circuit_, line in zip(reading.circuits, first.text.splitlines(), strict=True):
        assert line == f"{circuit_.task}: {reading.answer(circuit_)}"
    assert reading.plot().data[0].texttemplate == "%{z:.2f}"


def test_the_picture_measures_the_parts_of_the_circuit(view, many):
    measured = [node for node in many.graph.nodes if node.measured is not None]
    parts = {(x.part.layer, x.part.number) for x in many.circuits[0].effects}
    assert measured
    for node in measured:
        if node.kind != "token":
            assert (node.layer, node.number if node.kind == "head" else None) in parts


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"keep": float("nan")}, "keep=nan, expected a finite number"),
        ({"keep": float("inf")}, "keep=inf, expected a finite number"),
        ({"keep": "0.9"}, "keep='0.9', expected a finite number"),
        ({"keep": -0.1}, "keep=-0.1, expected a finite number, at least 0"),
        ({"keep": 1.5}, "keep=1.5, and the parts that were found keep .*; ask for up to 1"),
        ({"finding": 0}, "finding=0, expected a whole number, at least 1"),
        ({"finding": -1}, "finding=-1, expected a whole number, at least 1"),
        ({"finding": 1.5}, "finding=1.5, expected a whole number"),
        ({"level": "foo"}, "level='foo', expected one of parts, edges"),
        ({"bootstraps": -1}, "bootstraps=-1, expected 0 or a whole number, at least 2"),
        ({"bootstraps": 1}, "bootstraps=1, expected 0 or a whole number, at least 2"),
        ({"questions": MANY[0]}, "questions"),
        ({"questions": [MANY[0].text]}, "questions"),
        ({"questions": []}, "there must be at least one"),
        ({"questions": (x for x in ())}, "there must be at least one"),
        ({"questions": (x for x in ["t1"])}, "questions holds a str, expected Questions"),
        ({"model": torch.nn.Linear(2, 2)}, "model is torch.nn"),
    ],
)
def test_what_no_circuit_takes_is_refused_by_its_name(view, options, message):
    with pytest.raises(BilensError, match=message):
        circuit(**{"model": view, "questions": MANY[:2], **options})


def test_questions_may_come_one_by_one(view, many):
    reading = circuit(view, (question for question in MANY), keep=0.6)
    assert sentence(reading) == sentence(many)


@pytest.mark.parametrize("find", [circuit, task_directions])
def test_more_questions_than_fit_into_memory_are_refused_before(view, find, monkeypatch):
    monkeypatch.setattr(memory, "available_memory", lambda device: 200_000)
    with pytest.raises(MemoryLimitError, match="The passes of 1,000 questions need 0.0"):
        find(view, MANY * 100)
