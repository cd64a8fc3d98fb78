"""Questions that a model proposes are questions like the first, and are read back as they are."""

from dataclasses import replace

import pandas as pd
import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from bilens.analyses import language
from bilens.circuits import propose_questions
from bilens.circuits.words import Words
from bilens.flows import Question
from bilens.question_files import read_pair_lines, token_list, written_names
from bilens.transformer import ResidualModel
from tests.models import random_model
from tests.refusals import refused

WORDS = [
    *("no", "the", "cat", "dog", "cow", "hen", "fox", "owl", "bee", "ant"),
    *("eat", "eats", "see", "sees", "sing", "sings", "big", "old", "red", "wet"),
]


@pytest.fixture(scope="module")
def view():
    words = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="no"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words)
    return ResidualModel(random_model(seed=3, vocab_size=len(WORDS)), tokenizer)


def last_logits(view, text):
    return view.logits(view.ids(text)[None])[0, -1]


def difference(view, text, question):
    logits = last_logits(view, text)
    return float(logits[view.token(question.token)] - logits[view.token(question.minus[0])])


@pytest.fixture(scope="module")
def first(view):
    """Return a question that the model answers."""
    texts = "the cat big eats", "the dog big eats"
    one, two = (last_logits(view, text) for text in texts)
    for token in (one - two).argsort(descending=True).tolist():
        for minus in (one - two).argsort().tolist():
            if one[token] > one[minus] and two[token] < two[minus]:
                return Question(texts[0], WORDS[token], (WORDS[minus],), texts[1], "cats")
    raise AssertionError


def test_proposals_are_questions_like_the_first(view, first):
    change = difference(view, first.text, first) - difference(view, first.against, first)
    proposals = propose_questions(view, first, 10)
    assert proposals
    texts = set()
    for proposal in proposals:
        question = proposal.question
        ends = [difference(view, text, question) for text in (question.text, question.against)]
        assert proposal.ends == pytest.approx(ends, rel=1e-5)
        assert ends[0] > 0 > ends[1]
        assert ends[0] - ends[1] >= change / 2
        assert len(view.ids(question.text)) == len(view.ids(question.against))
        assert question.template == "as given"  # no word of the openings is in this vocabulary
        assert question.task == "cats"
        texts.add(question.text)
    assert len(texts) == len(proposals) <= 5
    assert first.text not in texts
    assert propose_questions(view, first, 10) == proposals


def test_a_file_of_proposals_is_read(view, first, tmp_path):
    options = {"minus": first.minus, "against": first.against, "count": 8}
    reading = language.questions(view, first.text, first.token, **options)
    path = tmp_path / "questions.tsv"
    reading.frame().to_csv(path, index=False, sep="\t")
    asked = [proposal.question for proposal in reading.proposals]
    for line, question in zip(read_pair_lines(path), asked, strict=True):
        names = "text", "minus", "against", "template"
        assert line.token == question.tokens
        assert all(getattr(line, name) == getattr(question, name) for name in names)
    assert pd.read_csv(path, sep="\t")["#first"].gt(0).all()


@pytest.mark.parametrize("names", [(" is",), (" is", ","), ('"', " a,b"), ()])
def test_names_are_written_as_they_are_read(names):
    assert token_list(written_names(names)) == names


def asked(**others):
    fields = {"text": "the cat", "token": "eats", "minus": ("eat",), "against": "the dog"} | others
    return lambda view: propose_questions(view, Question(**fields))


test_what_is_no_question_of_two_texts_is_refused = refused(
    {
        "a question with a second text and a token": [asked(minus=()), asked(against="")],
        "expected a question of two texts as strings": asked(text=torch.tensor([1, 2])),
        "a logit after the whole text": [asked(target="probability"), asked(position=1)],
        "vocabulary has no words": lambda view: Words(ResidualModel(view.model)),
        "the model does not answer the question itself": lambda view, first: propose_questions(
            view, replace(first, text=first.against, against=first.text)
        ),
    }
)


def test_words_of_one_form_are_alike_in_their_spelling(view):
    words = Words(view)
    cat = view.token("cat")
    assert not words.is_content(view.token("the"))
    assert {WORDS[number] for number in words.like(cat).tolist()} == {*WORDS} - {"the"}
