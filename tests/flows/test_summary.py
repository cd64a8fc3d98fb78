"""The summary of a language model: its loss, its strongest parts, and the beginning of its page."""

from dataclasses import replace
from math import exp

import pytest
import torch
from torch.nn import functional

import bilens
from bilens.data import Corpus
from bilens.errors import BilensError
from bilens.flows.summary import example_of, measure_loss, read_summary
from bilens.language.names import TokenDirection, in_words, quoted
from bilens.pages import write_report
from tests.models import random_text, toy_tokenizer

ROWS = [{"input_ids": random_text(seed=seed)} for seed in range(6)]


def digits_of(seed):
    """Return tokens whose names hold no other token's, so that texts are read back as they are."""
    return torch.randint(3, 10, (9,), generator=torch.Generator().manual_seed(seed))


@pytest.fixture(scope="module")
def summary(llama):
    rows = [{"input_ids": digits_of(seed)} for seed in range(6)]
    return read_summary(llama, Corpus("toy", toy_tokenizer(), rows, rows), "t3 t4 t5")


def test_the_loss_is_that_of_the_model(llama):
    texts = [row["input_ids"] for row in ROWS[:4]]
    measured = measure_loss(llama, texts, 3 * (len(texts[0]) - 1))
    rows = [(llama.logits(ids[None])[0, :-1].double(), ids[1:]) for ids in texts[:3]]
    parts = torch.stack([functional.cross_entropy(*row) for row in rows])
    assert (measured.n_texts, measured.n_tokens) == (3, 3 * (len(texts[0]) - 1))
    assert measured.loss == pytest.approx(float(parts.mean()), rel=1e-5)
    # Texts of one length: the error of a mean of three numbers.
    assert measured.error == pytest.approx(float(parts.std() / 3**0.5), rel=1e-4)
    assert measure_loss(llama, texts, 10_000, length=3).n_tokens == 4 * 2


def test_without_an_english_example_the_texts_are_beginnings_of_the_corpus(llama):
    rows = [{"input_ids": digits_of(seed)} for seed in range(6)]
    example = example_of(llama, Corpus("toy", toy_tokenizer(), rows, rows))
    assert example.direction is None
    first, second = (llama.ids(text).tolist() for text in (example.prompt, example.against))
    assert first == digits_of(0)[:8].tolist()
    assert second in [digits_of(seed)[:8].tolist() for seed in range(1, 6)]


def test_the_page_begins_with_a_question_and_its_answer(summary, tmp_path):
    write_report(tmp_path / "page.html", [summary], title="toy")
    page = (tmp_path / "page.html").read_text()
    best = summary.next_tokens["next token"]
    assert in_words(summary.flow.question.token) == best[0]
    # Of two texts, between which no attention sink stands.
    assert summary.flow.flow.two_texts
    question = page.index("<h1>")
    answer = page.index("starts mostly at", question)
    loss = page.index(f"{summary.text_loss.loss:.2f} ± {summary.text_loss.error:.2f}")
    assert question < answer < page.index('class="flow') < loss
    assert "<dl>" not in page
    perplexity = pytest.approx(exp(summary.text_loss.loss), abs=0.01)
    assert dict(summary.facts())["perplexity"] == perplexity


def test_without_texts_it_is_a_sentence_that_the_model_answers(llama, tmp_path):
    story = bilens.load("story")
    summary = read_summary(story)
    question = summary.flow.question
    # It knows no plural at a distance, and cuts "keys" into pieces.
    assert question.text == "The girl was sad because"
    assert question.against == "The boy was sad because"
    assert (question.token, question.minus) == ("she", ("he",))
    assert "loss" not in str(summary.facts())
    write_report(tmp_path / "page.html", [summary], title="story")
    assert "no texts were named" in (tmp_path / "page.html").read_text()
    assert read_summary(story, None, "She", against="He").flow.flow.two_texts
    with pytest.raises(BilensError, match="no texts to take one from; give --prompt"):
        read_summary(llama)


def test_a_model_at_chance_is_called_so(summary):
    # The weights are random, and the loss is that of guessing.
    assert summary.sections()[0].text.startswith("The model is no better than guessing evenly")
    trained = replace(summary, text_loss=replace(summary.text_loss, loss=2.0))
    assert trained.sections()[0].text.startswith("The model prefers ")


def test_tokens_are_text():
    names = [in_words(name) for name in ("Ġto", "▁to", " to", "to", "##to", "Ċ")]
    assert names == [*['" to"'] * 3, "to", "##to", '"\\n"']
    assert [in_words('"'), quoted('"'), quoted("was")] == ["'\"'", "'\"'", '"was"']
    assert TokenDirection("Ġare", ("Ġis",)).words == '" are" minus " is"'
