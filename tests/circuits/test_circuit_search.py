"""Circuits are those that their rule names, and of models whose parts are known, and measure."""

from dataclasses import replace

import pytest
import torch

from bilens.analyses import language
from bilens.circuits import Cases, circuit, patch, search_circuit
from bilens.circuits.measures import Split, find_circuit, part_effects
from bilens.circuits.patching import parts_in
from bilens.circuits.search import HIGHEST, KEEP, SIZES, SLACK, necessary
from bilens.flows import Question
from tests.families import exact_norms, family_view
from tests.flows.flows import QUESTIONS, answered, check_gradient, write_questions
from tests.models import view_of

# Two templates of one task; the words differ.
PAIRS = [(a, b) for a in (1, 2, 3, 4, 8, 9) for b in (1, 3, 9)]
TEMPLATES = {
    name: [
        Question(text.format("t2", a, b), "t5", ("t6",), text.format("t7", a, b), "one", name)
        for a, b in PAIRS
    ]
    for name, text in {"short": "t{1} {0} t{2} t4", "long": "t8 t{1} t{2} {0} t1"}.items()
}


@pytest.fixture(scope="module")
def templates(view):
    return [answered(view, questions) for questions in TEMPLATES.values()]


@pytest.fixture(scope="module")
def reading(view, templates):
    return circuit(view, [*templates[0], *templates[1]], keep=0.6, controls=True)


@pytest.mark.parametrize("by_position", [False, True])
@pytest.mark.parametrize("name", ["llama", "gemma3", "gpt2"])
def test_all_parts_restore_everything_and_no_parts_nothing(name, by_position):
    questions = QUESTIONS[: 1 if by_position else 3]
    with exact_norms():
        cases = Cases.of(family_view(name), questions, by_position=by_position)
        everything = torch.ones(cases.shape).double()
        f = cases.faithfulness(torch.stack([everything, 0 * everything]))
    # What reaches the logits without any part is the embedding alone.
    assert float(f[0]) == pytest.approx(1, abs=1e-5)
    assert abs(float(f[1])) < 1 - 1e-3


@pytest.mark.parametrize("by_position", [False, True])
def test_gradients_of_f_are_central_differences(view, by_position):
    check_gradient(Cases.of(view, QUESTIONS[: 1 if by_position else 2], by_position=by_position))


def test_scores_add_up_to_f(view):
    cases = Cases.of(view, QUESTIONS[:3])
    mask = torch.rand(cases.shape, generator=torch.Generator().manual_seed(0)) < 0.7
    scores = cases.scores(mask)
    # Gauss-Legendre quadrature with two points leaves an error of the fourth derivative.
    f = cases.faithfulness(torch.stack([mask, mask & False]).double())
    assert float(scores[mask].sum()) == pytest.approx(float(f[0] - f[1]), abs=2e-2)
    assert abs(float(f[0])) > 0.1


@pytest.mark.parametrize("keep", [0.3, 0.6, 0.9])
def test_a_circuit_is_the_smallest_whose_f_is_in_bounds_on_every_template(view, templates, keep):
    ordering = [Cases.of(view, questions[:6]) for questions in templates]
    deciding = Cases.of(view, [x for questions in templates for x in questions[6:10]])
    found = search_circuit(ordering, deciding, keep)
    scores = torch.stack([cases.scores(cases.everything).flatten() for cases in ordering])
    sizes, masks, holds = sorted({min(size, scores.shape[1]) for size in SIZES}), {}, []
    for size in sizes:
        # Parts that oppose are left out as long as f is not too large.
        for worth in (scores.amax(0), scores.abs().amax(0)):
            mask = torch.zeros(scores.shape[1], dtype=torch.bool)
            mask[worth.topk(size).indices] = True
            masks[size] = mask.view(deciding.shape)
            both = (deciding.some(range(4)), deciding.some(range(4, 8)))
            shares = [float(cases.faithfulness(masks[size][None].double())[0]) for cases in both]
            if max(shares) <= HIGHEST:
                break
        assert found.sizes.get(size, shares) == pytest.approx(shares)
        holds.append(keep - 1e-4 <= min(shares) and max(shares) <= HIGHEST)
    # All parts hold, so that some size does.
    assert found.holds
    first = next(i for i in range(len(sizes)) if all(holds[i : i + 2]))
    assert found.mask.equal(masks[sizes[first]])


def test_without_a_circuit_the_best_is_returned_and_the_answer_says_so(view, templates):
    questions = templates[0]
    ordering, deciding = Cases.of(view, questions[:6]), Cases.of(view, questions[6:10])
    found = search_circuit([ordering], deciding, 1.14)
    assert not found.holds
    best = min(found.sizes.values(), key=lambda shares: max(1.14 - shares[0], shares[0] - HIGHEST))
    assert found.sizes[int(found.mask.sum())] == best
    for keep in (1.02, 1.04, 1.06, 1.1):
        found = search_circuit([ordering], deciding, keep)
        misses = [max(keep - 1e-4 - f, f - HIGHEST) for (f,) in found.sizes.values()]
        assert found.holds == (min(misses) <= SLACK)
    reading = circuit(view, questions, keep=1.14)
    (one,) = reading.circuits
    assert one.half == reading.record()["circuits"][0]["parts for half"] < one.size
    for shares, half in (((0.5, 0.9), 1), ((0.49, 0.5), 2), ((0.4, 0.49), None)):
        sizes = dict(zip((1, 2), ((x, 0.9) for x in shares), strict=True))
        tried = replace(one.found, sizes=sizes | {one.size: (1.0, 1.0)})
        assert replace(one, found=tried).half == half
    answer = reading.facts()[0][1]
    assert f"; {one.half} are enough for half of it" in answer
    assert answer.startswith("No circuit of at most 60 parts restores 114% to 115% of the")


def test_the_circuit_of_a_model_with_known_parts_is_these():
    """Only one head and one MLP write anything, and the MLP reads the head."""
    view = view_of(n_layers=2, norm="none", mlp="bilinear", attention="softmax")
    first, second = view.model.blocks
    first.mlp.out.weight.zero_()
    second.attn.out.weight.zero_()
    first.attn.out.weight[:, view.layer(0).heads.d_head :].zero_()
    second.mlp.out.weight.mul_(30)
    split = Split.of(Cases.of(view, QUESTIONS), range(4), "")
    found = find_circuit([split], 0.999, 0.1)
    assert {str(part) for part in parts_in(found.mask)} == {"head.0.0", "mlp.1"}
    assert found.measured.restored.value == pytest.approx(1)
    assert [str(part) for part in parts_in(found.needed)] == ["head.0.0"]


def test_parts_are_added_until_little_is_left(view, templates):
    cases = Cases.of(view, [x for questions in templates for x in questions[:5]])
    start = torch.zeros(cases.shape, dtype=torch.bool)
    start[0, -1] = True

    def left(mask):
        return cases.shares((~mask)[None].double())[0].tolist()

    for limit in (0.5, 0.1, 0.0):
        mask = necessary(start, start & False, cases, limit)
        assert mask[0, -1]
        assert max(left(mask)) <= limit
    assert necessary(start, start & False, cases, 1e9).equal(start)
    # The first that is added takes away most, on the template with most left.
    worst = left(start).index(max(left(start)))
    one = necessary(start, start & False, cases, max(left(start)) - 1e-9)
    (added,) = (one & ~start).nonzero().tolist()

    def left_with(part):
        trial = start.clone()
        trial[tuple(part)] = True
        return left(trial)[worst]

    assert added == min((~start).nonzero().tolist(), key=left_with)


def test_effects_of_parts_are_their_patches(view):
    asked, cases = QUESTIONS[0], Cases.of(view, QUESTIONS[:1])
    patches = patch(view, asked.text, asked.token, minus=asked.minus, against=asked.against)
    by_part, change = patches.frame().set_index("part"), cases.cases[0].change
    found = part_effects(cases, cases.everything)
    for effect in found:
        expected = by_part.loc[str(effect.part)]
        assert effect.noising * change == pytest.approx(expected["noising"])
        assert effect.denoising * change == pytest.approx(expected["denoising"])


def test_everything_else_has_the_needed_parts_in_place(view):
    cases = Cases.of(view, QUESTIONS[:2])
    found = find_circuit([Split("", cases, cases, cases)], 0.9, 1.0)
    assert (found.others & found.mask).equal(found.needed)
    assert (found.others | found.mask).all()
    f = cases.faithfulness(found.others[None].double())
    assert found.measured.left.value == pytest.approx(float(f[0]))


def section(reading, title):
    return next(x for x in reading.sections() if x.title == title)


def test_several_tasks_have_a_matrix(view, templates):
    others = [replace(question, task="two", template="") for question in templates[1]]
    first = [replace(question, template="") for question in templates[0]]
    reading = circuit(view, [*first, *others], keep=0.6)
    assert [one.task for one in reading.circuits] == ["one", "two"]
    for row, of_task in enumerate(reading.circuits):
        assert of_task.questions == (4, 6, 8)
        assert reading.transfer[row][row] == of_task.measured
        assert not of_task.left_out
    table = section(reading, "The answer in numbers").parts[0].frame
    numbers = table[["restored", "low", "high", "left", "questions"]].to_numpy(float).tolist()
    assert list(table["circuit"]) == ["one", "one", "two", "two"]
    assert list(table["questions of"]) == ["one", "two", "one", "two"]
    assert numbers == [
        [x.restored.value, x.restored.low, x.restored.high, x.left.value, x.questions]
        for row in reading.transfer
        for x in row
    ]
    assert set(reading.frame()["task"]) == {"one", "two"}
    assert reading.plot().axes[0].images
    assert "restore" in dict(reading.facts())["one"]


def test_each_template_is_left_out_once(view, templates, reading):
    (found,) = reading.circuits
    assert list(found.by_template) == ["short", "long"]
    assert list(found.left_out) == ["short", "long"]
    # By hand: the circuit of the long template, on the questions of the short one that measure.
    long, short = templates[1], templates[0]
    by_hand = search_circuit([Cases.of(view, long[:4])], Cases.of(view, long[4:10]), 0.6)
    of_others = found.left_out["short"]
    assert of_others.found.mask.equal(by_hand.mask)
    cases = Cases.of(view, short[10:])
    f, left = cases.faithfulness(torch.stack([of_others.mask, of_others.others]).double()).tolist()
    assert of_others.measured.restored.value == pytest.approx(f)
    assert of_others.measured.left.value == pytest.approx(left)
    masks = [found.mask, *(one.mask for one in found.left_out.values())]
    assert found.core.equal(masks[0] & masks[1] & masks[2])
    assert "of the same 2 templates" in reading.answer(found)
    titles = [section.title for section in reading.sections()]
    assert titles[1:-1] == ["Controls", "Templates", "The answer in numbers", "Parts", "Size"]


def test_templates_that_other_parts_answer_are_said_to_be(view, reading):
    (found,) = reading.circuits
    said = "are answered by other parts"
    expected = [k for k, x in found.left_out.items() if x.measured.restored.value < 0.5]
    assert found.unlike_templates == expected
    assert (said in reading.answer(found)) == bool(expected)
    enough = replace(found.measured, restored=replace(found.measured.restored, value=0.5))
    alike = {k: replace(x, measured=enough) for k, x in found.left_out.items()}
    other = replace(found, left_out=alike)
    assert said not in reading.answer(other)


def test_controls_stand_beside_the_answer(view, reading):
    (found,) = reading.circuits
    names = list(found.controls)
    assert names == ["the answer", "random parts", names[2], "shuffled weights"]
    assert names[2].startswith("answer ")
    answer, random, nonsense, shuffled = (x.measured for x in found.controls.values())
    assert answer == found.measured
    assert answer.answers == answer.questions
    assert found.controls["random parts"].size == found.size
    assert random.questions == answer.questions
    for control in (nonsense, shuffled):
        assert control.answers < control.questions
        assert control.change > 0
    assert list(section(reading, "Controls").rows[0][0].frame["search"]) == names


def test_one_question_has_parts_at_positions(view):
    case = QUESTIONS[0]
    reading = language.circuit(view, case.text, case.token, minus=case.minus, against=case.against)
    (found,) = reading.circuits
    assert reading.n_parts == 2 * 5 * 4
    assert all("@" in part for part in reading.frame()["part"])
    assert found.measured.restored.value >= KEEP
    assert KEEP <= found.found.sizes[int(found.found.mask.sum())][0] <= HIGHEST
    assert "of the change on this question" in reading.answer(found)
    positions = {(node.layer, node.position) for node in reading.graph.nodes}
    measured = {(e.part.layer, e.part.position) for e in found.effects}
    assert {place for place in positions if place[0] is not None} <= measured
    assert len(reading.sections()) == 4


def test_the_answer_says_which_parts_stay_in_place(view, templates):
    reading = circuit(view, templates[0], keep=0.6)
    found = reading.circuits[0]
    left = f"{found.measured.left.value:z.0%} is left"
    some = found.mask.clone()
    some.view(-1)[found.mask.flatten().nonzero()[1:]] = False
    (first,) = parts_in(some)
    for needed, said in (
        (found.mask & False, f"Without them {left}"),
        (some, f"Without them, with {first} in place, {left}"),
        (found.mask, "Any circuit needs " + ", ".join(map(str, parts_in(found.mask)))),
    ):
        other = replace(found, needed=needed)
        answer = replace(reading, circuits=(other,)).answer(other)
        assert said in answer
        assert ("is left" in answer) == (not needed.equal(found.mask))


def test_questions_come_from_a_file(tmp_path, view):
    path = tmp_path / "pairs.tsv"
    write_questions(path, answered(view, QUESTIONS))
    reading = language.circuit(view, questions=str(path))
    assert reading.circuits[0].questions == (1, 1, 2)
    assert reading.question.text == QUESTIONS[2].text
