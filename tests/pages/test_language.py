"""The language page: whole, and safe whatever the tokens say."""

import re

import pytest
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from bilens.data import Corpus
from bilens.language import TokenDirection, read_attention
from bilens.language.ngrams import bigrams, read_ngrams
from bilens.language.outputs import LanguageReading, read_direction, read_language
from bilens.pages import write_report
from bilens.pages.language import ngram_table
from bilens.transformer import ResidualModel
from tests.models import VOCAB, random_model, random_text, toy_tokenizer
from tests.tokenizers_of_all_kinds import tokenizer_of, view_with

ATTACK = "<script>alert(1)</script>"


def hostile_tokenizer() -> PreTrainedTokenizerFast:
    names = [ATTACK, '"><img/src=x>', "##</span>", *(f"t{i}" for i in range(3, VOCAB))]
    words = models.WordLevel({name: i for i, name in enumerate(names)}, unk_token="t3")
    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer(words))


def corpus(tokenizer) -> Corpus:
    rows = [{"input_ids": random_text(seed=seed)} for seed in range(6)]
    return Corpus(ATTACK, tokenizer, rows, rows)


@pytest.fixture(scope="module")
def page(tmp_path_factory) -> str:
    tokenizer = hostile_tokenizer()
    model, texts = ResidualModel(random_model(bias=True), tokenizer), corpus(tokenizer)
    asked = {"minus": ("t4", "t5"), "layer": 0}
    reading = LanguageReading(
        model=model,
        ngrams=[read_ngrams(model, ATTACK, **asked, k=5)],
        directions=[read_direction(model, texts, ATTACK, **asked, eigenvectors=2, k=3)],
        attention=read_attention(model, layer=0, k=3),
        left_out=(ATTACK,),
    )
    path = tmp_path_factory.mktemp("page") / "report.html"
    write_report(path, [reading], title=ATTACK)
    return path.read_text().partition("<body>")[2]


def test_tokens_cannot_script_the_page(page):
    assert ATTACK not in page
    assert "<img" not in page
    assert "&lt;script&gt;alert(1)" in page


def test_the_page_shows_everything(page):
    assert page.count('class="contexts"') == 4
    assert page.count("<details><summary><b>") == page.count(">[") == 4 * 3
    assert page.count("<caption>") == 2 + 4 + 4 * 4 + 4
    assert page.count("<figure") == page.count("<h2>Heads of layer 0") == 1
    assert "attends least" in page


def test_the_strongest_token_has_full_colour(page):
    for line in re.findall(r"<summary><b>.*?</summary>", page, re.S):
        shares = [float(share) for share in re.findall(r"--share: ([\d.]+)", line)]
        assert max(shares) == 1
    assert page.count("<summary>") > 4


def test_a_direction_shows_the_ends_of_its_spectrum(view):
    result = read_direction(view, corpus(toy_tokenizer()), "t3", layer=0, eigenvectors=2, k=1)
    values = result.all_eigenvectors.values.sort(descending=True).values
    assert result.spectrum.values.tolist() == [values[0], values[1], values[-1], values[-2]]
    for number, several in enumerate(result.contexts):
        context, contribution = several[0]
        assert contribution.total() == pytest.approx(context.activation)
        assert (context.activation > 0) == (number < 2)


def test_a_model_without_a_tensor_has_a_page_that_says_so(llama, tmp_path):
    texts = corpus(toy_tokenizer())
    reading = read_language(llama, texts, [TokenDirection("t3")], layer=1, among=10)
    assert reading.directions == []
    figures = write_report(tmp_path / "report.html", [reading], title="Llama")
    assert figures == {}
    body = " ".join((tmp_path / "report.html").read_text().split())
    assert "is not a tensor. `bilens linearise` fits lines, `bilens anneal` trains" in body
    assert "ignore other layers and norms" in body
    assert body.count("<h2>Heads of layer 1") == 1


def test_tables_hold_tokens_and_the_value(view):
    result = read_ngrams(view, "t3", layer=0, k=4)
    head = ngram_table(result.heads[0], "head")
    assert head.header == ["earlier token", "present token", "logits"]
    assert ngram_table(bigrams(view, layer=0), "mlp").header == ["input", "output", "logits"]
    after = result.following
    table = ngram_table(after, "after")
    assert table.header == ["token", "logits"]
    assert table.rows[0] == (after["token"][0], f"{after['value'][0]:.2f}")


@pytest.mark.parametrize("kind", ["byte-level", "SentencePiece"])
def test_no_table_of_tokens_shows_a_tokenizer_s_mark_of_a_space(kind):
    model = view_with(tokenizer_of(kind))
    readings = [
        read_attention(model, layer=0, k=12, components=4),
        read_ngrams(model, model.tokenizer.convert_ids_to_tokens(30), layer=0, k=12),
    ]
    tables = [table for reading in readings for table in reading.tables().values()]
    cells = [cell for table in tables for name in table for cell in table[name]]
    words = [cell for cell in cells if isinstance(cell, str)]
    assert any(word.startswith('" ') for word in words)
    assert not [word for word in words if word[:1] in ("Ġ", "▁") and len(word) > 1]
