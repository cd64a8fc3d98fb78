"""Texts in the tokens of a model that is trained already."""

import pytest
from tests.models import toy_tokenizer
from tokenizers import processors

from bilens.data import load_documents


@pytest.fixture
def texts(tmp_path):
    """Texts of 1 to 20 words, each a line, the first of them twice."""
    lines = [" ".join(f"t{3 + (i * 7 + j) % 20}" for j in range(1 + i % 20)) for i in range(200)]
    path = tmp_path / "texts.txt"
    path.write_text("\n".join([lines[0], *lines]) + "\n")
    return path


def framing_tokenizer():
    """One that begins each text with t1, as Llama's do."""
    tokenizer = toy_tokenizer()
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="t1 $A", special_tokens=[("t1", 1)]
    )
    return tokenizer


def load(path, tmp_path, tokenizer=None, **how):
    tokenizer = tokenizer or framing_tokenizer()
    return load_documents(path, tokenizer, cache_dir=tmp_path / "cache", **how)


def rows(part):
    return [row["input_ids"].tolist() for row in part]


def test_texts_are_joined_and_cut(texts, tmp_path):
    corpus = load(texts, tmp_path, n_ctx=16, validation_share=0.2)
    train, validation = rows(corpus.train), rows(corpus.validation)
    assert {len(row) for row in train + validation} == {16}
    assert train[0][0] == validation[0][0] == 1
    distinct = set(texts.read_text().splitlines())
    full = sum(1 + len(text.split()) for text in distinct)
    assert full - 32 < 16 * len(train + validation) <= full
    assert 0.05 < len(validation) / len(train + validation) < 0.5


def test_texts_of_some_lengths_are_rows(texts, tmp_path):
    corpus = load(texts, tmp_path, shortest=5, n_ctx=9, validation_share=0.2)
    result = rows(corpus.train) + rows(corpus.validation)
    assert {len(row) for row in result} == set(range(5, 10))
    expected = {
        (1, *(int(word[1:]) for word in text.split()))
        for text in texts.read_text().splitlines()
        if 5 <= 1 + len(text.split()) <= 9
    }
    assert len(result) == len(expected)
    assert set(map(tuple, result)) == expected


def test_an_end_follows_where_the_tokenizer_gives_no_ends(texts, tmp_path):
    corpus = load(texts, tmp_path, toy_tokenizer(), shortest=5, n_ctx=9, validation_share=0.2)
    assert {row[-1] for row in rows(corpus.train)} == {2}
    assert 1 not in {row[0] for row in rows(corpus.train)}


def test_the_cache_is_opened_again(texts, tmp_path, monkeypatch):
    first = load(texts, tmp_path, n_ctx=16)
    # Training rows, most of the work, are made for those who train.
    assert "train" not in vars(first)
    assert len(first.train) > len(first.validation)
    monkeypatch.setattr("bilens.data.corpus.read_texts", None)
    assert rows(load(texts, tmp_path, n_ctx=16).train) == rows(first.train)
