"""The summary of a language model: its loss, its strongest parts, and the beginning of its page."""

import pytest
import torch
from torch.nn import functional

from bilens.data import Corpus
from bilens.read.language.names import TokenDirection, in_words
from bilens.read.summary import example_prompt, read_summary, text_loss
from bilens.report import write_report
from bilens.residual import ResidualModel
from tests.families import tiny
from tests.language import random_text, toy_tokenizer

ROWS = [{"input_ids": random_text(seed=seed)} for seed in range(6)]


@pytest.fixture(scope="module")
def summary():
    model = ResidualModel(tiny("llama"), toy_tokenizer())
    return read_summary(model, Corpus("toy", toy_tokenizer(), ROWS, ROWS), "t3 t4 t5")


def test_the_loss_is_that_of_the_model():
    model = ResidualModel(tiny("llama"), toy_tokenizer())
    texts = [row["input_ids"] for row in ROWS[:3]]
    loss, counted = text_loss(model, texts, sum(len(ids) - 1 for ids in texts))
    parts = [
        functional.cross_entropy(model.logits(ids[None])[0, :-1].double(), ids[1:], reduction="sum")
        for ids in texts
    ]
    assert counted == sum(len(ids) - 1 for ids in texts)
    assert loss == pytest.approx(float(sum(parts)) / counted, rel=1e-5)


def test_the_strongest_heads_are_those_of_the_flow(summary):
    heads = [node for node in summary.flow.flow.nodes if node.kind == "head"]
    strongest = max(heads, key=lambda node: abs(node.flow))
    table = summary.tables()["strongest heads"]
    assert table.flow[0] == strongest.flow
    assert (table.flow.abs().diff().dropna() <= 0).all()
    logits = summary.flow.flow.trace.logits[-1]
    best = summary.tables()["next tokens"]
    assert best.probability[0] == pytest.approx(float(logits.softmax(-1).max()), rel=1e-5)
    assert in_words(summary.flow.question.token) == best.token[0]


def test_the_page_says_first_what_it_leaves_out(summary, tmp_path):
    write_report(tmp_path / "page.html", [summary], title="toy")
    page = (tmp_path / "page.html").read_text()
    assert page.index("ignore other layers and norms") < page.index("next tokens")
    assert dict(summary.facts())["perplexity"] == pytest.approx(
        float(torch.tensor(summary.loss).exp()), abs=0.01
    )


def test_tokens_are_text():
    assert [in_words(name) for name in ("Ġto", "▁to", " to", "to", "##to", "Ċ")] == [
        *['" to"'] * 3,
        "to",
        "##to",
        '"\\n"',
    ]
    assert TokenDirection("Ġare", ("Ġis",)).words == '" are" minus " is"'


def test_an_example_is_a_text_of_the_corpus():
    model = ResidualModel(tiny("llama"), toy_tokenizer())
    prompt, direction = example_prompt(model, Corpus("toy", toy_tokenizer(), ROWS, ROWS))
    assert direction is None
    first = ROWS[0]["input_ids"][:8]
    assert prompt == toy_tokenizer().decode(first, skip_special_tokens=True).strip()
