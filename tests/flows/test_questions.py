"""Every field of a question is obeyed or refused by name, by everything that takes a question."""

from dataclasses import fields, replace
from functools import partial
from math import exp

import pytest
import torch
from jaxtyping import Int, jaxtyped

from bilens.circuits import Cases, circuit, patch, task_directions
from bilens.circuits.case import make_cases
from bilens.circuits.measures import Split, find_circuit, part_effects
from bilens.errors import BilensError
from bilens.figures.sheet import svg_of
from bilens.flows import Question, answered, flow
from bilens.flows.reading import answer_question
from bilens.sections import plain as as_json
from bilens.transformer.exchange import Change, exchange
from tests.families import exact_norms, family_view
from tests.flows.flows import QUESTIONS, uncapped
from tests.models import random_text, view_of
from tests.refusals import refused

BASE, *MEASURING = QUESTIONS
TEXTS = [BASE.text, BASE.against]
NO_TOKEN = torch.tensor([1, 99, 3, 4])


@pytest.fixture(scope="module")
def view():
    return view_of(n_layers=2, norm="rms", logit_cap=2.0)


def others(view):
    """Return questions that differ from `BASE` in one field, by the name of the field."""
    ids = view.ids(BASE.against)
    vector = torch.randn(view.d_model, generator=torch.Generator().manual_seed(0)).double()
    seconds = ids.roll(1), view.W_E[ids].roll(1, 0), view.W_E.mean(0)
    values = {
        "text": ["t2 t2 t3 t4", view.ids("t2 t2 t3 t4")],
        "token": ["t9", ("t5", "t9")],
        "minus": [(), ("t8", "t9")],
        "against": ["t1 t8 t3 t4", *seconds, ("t1 t8 t3 t4", "t1 t9 t3 t4")],
        "target": ["log-probability", "probability"],
        "position": [-2, 1],
    }
    return [
        *((name, replace(BASE, **{name: x})) for name, several in values.items() for x in several),
        ("token", replace(BASE, token="t5 t9", minus=())),
        ("vector", replace(BASE, token="", minus=(), vector=vector)),
    ]


def test_tensors_with_gradients_are_read_as_others(view):
    vector = torch.randn(view.d_model, dtype=torch.float64)
    second = view.W_E[view.ids(BASE.against)].roll(1, 0).detach()
    plain = flow(view, BASE.text, vector, against=second)
    given = flow(view, BASE.text, vector.requires_grad_(), against=second.requires_grad_())
    assert [node.flow for node in given.nodes] == [node.flow for node in plain.nodes]


def of_circuit(found, measuring=None):
    """Return the numbers of a circuit, and of its parts on questions that measure."""
    parts = part_effects(measuring, found.mask) if measuring else found.effects
    effects = [(x.part, x.noising, x.denoising) for x in parts]
    return [found.search.sizes, found.measured, effects]


def asked(read, view, question, **options):
    given = question.token if question.vector is None else question.vector
    options |= {"against": question.against, "target": question.target, "minus": question.minus}
    return read(view, question.text, given, question.position, **options)


def by_flow(view, question):
    return [node.flow for node in asked(flow, view, question, labels=0).nodes]


def by_labels(view, question):
    nodes = asked(flow, view, question, ablate=20).nodes
    return [(x.measured, x.raises, x.lowers) for x in nodes]


def by_patch(view, question):
    return asked(patch, view, question).noising.tolist()


def by_positions(view, question):
    reading = circuit(view, [question], level="parts")
    return [*of_circuit(reading.circuits[0]), reading.heading]


def by_stages(view, question):
    return as_json(circuit(view, [question]).circuits)


def by_parts(view, question):
    finding, measuring = Cases.of(view, [question]), Cases.of(view, MEASURING)
    found = find_circuit([Split("", finding, finding, measuring)], 0.6)
    return of_circuit(found, measuring)


def by_measuring(view, question):
    finding, measuring = Cases.of(view, MEASURING), Cases.of(view, [question])
    found = find_circuit([Split("", finding, finding, measuring)], 0.6)
    return of_circuit(found, measuring)


def by_directions(view, *questions):
    found = task_directions(view, [*questions, MEASURING[0]][:2], 2, strongest=3)
    return [found.share, found.r2, [(x.flow, x.effect, x.raises) for x in found.strongest]]


def by_measured_directions(view, question):
    return by_directions(view, MEASURING[0], question)


def by_page_of_flow(view, question):
    page = answer_question(view, question, "another text").page
    return [page.metric, page.value, page.tokens, page.nodes]


def by_page_of_circuit(view, question):
    reading = circuit(view, [question])
    first = reading.sections()[0]
    return [first.title, first.text, svg_of(reading.plot())]


CONSUMERS = [
    *(by_flow, by_labels, by_patch, by_positions, by_stages, by_parts, by_measuring),
    *(by_directions, by_measured_directions, by_page_of_flow, by_page_of_circuit),
]


def test_all_fields_are_asked_about(view):
    names = {x.name for x in fields(Question)} - {"task", "template"}
    assert {name for name, _ in others(view)} == names


@pytest.mark.long
@pytest.mark.parametrize("consumer", CONSUMERS)
def test_each_field_changes_the_result_or_is_refused_by_name(view, consumer):
    plain = consumer(view, BASE)
    assert plain == consumer(view, BASE)
    for name, question in others(view):
        try:
            result = consumer(view, question)
        except BilensError as error:
            result = str(error) if name in str(error) else plain
        assert result != plain, (name, question)


@pytest.mark.long
@pytest.mark.parametrize("consumer", CONSUMERS)
def test_a_position_is_the_end_of_a_shorter_text(view, consumer):
    longer = Question("t1 t2 t3 t4 t9", "t5", ("t6",), "t1 t7 t3 t4 t8", "one", position=3)
    expected, found = consumer(view, BASE), consumer(view, longer)
    assert str(rounded(found)) == str(rounded(expected))


def rounded(value):
    """Return a result with numbers of six digits, since rounding differs by the text's length."""
    if isinstance(value, float):
        return float(f"{value:.6g}") if abs(value) > 1e-9 else 0.0
    if hasattr(value, "__dataclass_fields__"):
        value = [getattr(value, name) for name in value.__dataclass_fields__]
    if isinstance(value, dict):
        value = [*value.items()]
    if isinstance(value, list | tuple):
        return [rounded(x) for x in value]
    return value if isinstance(value, str | int | None) else str(value)


@pytest.mark.parametrize("name", ["gemma2", "gpt2"])
@pytest.mark.parametrize("target", ["logit", "log-probability", "probability"])
@pytest.mark.parametrize("minus", [(), ("t6",), ("t6", "t8")])
@pytest.mark.parametrize("position", [-1, 2])
@pytest.mark.parametrize("token", ["t5", ("t5", "t9", "t4")])
def test_the_number_of_a_case_is_that_of_the_model(name, target, minus, position, token):
    view = family_view(name)
    question = replace(BASE, token=token, minus=minus, target=target, position=position)
    with exact_norms():
        (case,) = make_cases(view, [question])
        ends = []
        for text in TEXTS:
            logits = view.logits(view.ids(text)[None])[0, position]
            logs = logits.log_softmax(-1)
            numbers = {"log-probability": logs, "probability": logs.exp()}
            numbers = numbers.get(target, uncapped(view, logits))
            tokens, names = ([view.token(x) for x in y] for y in (question.tokens, minus))
            ends.append(float(numbers[tokens].mean() - (numbers[names].mean() if minus else 0)))
    assert case.ends == pytest.approx(ends, abs=1e-6)


SPOKEN = [
    replace(BASE, token="t5 t9", minus=()),
    replace(BASE, token="t5 t9 t5", minus=(), position=2),
    replace(BASE, token="t8 t6", minus=(), target="probability"),
]


def own_log_probabilities(view, text, question):
    """Return the log-probability of each token of an answer after a text, by own passes."""
    ids, answer = view.ids(text, question.position), view.ids(question.token)
    logs = view.logits(torch.cat([ids, answer])[None])[0].log_softmax(-1)
    return [float(logs[len(ids) + i - 1, token]) for i, token in enumerate(answer)]


@pytest.mark.long
@pytest.mark.parametrize("name", ["gemma2", "gpt2", "own-mixed", "llama"])
@pytest.mark.parametrize("question", SPOKEN)
def test_an_answer_of_several_tokens_has_the_log_probability_of_all(name, question):
    view = family_view(name)
    with exact_norms():
        (case,) = make_cases(view, [question])
        sums = [sum(own_log_probabilities(view, text, question)) for text in TEXTS]
        ends = sums if question.target == "logit" else [exp(x) for x in sums]
        assert case.ends == pytest.approx(ends, abs=1e-6)
        through = asked(flow, view, question)
        assert through.value == pytest.approx(ends[0] - ends[1], rel=1e-4)
        starts = through.embeddings.sum() + through.choices.sum()
        assert float(starts) == pytest.approx(through.value, rel=1e-4)
        (found,) = circuit(view, [question]).circuits
        assert found.measured.change == pytest.approx(abs(case.change))


@pytest.mark.long
def test_an_answer_of_several_tokens_is_given_if_each_is_the_likeliest(view):
    found = 0
    for seed in range(100):
        text, against = random_text(4, seed), random_text(4, seed + 100)
        ids = view.ids(text)
        for _ in range(2):
            ids = torch.cat([ids, view.logits(ids[None])[0, -1:].argmax(-1)])
        best = ids[-2:].tolist()
        if max(best) > 9:  # names of one digit are tokens of a text
            continue
        found += 1
        given = Question(text, f"t{best[0]} t{best[1]}", (), view.ids(against))
        assert make_cases(view, [given])[0].answers[0] is True
        other = replace(given, token=f"t{best[0]} t{(best[1] + 1) % 10}")
        assert make_cases(view, [other])[0].answers[0] is False
        reading = answer_question(view, given)
        assert reading.preferred[0] == given.token
        assert given.token in reading.title
        probability = exp(sum(own_log_probabilities(view, text, given)))
        assert reading.probability == pytest.approx(probability, rel=1e-4)
    assert found


def test_one_of_several_tokens_is_an_answer(view):
    logits = view.logits(view.ids(BASE.text)[None])[0, -1]
    best, second, *_, least = (f"t{number}" for number in logits.argsort(descending=True).tolist())
    for token, minus, is_right in (
        ((least, best), (), True),
        ((least, second), (), False),
        ((least, best), (second,), True),
        ((least, second), (best,), False),
    ):
        (case,) = make_cases(view, [replace(BASE, token=token, minus=minus)])
        assert case.answers[0] is is_right
    reading = answer_question(view, replace(BASE, token=(best, second), minus=()))
    assert f'"{best}" or "{second}"' in reading.title
    probability = float(logits.softmax(-1)[[view.token(best), view.token(second)]].sum())
    assert reading.probability == pytest.approx(probability, rel=1e-4)


def test_a_case_says_which_texts_the_model_answers(view):
    for text, against in (TEXTS, TEXTS[::-1]):
        logits = [view.logits(view.ids(x)[None])[0, -1] for x in (text, against)]
        best, least = f"t{int(logits[0].argmax())}", f"t{int(logits[0].argmin())}"
        assert make_cases(view, [Question(text, best, (), against)])[0].answers[0] is True
        assert make_cases(view, [Question(text, least, (), against)])[0].answers[0] is False
        for minus in (("t6",), (best, least), (least, best)):
            (case,) = make_cases(view, [Question(text, "t5", minus, against)])
            numbers = [view.token(name) for name in minus]
            assert case.answers == tuple(bool(x[5] > x[numbers].max()) for x in logits)
    vector = view.direction("t5", minus="t6")
    (case,) = make_cases(view, [Question(text, "", (), against, vector=vector)])
    assert case.answers == (None, None)


READS = [by_flow, by_positions, by_directions, by_page_of_circuit]


def of_each(*consumers, **changes):
    """Return how each consumer reads a question that differs from `BASE`."""
    question = replace(BASE, **changes)
    return [lambda view, read=read: read(view, question) for read in consumers]


every = partial(of_each, by_patch, *READS)
test_questions_of_another_model_are_one_error = refused(
    {
        "position=99, expected -4 to 3": every(position=99),
        "token='soup'": every(token="soup") + every(minus=("soup",)) + every(token=("t5", "soup")),
        "minus has the token 't6' itself": every(token=("t5", "t6")),
        "99": every(text=NO_TOKEN) + every(against=NO_TOKEN),
        "against has shape": every(against=torch.ones(4, 9)),
        "against holds": every(against=torch.full((16,), torch.nan)),
        "against holds no texts": every(against=()),
        "vector has 9 numbers": every(token="", minus=(), vector=torch.ones(9)),
    }
)
test_an_answer_of_several_tokens_stands_alone = refused(
    {
        "is several tokens of the model, .t6.t6..*leave out minus='t6'": of_each(
            *READS, token="t6 t6"
        ),
        "token='t5 t9'.*single token": of_each(*READS, token=("t5 t9", "t6"), minus=()),
        # Vectors of positions keep texts alike.
        "against has 4 tokens, expected 5": lambda: asked(patch, family_view("gpt2"), UNLIKE[0]),
    }
)
UNLIKE = [
    replace(BASE, text="t2 t1 t3 t4 t8", against="t9 t3 t4 t8"),
    replace(BASE, text="t1 t3 t4 t8", against="t7 t6 t3 t4 t8", token="t8 t2", minus=()),
]


@pytest.mark.parametrize("name", ["gemma2", "granite", "olmo2", "llama"])
@pytest.mark.parametrize("question", UNLIKE)
def test_parts_of_texts_of_unlike_length_are_exchanged_from_the_end(name, question):
    view = family_view(name)
    with exact_norms():
        (case,) = make_cases(view, [question], any_length=True)
        cases = Cases(view, [case])
        ends = [abs(case.change), 0]
        whole = torch.stack([cases.everything, ~cases.everything & False]).double()
        assert cases.values(whole)[:, 0].tolist() == pytest.approx(ends, abs=1e-6)
        effects = asked(patch, view, question)
        shared = min(x.ids.shape[1] for x in case.alone)
        for layer, number in ((0, 0), (1, 1), (1, view.n_heads)):
            is_mlp = number == view.n_heads
            of_layer = view.places.layers[layer]
            place = (of_layer.mlp, "output") if is_mlp else (of_layer.heads, "input")
            for side, effect in enumerate((effects.noising, effects.denoising)):
                first, other = case.alone[side], case.alone[1 - side]
                values = other.values[is_mlp][place[0]]
                width = values.shape[2] // view.n_heads
                columns = slice(None) if is_mlp else slice(number * width, (number + 1) * width)

                def from_end(x, values=values, columns=columns):
                    x = x.clone()
                    x[:, -shared:, columns] = values[:, -shared:, columns].to(x)
                    return x

                changes = [Change(place, layer, from_end)]
                streams = exchange(first, first, [view.places.exist], [changes])
                moved = float(case.score(streams[:, 0])[0])
                expected = (case.ends[side] - moved) * (1, -1)[side]
                assert float(effect[layer, number]) == pytest.approx(expected, abs=1e-6)


def test_circuits_hold_on_texts_of_unlike_length(view):
    asked = []
    for seed in range(24):
        words = [f"t{3 + number % 7}" for number in random_text(5, seed).tolist()]
        second = ["t9" if words[2] != "t9" else "t8", *words[2:]]
        asked.append(Question(" ".join(words), "t5", ("t6",), " ".join(second)))
    cases = make_cases(view, asked, any_length=True)
    with_answers = [case.question for case in cases if case.answers[0]]
    for level in ("stages", "parts"):
        reading = circuit(view, with_answers, level=level)
        assert reading.circuits[0].measured.questions > 0
        assert [section.title for section in reading.sections()]
        assert reading.plot().axes
    for consumer in (
        lambda: circuit(view, with_answers[:1]),
        lambda: task_directions(view, with_answers),
    ):
        with pytest.raises(BilensError, match="against has . tokens, expected 5"):
            consumer()


def test_sizes_that_another_check_left_behind_do_not_matter():
    with jaxtyped("context"):
        assert isinstance(torch.zeros(3, dtype=torch.int64), Int[torch.Tensor, " time"])
        question = Question(torch.arange(5), "t5", against=torch.arange(5))
    assert len(question.text) == 5


def test_kept_are_the_questions_that_a_model_answers(view):
    """Those whose token is ahead after the first text and behind after the second, by logits."""
    texts = "t1 t2 t3", "t9 t9 t9"
    first, second = (view.logits(view.ids(text)[None])[0, -1] for text in texts)
    ahead = (first[:, None] > first) & (second[:, None] < second)
    some = ahead.nonzero()[:5].tolist() + (~ahead).nonzero()[5:10].tolist()
    asked = [Question(texts[0], f"t{i}", (f"t{j}",), texts[1]) for i, j in some]
    assert ahead.any()
    assert answered(view, asked) == asked[:-5]
    alone = Question(texts[0], f"t{int(first.argmax())}")
    assert answered(view, [alone, replace(alone, token="t20 t21", against=texts[1])]) == [alone]
