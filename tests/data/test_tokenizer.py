import subprocess
import sys
from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoTokenizer

from bilens.data import clean
from bilens.data.texts import train_tokenizer as trained_on
from bilens.errors import BilensError

TEXTS = [
    'Lily said, "I can swim!" The dog was swimming in 12 pools.',
    "The dog and Lily swim. It's a big dog, isn't it?",
    "Zoe quietly jumped over five foxes: kept walking by.",
] * 3
train_tokenizer = partial(trained_on, clean="tinystories")
SPECIAL = ["[PAD]", "[UNK]", "[BOS]", "[EOS]"]


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer(TEXTS, vocab_size=160)


def test_the_four_rules(tokenizer):
    assert tokenizer.tokenize('Lily  said,"THE dog\n12,1!') == [
        *("lily", "said", ",", '"', "the", "dog", "1", "2", ",", "1", "!")
    ]
    assert tokenizer.tokenize("isn't Élan") == ["isn", "'", "t", *tokenizer.tokenize("elan")]
    pieces = tokenizer.tokenize("swimdog")
    assert len(pieces) > 1
    assert all(piece.startswith("##") for piece in pieces[1:])
    assert "".join(piece.removeprefix("##") for piece in pieces) == "swimdog"


def test_special_tokens_come_first_and_are_not_added(tokenizer):
    assert tokenizer.convert_ids_to_tokens([0, 1, 2, 3]) == SPECIAL
    assert tokenizer.all_special_tokens == ["[BOS]", "[EOS]", "[UNK]", "[PAD]"]
    assert tokenizer("lily")["input_ids"] == [tokenizer.get_vocab()["lily"]]
    assert tokenizer("[BOS] lily")["input_ids"] == [2, tokenizer.get_vocab()["lily"]]


@given(st.text())
def test_tokens_are_letters_or_one_character(tokenizer, text):
    for token in tokenizer.tokenize(clean(text)):
        letters = token.removeprefix("##")
        assert letters.isalpha() or len(token) == 1 or token in SPECIAL
        assert letters == letters.lower() or token in SPECIAL


@given(st.lists(st.sampled_from(["lily", "said", "swimming", "foxes", "dog"])))
def test_words_survive_the_way_back(tokenizer, words):
    text = " ".join(words)
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == "".join(f" {word}" for word in words)


def test_decoding_joins_words_and_sentences(tokenizer):
    ids = tokenizer("Lily said: swimming isn't big.")["input_ids"]
    assert tokenizer.decode(ids) == " lily said : swimming isn ' t big."


def test_the_folder_loads_like_any_other(tokenizer, tmp_path):
    tokenizer.save_pretrained(tmp_path)
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    assert loaded.get_vocab() == tokenizer.get_vocab()
    assert loaded(TEXTS[0])["input_ids"] == tokenizer(TEXTS[0])["input_ids"]
    assert (loaded.bos_token, loaded.eos_token, loaded.pad_token) == ("[BOS]", "[EOS]", "[PAD]")


@pytest.mark.slow
def test_another_process_trains_the_same(tokenizer):
    """Hash maps are seeded per process; within one, chance would not show."""
    code = (
        "from bilens.data.texts import train_tokenizer\n"
        f"tokenizer = train_tokenizer({TEXTS!r}, vocab_size=160, clean='tinystories')\n"
        "print(sorted(tokenizer.get_vocab().items()))"
    )
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert shown.stdout.strip() == str(sorted(tokenizer.get_vocab().items()))


def test_the_size_is_kept_or_refused():
    assert len(train_tokenizer(TEXTS, vocab_size=110)) == 110
    assert len(train_tokenizer(["a b"], vocab_size=160)) == 4 + 26 + 2
    message = "^vocab_size=20, expected at least 32, room for the special tokens and every single"
    with pytest.raises(BilensError, match=message):
        train_tokenizer(["a b"], vocab_size=20)
    # More would end the process where memory for a table of so many is asked for.
    with pytest.raises(BilensError, match="^vocab_size=10000000000, expected a whole number, at"):
        train_tokenizer(["a b"], vocab_size=10**10)


def test_a_word_without_end_is_left_out_of_the_training():
    """Words too long for WordPiece are unknown anyway, and training on them takes long."""
    plain = train_tokenizer(TEXTS, vocab_size=160)
    with_long = train_tokenizer([*TEXTS, "e" * 101, "x" * 5_000], vocab_size=160)
    assert with_long.get_vocab() == plain.get_vocab()
    assert with_long.tokenize("e" * 101) == ["[UNK]"]
    just = train_tokenizer([*TEXTS, *["e" * 100] * 9], vocab_size=160)
    assert just.get_vocab() != plain.get_vocab()


@pytest.fixture(scope="module")
def lossless():
    return trained_on(TEXTS, vocab_size=1024)


@given(st.text(st.characters(codec="utf-8")))
def test_a_text_that_is_kept_comes_back(lossless, text):
    ids = lossless(text, split_special_tokens=True)["input_ids"]
    assert ids[0] == lossless.bos_token_id
    assert lossless.unk_token_id not in ids
    assert lossless.decode(ids[1:]) == text


def test_words_of_kept_texts_are_tokens_and_special_ones_come_first(lossless, tmp_path):
    assert lossless.tokenize(" Lily said") == ["ĠLily", "Ġsaid"]
    assert lossless.convert_ids_to_tokens([0, 1, 2, 3]) == SPECIAL
    assert len(trained_on(["a b"], vocab_size=20)) == 4 + 3 + 1
    with pytest.raises(BilensError, match="^vocab_size=6, expected at least 7, room for the spec"):
        trained_on(["a b"], vocab_size=6)
    lossless.save_pretrained(tmp_path)
    assert (
        AutoTokenizer.from_pretrained(tmp_path)("Ab\n")["input_ids"]
        == lossless("Ab\n")["input_ids"]
    )
    again = trained_on([*TEXTS, "x" * 5_000], vocab_size=1024)
    assert again.get_vocab() == lossless.get_vocab()
