"""What has the same tokens is the same, and what is given twice counts once."""

import re
from dataclasses import replace
from itertools import product

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from bilens import load
from bilens.circuits import circuit, patch, task_directions
from bilens.circuits.case import check_apart, different, make_cases
from bilens.errors import BilensError
from bilens.flows import Question, flow
from bilens.flows.fitted import fit, likely_answer, token_hints
from bilens.flows.question import second_run
from bilens.flows.reading import answer_question
from bilens.language import TokenDirection
from bilens.language.hints import otherwise_read
from bilens.language.names import exact_names, quoted, readable_tokens, shown_tokens
from bilens.options import text_list
from bilens.transformer import ResidualModel
from tests.families import tiny
from tests.tokenizers_of_all_kinds import KINDS, tokenizer_of, view_with

TEXT, OTHER = "t1 t2 t3 t4", "t8 t2 t3 t4"


def spellings(view, name):
    """Return a token by its text, the tokenizer's spelling, its number, and as a list."""
    number = view.token(name)
    return [name, number, f"[{number}]", exact_names(view, [number])[0], (name,), [number]]


def asked_otherwise(view):
    """Return one question in many spellings."""
    texts = [TEXT, view.ids(TEXT)]
    others = [OTHER, view.ids(OTHER), f" {OTHER}"]
    tokens = spellings(view, "t5")
    minus = [("t6", "t7"), ["t7", "t6"], (view.token("t6"), "[7]", "t7")]
    asked = [Question(*x) for x in product(texts, tokens, minus, others)]
    return [*asked, Question(TEXT, TokenDirection(view.token("t5"), ("t6", "t7")), against=OTHER)]


def test_a_question_that_is_spelled_otherwise_is_the_same(view):
    asked = asked_otherwise(view)
    cases = make_cases(view, asked)
    assert different(cases) == {"": [0]}
    ends = torch.tensor([case.ends for case in cases])
    torch.testing.assert_close(ends, ends[:1].expand_as(ends))
    (answer,) = circuit(view, asked[:5]).answers
    assert [x.why for x in answer.questions] == ["", *4 * ["repeats another"]]
    with pytest.raises(BilensError, match="holds one question"):
        task_directions(view, asked)
    with pytest.raises(BilensError, match="would measure in the task 'b'"):
        check_apart(cases, [0], {"b": [len(cases) - 1]})


@pytest.mark.parametrize("read", [flow, patch])
def test_a_token_by_any_name_or_number_has_the_same_numbers(view, read):
    expected = read(view, TEXT, "t5", minus="t6", against=OTHER)
    for token, minus in product(spellings(view, "t5"), spellings(view, "t6")):
        found = read(view, view.ids(TEXT), token, minus=minus, against=view.ids(OTHER))
        assert found.heads.equal(expected.heads)


@pytest.mark.parametrize("kind", KINDS)
def test_every_token_has_a_number_and_a_name_in_every_tokenizer(kind):
    model = view_with(tokenizer_of(kind))
    for number in range(0, model.vocab_size, 7):
        names = [number, f"[{number}]", *exact_names(model, [number])]
        assert [model.token(name) for name in names] == 3 * [number]


def test_the_same_texts_the_other_way_round_never_find_and_measure(view):
    question = Question(TEXT, "t5", ("t6",), OTHER)
    turned = [
        Question(OTHER, "t6", ("t5",), TEXT),
        Question(view.ids(OTHER), "t5", ("t6",), TEXT),
        Question(OTHER, "t9", (), view.ids(TEXT)),
    ]
    further = [Question(TEXT, "t9", ("t6",), OTHER), Question("t9 t2 t3 t4", "t5", ("t6",), OTHER)]
    cases = make_cases(view, [question, *turned, *further])
    assert different(cases) == {"": [0, 4, 5]}
    for i in range(1, 4):
        with pytest.raises(BilensError, match="would measure in the task 'b'"):
            check_apart(cases, [0], {"b": [i]})
    check_apart(cases, [0], {"b": [4, 5]})


def test_a_token_or_an_answer_that_is_given_twice_counts_once(view):
    once = Question(TEXT, ("t5", "t6"), ("t7", "t8"), OTHER)
    twice = Question(TEXT, ("t5", "t6", "t5", 5), ("t7", "[8]", "t7", "t8"), OTHER)
    assert fit(view, twice).tokens == fit(view, once).tokens
    a, b = (answer_question(view, question) for question in (once, twice))
    assert a.probability == b.probability
    assert a.flow.values == b.flow.values
    assert a.title == b.title
    one = answer_question(view, replace(once, token="t5", minus=()))
    two = answer_question(view, replace(once, token=("t5", "t5"), minus=()))
    assert one.probability == two.probability < 1
    assert view.direction(["t5", 5], ["t6", "t7", "t6"]).equal(view.direction("t5", ["t6", "t7"]))


def test_a_node_that_is_given_twice_counts_once(view):
    through = flow(view, TEXT, "t5", against=OTHER)
    nodes = through.nodes[:5]
    once, twice = through.graph(nodes), through.graph([*nodes, *nodes[:3]])
    assert twice.share_of_flow == once.share_of_flow
    assert twice.edges.equal(once.edges)


def test_questions_are_equal_by_their_values(view):
    ids, rows = view.ids(TEXT), view.W_E[view.ids(OTHER)]
    asked = [Question(ids, "t5", (), rows), Question(TEXT, "t5"), Question(ids, vector=rows[0])]
    for question in asked:
        copy = replace(question, text=question.text if isinstance(question.text, str) else ids + 0)
        assert copy == question
        assert hash(copy) == hash(question)
        assert copy in asked
        assert sum(copy == x for x in asked) == 1
    assert replace(asked[0], against=rows + 1) != asked[0]
    assert asked[0] != "t5"


def test_a_page_has_the_text_as_it_was_written(view):
    for text in ("“ t3 t4 t5 ”", " t3 t4  t5 t6"):
        other = text.replace("t3", "t8")
        asked = Question(text, "t5", ("t6",), other)
        (case,) = make_cases(view, [asked])
        assert case.texts == (f"“{text}”", f"“{other}”")
        frame = circuit(view, [asked]).sections()[-1].rows[0][0].frame
        assert (frame["text"][0], frame["against"][0]) == (text, other)
    (case,) = make_cases(view, [replace(asked, position=1)])
    assert case.texts == ("“ t3 t4”", "“ t8 t4”")


def test_a_text_with_its_position_has_no_tokens_that_are_not_its_own():
    story = load("story")
    asked = Question("The King said that", "he", ("she",), "The Queen said that", position=3)
    (case,) = make_cases(story, [asked])
    assert case.texts == ("“The King said”", "“The Queen said”")


def test_the_likeliest_token_is_that_of_a_float32_copy():
    """Logits in 16 bits have equal ones among the largest, and others in front."""
    narrow, own = (ResidualModel(tiny("llama", dtype=torch.bfloat16)) for _ in range(2))
    wide = ResidualModel(own.model.float())
    texts = torch.randint(3, wide.vocab_size, (60, 6), generator=torch.Generator().manual_seed(0))
    otherwise = 0
    for ids in texts:
        found = likely_answer(narrow, ids)
        assert found == likely_answer(wide, ids)
        likely = narrow.model(ids[None]).logits[0, -1].topk(2).indices.tolist()
        otherwise += found != TokenDirection(likely[0], likely[1])
    assert otherwise


@given(st.lists(st.text(min_size=1), min_size=1, max_size=4))
def test_texts_that_are_joined_by_bars_are_read_back(texts):
    quoted = [f'"{text.replace(chr(34), 2 * chr(34))}"' for text in texts]
    joined = "|".join(quoted) if len(texts) > 1 or "|" in texts[0] else texts[0]
    assert text_list(joined) == tuple(texts)


def test_a_second_text_may_hold_a_bar(view):
    text, other = "t1 t2 | t4", "t8 t2 | t4"
    between = answer_question(view, Question(text, "t5", ("t6",), other), shown=5).flow.value
    for given_as in (f'"{other}"', f'"{other}"|"{other}"'):
        second, _ = second_run(view, text, against=given_as)
        value = flow(view, text, "t5", minus="t6", against=second, labels=0).value
        assert value == pytest.approx(between)


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_is_said_of_tokenizers_that_read_all_signs_or_know_no_capitals(kind):
    model = view_with(tokenizer_of(kind))
    assert otherwise_read(model, ["the keys 🎉 AND é are"], ["ARE", "are"]) == ()


def test_a_reading_says_what_the_story_model_does_not_read():
    story = load("story")
    question = Question("The boy 🎉 said YES", "he", "she", "The girl 🎉 said YES")
    assert token_hints(story, [question]) == (
        "The tokenizer drops 🎉.",
        'The tokenizer reads "YES" as "yes".',
    )
    plain = replace(question, text="The boy said yes", against="The girl said yes")
    assert token_hints(story, [plain]) == ()


@pytest.mark.parametrize("kind", KINDS)
def test_pieces_of_letters_have_one_notation_in_tables_and_sentences(kind):
    model = view_with(tokenizer_of(kind))
    numbers = range(len(model.tokenizer))
    exact, shown = exact_names(model, numbers), shown_tokens(model, numbers)
    assert [model.token(name) for name in exact] == [*numbers]
    pieces = 0
    for number, name, text in zip(numbers, exact, shown, strict=True):
        assert "\ufffd" not in text
        if "\ufffd" in model.tokenizer.decode([number]):
            assert re.fullmatch(r"(<0x[0-9A-F]{2}>)+", text)
            assert quoted(name) == f'"{text}"'
            assert readable_tokens(model, [number]) == []
            pieces += 1
    assert pieces or "<0xE3>" not in model.tokenizer.get_vocab()
