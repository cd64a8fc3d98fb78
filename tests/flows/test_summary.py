"""The summary of a language model: its loss, its strongest parts, and the beginning of its page."""

from dataclasses import replace
from math import exp, log
from pathlib import Path

import pytest
import torch
from torch.nn import functional

import bilens
from bilens.cli import main
from bilens.data import Corpus
from bilens.errors import BilensError
from bilens.flows.summary import example_of, measure_loss, read_summary
from bilens.language import corpus_for
from bilens.language.names import TokenDirection, in_words, quoted
from bilens.pages import write_report
from bilens.train.run_directory import last_loss
from tests.command_line import in_json, output_of
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
    measured = measure_loss(llama, ROWS[:4], 3 * (len(texts[0]) - 1))
    rows = [(llama.logits(ids[None])[0, :-1].double(), ids[1:]) for ids in texts[:3]]
    parts = torch.stack([functional.cross_entropy(*row) for row in rows])
    assert (measured.n_texts, measured.n_tokens) == (3, 3 * (len(texts[0]) - 1))
    assert measured.loss == pytest.approx(float(parts.mean()), rel=1e-5)
    # Texts of one length: the error of a mean of three numbers.
    assert measured.error == pytest.approx(float(parts.std() / 3**0.5), rel=1e-4)
    right = torch.cat([ids[1:] for ids in texts[:3]])
    shares = right.bincount() / len(right)
    unigram = -shares[shares > 0].log() @ shares[shares > 0]
    assert measured.unigram == pytest.approx(float(unigram), rel=1e-5)
    written = "".join(
        llama.tokenizer.decode(ids[1:], skip_special_tokens=True) for ids in texts[:3]
    )
    assert measured.n_characters == measured.n_bytes == len(written)
    nats = measured.loss * measured.n_tokens
    assert measured.bits(len(written)) == pytest.approx(nats / log(2) / len(written))
    assert (measured.is_all, measured.shortage) == (False, "")


@pytest.mark.parametrize("spread", [0.0, 0.1, 1.0])
def test_texts_are_read_until_the_error_is_a_percent_or_there_are_no_more(spread):
    generator = torch.Generator().manual_seed(0)
    means = 2 + spread * torch.randn(400, generator=generator).clamp(-1.9, None)
    rows = [{"input_ids": torch.full((3,), number % 7)} for number in range(400)]
    # The right token of a text has the logit that gives the loss; all others have none.
    losses = iter(means.tolist())

    class Model:
        vocab_size, device, tokenizer = 7, "cpu", None

        def logits(self, ids):
            logit = -log((exp(next(losses)) - 1) / 6)
            return (logit * functional.one_hot(ids, 7)).double()

    measured = measure_loss(Model(), rows)
    read = means[: measured.n_texts].double()
    assert measured.loss == pytest.approx(float(read.mean()), rel=1e-4)
    assert measured.error == pytest.approx(float(read.std() / len(read) ** 0.5), abs=1e-4)
    expected = {0.0: (8, False), 0.1: (25, False), 1.0: (400, True)}[spread]
    assert measured.is_all == expected[1]
    assert measured.n_texts == pytest.approx(expected[0], rel=0.5)
    assert ("an error of 1% takes more text" in measured.shortage) == measured.is_all


def test_a_run_is_measured_beside_its_own_log(tmp_path, monkeypatch, capsys):
    """Kept texts, from the command that trains on them to bits a character."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", str(tmp_path / "cache"))
    texts = [f"ROMEO {a}:\nIt hath, happy {b}!" for a in range(20) for b in ("KING", "Queen")]
    Path("verse.txt").write_text("<|endoftext|>".join(texts))
    small = "--d-model 8 --d-hidden 8 --n-heads 2 --n-ctx 16 --vocab-size 90 --batch-size 4"
    train = f"train language --data verse.txt --output run --epochs 1 --device cpu {small}"
    assert "texts of verse.txt: kept as they are (--clean)" in output_of(capsys, *train.split())
    record = in_json(capsys, "summary", "run")
    logged = last_loss(tmp_path / "run")
    assert record["training_loss"] == pytest.approx(logged)
    view = bilens.load("run")
    corpus = corpus_for(view, "verse.txt")
    rows = [row["input_ids"] for row in corpus.validation]
    nats = sum(float(view.model(ids[None], labels=ids[None]).loss) * (len(ids) - 1) for ids in rows)
    written = "".join(view.tokenizer.decode(ids[1:], skip_special_tokens=True) for ids in rows)
    assert "ROMEO" in written
    assert "\n" in written
    measured = record["text_loss"]
    assert measured["n_characters"] == len(written)
    assert measured["loss"] * measured["n_tokens"] == pytest.approx(nats, rel=1e-4)
    assert measured["loss"] == pytest.approx(logged, rel=1e-3)
    shown = output_of(capsys, "summary", "run")
    assert f"bits a character {nats / log(2) / len(written):.4g}" in shown
    assert "held-out tokens are measured" in shown
    assert "ROMEO" in output_of(
        capsys, "generate", "run", "--prompt", "ROMEO 3:\n", "--tokens", "3"
    )


def test_the_cleaning_is_said_at_the_start(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("a.txt").write_text("too short")
    asked = ["train", "language", "--data", "a.txt", "--clean", "tinystories"]
    with pytest.raises(SystemExit):
        main(asked)
    assert "texts of a.txt: cleaned, lower-case ASCII on one line" in capsys.readouterr().out


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
    assert not summary.flow.question.is_neutral
    question = page.index("<h1>")
    answer = page.index("starts mostly at", question)
    loss = page.index(f"{summary.text_loss.loss:.3f} ± {summary.text_loss.error:.3f}")
    assert question < answer < page.index('class="flow') < loss
    assert "<dl>" not in page
    perplexity = pytest.approx(exp(summary.text_loss.loss), abs=0.01)
    assert dict(summary.facts())["perplexity"] == perplexity


def test_operations_of_a_token_are_counted(llama):
    facts = dict(read_summary(llama, None, "t3 t4 t5", against="t4 t4 t5").facts())
    config, time = llama.model.config, 3
    d, hidden, n = config.hidden_size, config.intermediate_size, config.num_hidden_layers
    of_keys = config.num_key_value_heads / config.num_attention_heads
    products = n * ((2 + 2 * of_keys) * d * d + 3 * d * hidden) + d * config.vocab_size
    attention = n * 2 * 2 * time * d
    assert facts["operations of a token, forward"] == round(2 * products + attention)


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
    assert read_summary(story, None, "She", against="He").flow.question.against == "He"
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
