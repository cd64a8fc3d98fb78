"""Texts in the tokens of a model that is trained already."""

import pytest
from tests.models import toy_tokenizer
from tokenizers import processors

from bilens.data import load_documents

# Texts of 1 to 20 words.
TEXTS = [" ".join(f"t{3 + (i * 7 + j) % 20}" for j in range(1 + i % 20)) for i in range(200)]


def framing_tokenizer():
    """One that begins each text with t1, as Llama's do."""
    tokenizer = toy_tokenizer()
    frame = processors.TemplateProcessing(single="t1 $A", special_tokens=[("t1", 1)])
    tokenizer.backend_tokenizer.post_processor = frame
    return tokenizer


@pytest.fixture
def load(tmp_path, monkeypatch):
    """Load the texts, each a line and the first of them twice."""
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", str(tmp_path / "cache"))
    (tmp_path / "texts.txt").write_text("\n".join([TEXTS[0], *TEXTS]) + "\n")

    def load(tokenizer=None, **how):
        return load_documents(tmp_path / "texts.txt", tokenizer or framing_tokenizer(), **how)

    return load


def rows(part):
    return [row["input_ids"].tolist() for row in part]


def test_texts_are_joined_and_cut(load):
    corpus = load(n_ctx=16, validation_share=0.2)
    train, validation = rows(corpus.train), rows(corpus.validation)
    assert {len(row) for row in train + validation} == {16}
    assert train[0][0] == validation[0][0] == 1
    full = sum(1 + len(text.split()) for text in set(TEXTS))
    assert full - 32 < 16 * len(train + validation) <= full
    assert 0.05 < len(validation) / len(train + validation) < 0.5


def test_texts_of_some_lengths_are_rows(load):
    corpus = load(shortest=5, n_ctx=9, validation_share=0.2)
    result = rows(corpus.train) + rows(corpus.validation)
    numbered = [[1, *(int(word[1:]) for word in text.split())] for text in set(TEXTS)]
    assert sorted(result) == sorted(row for row in numbered if 5 <= len(row) <= 9)


def test_an_end_follows_where_the_tokenizer_gives_no_ends(load):
    corpus = load(toy_tokenizer(), shortest=5, n_ctx=9, validation_share=0.2)
    assert {row[-1] for row in rows(corpus.train)} == {2}
    assert 1 not in {row[0] for row in rows(corpus.train)}


def test_the_cache_is_opened_again(load, monkeypatch):
    first = load(n_ctx=16)
    # Training rows, most of the work, are made for those who train.
    assert "train" not in vars(first)
    assert len(first.train) > len(first.validation)
    monkeypatch.setattr("bilens.data.corpus.read_texts", None)
    assert rows(load(n_ctx=16).train) == rows(first.train)
