"""Sentences of a flow are true of the model's own logits, and hints of its probabilities."""

import re
from math import log

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Regex, Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from bilens.analyses import language
from bilens.circuits import circuit, patch, task_directions
from bilens.errors import BilensError
from bilens.flows import Question, flow
from bilens.flows.fitted import token_hints
from bilens.flows.question import NEUTRAL, second_run
from bilens.flows.reading import answer_question
from bilens.options import replaced
from bilens.sections import signed
from bilens.transformer import ResidualModel
from tests.models import VOCAB, numbers, random_model, view_of
from tests.refusals import refused

FIRST, SECOND = "t1 t2 t3 t4", "t1 t7 t3 t4"
TOKENS = [f"t{i}" for i in range(3, 13)]
VIEW = view_of(n_layers=1)
BOTH = {"text": FIRST, "against": SECOND}


def last_logits(view, text):
    return view.logits(view.ids(text)[None])[0, -1]


def shown(number):
    return format(abs(number), ".3g")


def test_without_a_token_it_is_the_likeliest_one():
    view = view_of(n_layers=2, seed=5)

    def likeliest(text, rank=0):
        return f"t{last_logits(view, text).argsort(descending=True)[rank]}"

    def asked(**others):
        question = language.flow(view, prompt=FIRST, ablate=0, **others).question
        return question.tokens, question.minus

    first, rival, other = likeliest(FIRST), likeliest(FIRST, 1), "t5 t6 t7 t8"
    assert likeliest(SECOND) == first != likeliest(other)
    assert asked() == ((first,), (rival,))
    assert asked(against=other) == ((first,), (likeliest(other),))
    assert asked(against=other, minus="t3") == ((first,), ("t3",))
    # The same answer after both texts is no rival.
    assert asked(against=SECOND) == ((first,), (rival,))


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(
    "second",
    [
        {"against": "t5 t6 t7 t8|t9 t6 t3 t4"},
        {"mean": True},
        {"against": NEUTRAL},
        {"replace": "t2=t9,t4=t8"},
    ],
    ids=str,
)
def test_without_a_token_each_second_run_is_run(second, seed):
    view = view_of(n_layers=2, seed=seed)
    E = view.W_E
    rows = E.mean(0).expand(4, -1).clone()
    if second.get("against") == NEUTRAL:
        rows[0] = E[1]
    elif "against" in second:
        rows = (E[[5, 6, 7, 8]] + E[[9, 6, 3, 4]]) / 2
    elif "replace" in second:
        rows = E[[1, 9, 3, 8]]
    # The same embeddings by hand, as those of four other tokens.
    other = random_model(n_layers=2, seed=seed)
    other.embed.weight.data[20:24] = rows
    in_second = other(torch.arange(20, 24)[None])
    in_second = getattr(in_second, "logits", in_second)[0, -1]
    first, rival = last_logits(view, FIRST).topk(2).indices.tolist()
    likely = int(in_second.argmax())
    question = language.flow(view, prompt=FIRST, ablate=0, **second).question
    assert question.tokens == (f"t{first}",)
    assert question.minus == (f"t{likely if likely != first else rival}",)


@pytest.mark.parametrize("token", TOKENS[::3])
@pytest.mark.parametrize("minus", ["t4", "t8", "t10"])
def test_what_the_model_prefers_is_said(token, minus):
    reading = answer_question(VIEW, Question(FIRST, token, (minus,), SECOND), SECOND, ablate=3)
    scores = (last_logits(VIEW, text)[numbers([token, minus])] for text in (FIRST, SECOND))
    a, b = (float(x - y) for x, y in scores)
    better, there = (token if x > 0 else minus for x in (a, b))
    where = f'"{better}" after the first text and "{there}" after the second'
    where = f'"{better}" after both texts' if better == there else where
    by = f"by {shown(a)} and {shown(b)}; the difference changes by {signed(a - b)}."
    sentence = f"The model prefers {where}, {by}"
    assert reading.preference == sentence
    # The page and the terminal say it.
    assert reading.answer().startswith(sentence)
    assert reading.sections()[0].text.startswith(sentence)
    assert reading.record()["preferred"] == [better, there]
    # What is left of a change is called a change.
    assert reading.left == pytest.approx(a - b + reading.together, abs=1e-5 * abs(a - b))
    left = signed(reading.left)
    assert f"exchanged the change is {left}, not {signed(a - b)}." in reading.answer()
    assert dict(reading.facts())[f'change of "{token}" minus "{minus}"'] == pytest.approx(a - b)
    assert "after the second text" not in dict(reading.facts())
    # Only a question whose premise holds is asked.
    assert reading.title.startswith("Why") == (better == token != there)
    alone = answer_question(VIEW, Question(FIRST, token, (minus,)), ablate=3)
    assert alone.flow.values[0] == pytest.approx(a)
    assert " the neutral one, by" in alone.preference
    if alone.title.startswith("Why"):
        assert alone.title.endswith(f"after “{FIRST}”, and not after the neutral text?")
    else:
        assert f"from the neutral text to “{FIRST}”" in alone.title


@pytest.mark.long
@pytest.mark.parametrize("minus", [(), ("t4", "t5"), ("t6", "t9", "t11")])
@pytest.mark.parametrize("token", ["t3", "t8", "t12"])
@pytest.mark.parametrize("target", ["logit", "log-probability", "probability"])
def test_other_numbers_name_the_most_likely_token(token, minus, target):
    reading = answer_question(VIEW, Question(**BOTH, token=token, minus=minus, target=target))
    among = numbers([token, *minus]) if minus else range(VOCAB)
    scores = [last_logits(VIEW, text)[[*among]] for text in (FIRST, SECOND)]
    likely = [f"t{among[int(x.argmax())]}" for x in scores]
    assert reading.preferred == tuple(likely)
    assert reading.title.startswith("Why") == (likely[0] == token != likely[1])
    assert all(f'"{name}" after' in reading.preference for name in likely)
    assert all(signed(number) in reading.preference for number in reading.flow.values)
    assert reading.preference.endswith(f"changes by {signed(reading.flow.value)}.")


@pytest.mark.parametrize("target", ["log-probability", "probability"])
def test_differences_of_other_numbers_are_named(target):
    reading = answer_question(VIEW, Question(**BOTH, token="t3", minus=("t8",), target=target))
    sizes = " and ".join(map(shown, reading.flow.values))
    assert f", by {sizes} in {target}; the difference changes by " in reading.preference


def test_equal_tokens_are_preferred_by_none():
    model = random_model(n_layers=1)
    model.unembed.weight.data[4] = model.unembed.weight.data[3]
    question = Question(FIRST, "t3", ("t4",), SECOND)
    reading = answer_question(ResidualModel(model, VIEW.tokenizer), question)
    assert reading.preference.startswith("The model prefers neither after both texts, by 0 and 0;")
    assert not reading.title.startswith("Why")


def test_runs_that_are_no_texts_are_not_called_texts():
    several = f"the mean of “{SECOND}” and “t1 t8 t3 t4”"
    for options, second in (
        ({"mean": True}, "mean embeddings"),
        ({"against": f"{SECOND}|t1 t8 t3 t4"}, several),
    ):
        reading = language.flow(VIEW, prompt=FIRST, token="t3", minus="t5", **options)
        assert second in reading.title
        assert "run" in reading.preference
        assert "text" not in reading.preference
        assert f"after {second}" not in reading.title


WORDS = ["a", " a", "b", " b", "c", " c", "New", " New", " York", "lone"]


def spaced_view(scale):
    """Return a model whose tokens are words with a space in front and without."""
    words = models.WordLevel({"?": 0, **{w: i for i, w in enumerate(WORDS, 1)}}, unk_token="?")
    tokenizer = Tokenizer(words)
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r" ?[A-Za-z]+"), "isolated")
    model = random_model(n_layers=1, vocab_size=len(WORDS) + 1)
    model.unembed.weight.data *= scale
    return ResidualModel(model, PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="?"))


@pytest.mark.long
@pytest.mark.parametrize("scale", [1, 10, 30])
@pytest.mark.parametrize("text", ["a b c", "c b a", "b b a c"])
def test_a_far_less_probable_token_than_with_a_space_has_a_hint(scale, text):
    view = spaced_view(scale)
    scores = dict(zip(["?", *WORDS], last_logits(view, text), strict=True))
    far = [name for name in ("a", "b", "c") if scores[f" {name}"] - scores[name] >= log(100)]
    for name in ("a", "b", "c"):
        hint = f'"{name}" is far less probable here than " {name}"; did you mean " {name}"?'
        hints = (hint,) if name in far else ()
        for token, minus in ((name, (" York",)), (" York", (name,))):
            question = Question(text, token, minus)
            assert token_hints(view, [question]) == hints
            reading = answer_question(view, question)
            assert reading.notes == tuple(reading.record()["notes"]) == hints
            assert (
                (hint in reading.answer()) == (hint in reading.sections()[0].text) == (name in far)
            )
        assert token_hints(view, [Question(text, f" {name}", ("?",))]) == ()
    if scale == 1:
        assert not far


def test_an_unknown_token_is_never_meant():
    view = spaced_view(30)
    weight = view.model.unembed.weight.data
    weight[0] *= last_logits(view, "a b c")[0].sign()
    weight[-1] = -weight[0]
    # Behind a space it is unknown, and what is unknown is far more probable.
    scores = last_logits(view, "a b c")
    assert float(scores[0] - scores[-1]) > log(100)
    assert token_hints(view, [Question("a b c", "lone")]) == ()


def test_circuits_patches_and_directions_have_the_hint():
    view = spaced_view(30)
    text, against = "a b c", "a a c"
    scores = dict(zip(["?", *WORDS], last_logits(view, text), strict=True))
    name = next(name for name in "abc" if scores[f" {name}"] - scores[name] >= log(100))
    hint = f'did you mean " {name}"?'
    asked = [Question(text, name, (" York",), against), Question("c b c", name, (), "c a c")]
    for reading in (
        circuit(view, asked[:1]),
        patch(view, text, name, minus=" York", against=against),
        task_directions(view, asked, k=2),
    ):
        assert hint in reading.notes[0]
        assert hint in dict(reading.facts())["note"]
    assert hint in circuit(view, asked[:1]).sections()[0].text
    # The model answers neither question, and the error says why that may be.
    with pytest.raises(BilensError, match=re.escape(hint)) as error:
        circuit(view, asked)
    assert re.search(r"\(in \d of 2 questions\)", str(error.value))
    # Of an answer of several tokens the first one is compared.
    new = float(scores[" New"] - scores["New"])
    notes = patch(view, text, "New York", against=against).notes
    assert bool(notes) == (new >= log(100))


@given(st.permutations(["tom", "ben", "New York", "York", "tom's"]), st.data())
def test_words_are_replaced_all_at_once(others, data):
    names = sorted(others)
    words = data.draw(st.lists(st.sampled_from([*names, "and", "went"]), min_size=1))
    assert replaced("; ".join(words), {}) == "; ".join(words)
    # York alone stands in no other name.
    text, mapping = "; ".join(words), dict(zip(names, others, strict=True))
    mapping = {name: other for name, other in mapping.items() if name in words}
    changed = replaced(text, mapping)
    assert changed == "; ".join(mapping.get(word, word) for word in words)


@given(st.permutations(["tom", "ben", "lily", "cat"]))
def test_a_permutation_of_words_is_undone_by_its_inverse(others):
    text = "then tom and ben and lily saw the cat, and tom ate"
    mapping = dict(zip(["tom", "ben", "lily", "cat"], others, strict=True))
    inverse = {other: word for word, other in mapping.items()}
    assert replaced(replaced(text, mapping), inverse) == text
    as_option = ",".join(f"{word}={other}" for word, other in mapping.items())
    assert second_run(VIEW, text, replace=as_option)[0] == replaced(text, mapping)


def test_exchanged_names_exchange_the_texts():
    text, names = "t1 t2 t9 t3 t2", {"t2": "t3", "t3": "t2"}
    second = replaced(text, names)
    assert second == "t1 t3 t9 t2 t3"
    there, back = (flow(VIEW, x, "t2", minus="t3", replace=names) for x in (text, second))
    assert there.values == pytest.approx(back.values[::-1])
    assert there.value == pytest.approx(-back.value)


def spaced(**options):
    return lambda: flow(spaced_view(1), "a b c", **options)


test_what_an_answer_of_several_tokens_asks_for_is_said = refused(
    {
        "a single token": spaced(token="a", minus="New York", against="a a c"),
        "several tokens of the model, .New. York": spaced(
            token="New York", minus="a", against="a a c"
        ),
    }
)
