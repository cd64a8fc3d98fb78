"""The language page: whole, and safe whatever the tokens say."""

import re

import pytest
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from bilens.data import Corpus
from bilens.read.language import (
    Output,
    read_attention,
    read_direction,
    read_ngrams,
    salient_bigrams,
)
from bilens.report.language import ngram_table, write_language_report
from tests.language import VOCAB, random_model, random_text, toy_tokenizer

ATTACK = "<script>alert(1)</script>"


def hostile_tokenizer() -> PreTrainedTokenizerFast:
    names = [ATTACK, '"><img/src=x>', "##</span>", *(f"t{i}" for i in range(3, VOCAB))]
    words = models.WordLevel({name: i for i, name in enumerate(names)}, unk_token="t3")
    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer(words))


def corpus(tokenizer) -> Corpus:
    rows = [{"input_ids": random_text(seed=seed)} for seed in range(6)]
    return Corpus("toy", tokenizer, rows, rows)


@pytest.fixture
def page(tmp_path, unchecked) -> str:
    model, tokenizer = random_model(bias=True), hostile_tokenizer()
    output = Output(ATTACK, ("t4", "t5"))
    write_language_report(
        tmp_path / "report.html",
        tokenizer,
        salient_bigrams(model, tokenizer, k=5),
        [read_ngrams(model, tokenizer, output, k=5)],
        [read_direction(model, corpus(tokenizer), output, eigenvectors=2, contexts=3)],
        [("data", ATTACK)],
        title=ATTACK,
        attention=read_attention(model, tokenizer, k=3),
    )
    return (tmp_path / "report.html").read_text()


def test_tokens_cannot_script_the_page(page):
    body = page[page.index("<body>") :]
    assert ATTACK not in body
    assert "<img" not in body
    assert "&lt;script&gt;alert(1)" in body


def test_the_page_shows_everything(page):
    body = page[page.index("<body>") :]
    assert body.count('class="contexts"') == 4
    assert body.count("<b>") == 4 * 3
    assert body.count("<caption>") == 2 + 2 + 4 + 4 * 4
    assert body.count('class="figure"') == 1 + 1
    assert body.count("<h2>Head 0.") == 4
    assert "looks least" in body
    assert len(re.findall(r">\[", body)) == 4 * 3


def test_the_strongest_token_has_full_colour(page):
    for line in re.findall(r"<p><b>.*?</p>", page, re.S):
        shares = [float(share) for share in re.findall(r"--share: ([\d.]+)", line)]
        assert max(shares) == 1


def test_a_direction_shows_the_ends_of_its_spectrum(unchecked):
    model = random_model()
    found = read_direction(model, corpus(toy_tokenizer()), Output("t3"), eigenvectors=2, contexts=1)
    values = found.whole.values.sort(descending=True).values
    assert found.spectrum.values.tolist() == [values[0], values[1], values[-1], values[-2]]
    for number, some in enumerate(found.contexts):
        assert some[0].contribution.total() == pytest.approx(some[0].context.activation)
        assert (some[0].context.activation > 0) == (number < 2)


def test_tables_hold_tokens_and_the_value():
    found = read_ngrams(random_model(), toy_tokenizer(), Output("t3"), k=4)
    assert ngram_table(found.heads[0], "head").header == ("virtual", "direct", "value")
    assert ngram_table(salient_bigrams(random_model(), toy_tokenizer())["mlp"], "mlp").header == (
        "input",
        "output",
        "value",
    )
    table = ngram_table(found.following, "after")
    assert table.header == ("token", "value")
    assert table.rows[0] == (found.following.token[0], f"{found.following.value[0]:.2f}")
