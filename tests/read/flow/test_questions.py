"""Every field of a question is obeyed or refused by name, by everything that takes a question."""

from dataclasses import fields, replace
from math import exp

import pytest
import torch
from jaxtyping import Int, jaxtyped

from bilens.errors import BilensError
from bilens.explore.flows import FlowRequest, FlowView
from bilens.read.flow import Question, circuit, flow, patch, task_directions
from bilens.read.flow.case import make_cases
from bilens.read.flow.circuit_measures import Split, find_circuit, part_effects
from bilens.read.flow.circuit_search import Cases
from bilens.read.flow.reading import answer_question
from bilens.residual.changes import mixed_site, mlp_site
from tests.families import exact_norms, family_view
from tests.models import random_text, view_of
from tests.read.flow.flows import QUESTIONS

BASE = Question("t1 t2 t3 t4", "t5", ("t6",), "t1 t7 t3 t4", "one")
MEASURING = QUESTIONS[1:]
TEXTS = [BASE.text, BASE.against]


@pytest.fixture(scope="module")
def view():
    return view_of(n_layers=2, norm="rms", logit_cap=2.0)


def others(view):
    """Return questions that differ from `BASE` in one field, by the name of the field."""
    ids = view.ids(BASE.against)
    vector = torch.randn(view.d_model, generator=torch.Generator().manual_seed(0)).double()
    return [
        ("text", replace(BASE, text="t2 t2 t3 t4")),
        ("text", replace(BASE, text=view.ids("t2 t2 t3 t4"))),
        ("token", replace(BASE, token="t9")),
        ("token", replace(BASE, token=("t5", "t9"))),
        ("token", replace(BASE, token="t5 t9", minus=())),
        ("minus", replace(BASE, minus=())),
        ("minus", replace(BASE, minus=("t8", "t9"))),
        ("against", replace(BASE, against="t1 t8 t3 t4")),
        ("against", replace(BASE, against=ids.roll(1))),
        ("against", replace(BASE, against=view.W_E[ids].roll(1, 0))),
        ("against", replace(BASE, against=view.W_E.mean(0))),
        ("against", replace(BASE, against=("t1 t8 t3 t4", "t1 t9 t3 t4"))),
        ("target", replace(BASE, target="log-probability")),
        ("target", replace(BASE, target="probability")),
        ("position", replace(BASE, position=-2)),
        ("position", replace(BASE, position=1)),
        ("vector", replace(BASE, token="", minus=(), vector=vector)),
    ]


def test_tensors_with_gradients_are_read_as_others(view):
    vector = torch.randn(view.d_model, dtype=torch.float64)
    second = view.W_E[view.ids(BASE.against)].roll(1, 0).detach()
    plain = flow(view, BASE.text, vector, against=second)
    given = flow(
        view, BASE.text, vector.clone().requires_grad_(), against=second.clone().requires_grad_()
    )
    assert [node.flow for node in given.nodes] == [node.flow for node in plain.nodes]


def of_circuit(found, measuring=None):
    """Return the numbers of a circuit, and of its parts on questions that measure."""
    parts = part_effects(measuring, found.mask) if measuring else found.effects
    effects = [(x.part, x.noising, x.denoising, x.raises, x.lowers) for x in parts]
    return [found.found.sizes, found.measured, effects]


def arguments(question):
    given = question.token if question.vector is None else question.vector
    options = {"against": question.against, "target": question.target, "minus": question.minus}
    return (question.text, given, question.position), options


def by_flow(view, question):
    given, options = arguments(question)
    return [node.flow for node in flow(view, *given, **options, ablate=0).nodes]


def by_labels(view, question):
    given, options = arguments(question)
    return [(x.measured, x.raises, x.sources) for x in flow(view, *given, **options).nodes]


def by_patch(view, question):
    given, options = arguments(question)
    return patch(view, *given, **options).noising.tolist()


def by_positions(view, question):
    reading = circuit(view, [question])
    return [*of_circuit(reading.circuits[0]), reading.heading]


def by_parts(view, question):
    finding, measuring = Cases.of(view, [question]), Cases.of(view, MEASURING)
    found = find_circuit([Split("", finding, finding, measuring)], 0.6, 0.1)
    return of_circuit(found, measuring)


def by_measuring(view, question):
    finding, measuring = Cases.of(view, MEASURING), Cases.of(view, [question])
    found = find_circuit([Split("", finding, finding, measuring)], 0.6, 0.1)
    return of_circuit(found, measuring)


def by_edges(view, question):
    reading = circuit(view, [question], level="edges", keep=0.6)
    edges = reading.circuits[0].edges
    return [edges.edges, edges.restored.value]


def by_directions(view, question):
    found = task_directions(view, [question, MEASURING[0]], 2, strongest=3)
    return [found.share, found.r2, [(x.flow, x.effect, x.raises) for x in found.strongest]]


def by_measured_directions(view, question):
    found = task_directions(view, [MEASURING[0], question], 2, strongest=3)
    return [found.share, found.r2, [(x.flow, x.effect, x.raises) for x in found.strongest]]


def by_page_of_flow(view, question):
    page = answer_question(view, question, "another text").page
    return [page.number, page.value, page.tokens, page.nodes]


def by_page_of_circuit(view, question):
    reading = circuit(view, [question])
    (first, *_) = reading.sections()
    return [first.title, first.text, reading.plot().to_dict()]


CONSUMERS = [
    *(by_flow, by_labels, by_patch, by_positions, by_parts, by_measuring, by_edges),
    *(by_directions, by_measured_directions, by_page_of_flow, by_page_of_circuit),
]


def test_all_fields_are_asked_about(view):
    names = {"task", "template"}
    assert {name for name, _ in others(view)} == {x.name for x in fields(Question)} - names


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
            cap = view.modules.softcap
            if target == "logit":
                numbers = logits if cap is None else cap * torch.atanh(logits / cap)
            else:
                logs = logits.log_softmax(-1)
                numbers = logs if target == "log-probability" else logs.exp()
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


@pytest.mark.parametrize("name", ["gemma2", "gpt2", "own-mixed", "llama"])
@pytest.mark.parametrize("question", SPOKEN)
def test_an_answer_of_several_tokens_has_the_log_probability_of_all(name, question):
    view = family_view(name)
    with exact_norms():
        (case,) = make_cases(view, [question])
        sums = [sum(own_log_probabilities(view, text, question)) for text in TEXTS]
        ends = sums if question.target == "logit" else [exp(x) for x in sums]
        assert case.ends == pytest.approx(ends, abs=1e-6)
        through = flow(view, *arguments(question)[0], **arguments(question)[1])
        assert through.value == pytest.approx(ends[0] - ends[1], rel=1e-4)
        starts = through.embeddings.sum() + through.positions.sum() + through.choices.sum()
        assert float(starts) == pytest.approx(through.value, rel=1e-4)
        (found,) = circuit(view, [question], keep=0.6).circuits
        assert found.measured.change == pytest.approx(abs(case.change))


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
    for token, minus, answered in (
        ((least, best), (), True),
        ((least, second), (), False),
        ((least, best), (second,), True),
        ((least, second), (best,), False),
    ):
        (case,) = make_cases(view, [replace(BASE, token=token, minus=minus)])
        assert case.answers[0] is answered
    reading = answer_question(view, replace(BASE, token=(best, second), minus=()))
    assert f'"{best}" or "{second}"' in reading.title
    probability = float(logits.softmax(-1)[[view.token(best), view.token(second)]].sum())
    assert reading.probability == pytest.approx(probability, rel=1e-4)


def test_a_case_says_which_texts_the_model_answers(view):
    for text, against in (TEXTS, TEXTS[::-1]):
        logits = [view.logits(view.ids(x)[None])[0, -1] for x in (text, against)]
        best = f"t{int(logits[0].argmax())}"
        least = f"t{int(logits[0].argmin())}"
        assert make_cases(view, [Question(text, best, (), against)])[0].answers[0] is True
        assert make_cases(view, [Question(text, least, (), against)])[0].answers[0] is False
        for minus in (("t6",), (best, least), (least, best)):
            (case,) = make_cases(view, [Question(text, "t5", minus, against)])
            numbers = [view.token(name) for name in minus]
            assert case.answers == tuple(bool(x[5] > x[numbers].max()) for x in logits)
    vector = view.direction("t5", minus="t6")
    (case,) = make_cases(view, [Question(text, "", (), against, vector=vector)])
    assert case.answers == (None, None)


@pytest.mark.parametrize(
    ("question", "message"),
    [
        (replace(BASE, position=99), "position=99, expected -4 to 3"),
        (replace(BASE, token="soup"), "token='soup'"),
        (replace(BASE, minus=("soup",)), "token='soup'"),
        (replace(BASE, token=("t5", "soup")), "token='soup'"),
        (replace(BASE, token=("t5", "t6")), "minus has the token 't6' itself"),
        (replace(BASE, text=torch.tensor([1, 99, 3, 4])), "99"),
        (replace(BASE, against=torch.tensor([1, 99, 3, 4])), "99"),
        (replace(BASE, against=torch.ones(4, 9)), "against has shape"),
        (replace(BASE, against=torch.full((16,), torch.nan)), "against holds"),
        (replace(BASE, against=()), "against holds no texts"),
        (replace(BASE, token="", minus=(), vector=torch.ones(9)), "direction has 9 numbers"),
    ],
)
@pytest.mark.parametrize(
    "consumer", [by_flow, by_patch, by_positions, by_edges, by_directions, by_page_of_circuit]
)
def test_questions_of_another_model_are_one_error(view, consumer, question, message):
    with pytest.raises(BilensError, match=message):
        consumer(view, question)


@pytest.mark.parametrize(
    ("question", "message"),
    [
        (replace(BASE, token="t6 t6"), "has several tokens, .t6.t6., .*leave out minus='t6'"),
        (replace(BASE, token=("t5 t9", "t6"), minus=()), "token='t5 t9'.*single token"),
    ],
)
@pytest.mark.parametrize(
    "consumer", [by_flow, by_positions, by_edges, by_directions, by_page_of_circuit]
)
def test_an_answer_of_several_tokens_stands_alone(view, consumer, question, message):
    with pytest.raises(BilensError, match=message):
        consumer(view, question)


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
        effects = patch(view, *arguments(question)[0], **arguments(question)[1])
        own = [x.ids.shape[1] for x in case.passes]
        for layer, number in ((0, 0), (1, 1), (1, view.n_heads)):
            if not bool(view.places.exist[layer, number]):
                continue
            for side, effect in ((0, effects.noising), (1, effects.denoising)):
                first, other = case.passes[side], case.passes[1 - side]
                values = other.outputs[layer]
                if number < view.n_heads:
                    width = other.mixed[layer].shape[2] // view.n_heads
                    values = other.mixed[layer][..., number * width : (number + 1) * width]
                shared = min(own)
                site = mlp_site(view, layer) if number == view.n_heads else mixed_site(view, layer)

                def exchange(x, number=number, values=values, shared=shared):
                    x = x.clone()
                    width = values.shape[2]
                    start = 0 if number == view.n_heads else number * width
                    x[:, -shared:, start : start + width] = values[:, -shared:].to(x)
                    return x

                moved = float(case.score(first.changed([[(site, exchange)]])[:, 0])[0])
                expected = (case.ends[side] - moved) * (1, -1)[side]
                assert float(effect[layer, number]) == pytest.approx(expected, abs=1e-6)


def test_vectors_of_positions_keep_texts_alike():
    with pytest.raises(BilensError, match="against has 4 tokens, expected 5"):
        patch(family_view("gpt2"), *arguments(UNLIKE[0])[0], **arguments(UNLIKE[0])[1])


def test_circuits_hold_on_texts_of_unlike_length(view):
    asked = []
    for seed in range(24):
        words = [f"t{number % 10}" for number in random_text(5, seed).tolist()]
        second = ["t9" if words[2] != "t9" else "t8", *words[2:]]
        asked.append(Question(" ".join(words), "t5", ("t6",), " ".join(second)))
    cases = make_cases(view, asked, any_length=True)
    with_answers = [case.question for case in cases if case.answers[0]]
    reading = circuit(view, with_answers, keep=0.6)
    assert reading.graph is None
    assert reading.circuits[0].questions[2] > 0
    assert [section.title for section in reading.sections()]
    assert reading.plot().data
    for consumer in (
        lambda: circuit(view, with_answers[:1]),
        lambda: circuit(view, with_answers, level="edges"),
        lambda: task_directions(view, with_answers),
        lambda: by_flow(view, with_answers[0]),
    ):
        with pytest.raises(BilensError, match="against has . tokens, expected 5"):
            consumer()


@pytest.mark.parametrize("page", [FlowView.split, FlowView.circuit])
def test_the_explorer_obeys_each_field(view, page):
    texts = [random_text(5, seed) for seed in range(3)]
    explorer = FlowView(view, BASE.text, texts)
    plain = FlowRequest(BASE.text, "t5", ("t6",), BASE.against)
    changed = {
        "prompt": "t2 t2 t3 t4",
        "token": "t9",
        "minus": (),
        "against": "t1 t8 t3 t4",
        "target": "probability",
    }
    cases = [replace(plain, **{name: value}) for name, value in changed.items()]
    cases += [replace(plain, against="", replace="t2=t9"), replace(plain, against="", mean=True)]
    records = [str(page(explorer, of).record()) for of in (plain, *cases)]
    assert len({*records}) == len(records) == len(fields(FlowRequest)) + 1


def test_sizes_that_another_check_left_behind_do_not_matter():
    with jaxtyped("context"):
        assert isinstance(torch.zeros(3, dtype=torch.int64), Int[torch.Tensor, " time"])
        question = Question(torch.arange(5), "t5", against=torch.arange(5))
    assert len(question.text) == 5
