import json
import random
import shutil
from pathlib import Path

import pytest
import torch
from datasets.exceptions import DatasetGenerationError
from transformers import AutoTokenizer

from bilens.data import Grammar, clean, load_corpus
from bilens.data import corpus as corpus_module
from bilens.data.texts import train_tokenizer
from bilens.errors import DataError

N_CTX = 16
WORDS = ["lily", "dog", "saw", "a", "big", "red", "ball", "and", "ran", "home"]


def made_stories(count: int) -> list[str]:
    chance = random.Random(0)
    texts = (" ".join(chance.choices(WORDS, k=chance.randint(5, 30))) for _ in range(count))
    return [f"Tale {number}: {text}." for number, text in enumerate(texts)]


def write(path: Path, stories: list[str]) -> Path:
    path.write_text("".join(f"{story}\n<|endoftext|>\n" for story in stories))
    return path


@pytest.fixture
def source(tmp_path):
    return write(tmp_path / "tales.txt", made_stories(120))


@pytest.fixture
def load(tmp_path, source, monkeypatch):
    """Load the tales, or another corpus, with the cache in the test's own folder."""
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", str(tmp_path / "cache"))

    def load(name=source, **arguments):
        clean = None if name == "grammar" else "tinystories"
        return load_corpus(name, **{"n_ctx": N_CTX, "clean": clean, **arguments})

    return load


def stream(split) -> list[int]:
    return split["input_ids"][:].flatten().tolist()


def stories_in(corpus, split) -> list[str]:
    """Whole stories out of the blocks, as the tokenizer writes them."""
    pieces = " ".join(corpus.tokenizer.convert_ids_to_tokens(stream(split))).split("[BOS]")
    return [piece.split("[EOS]")[0].strip() for piece in pieces if "[EOS]" in piece]


def test_blocks_are_ready_for_training_and_less_than_a_block_is_dropped(load):
    corpus = load()
    assert corpus.name.endswith("tales.txt")
    for split in (corpus.train, corpus.validation):
        assert split.column_names == ["input_ids"]
        block = split[0]["input_ids"]
        assert (block.shape, block.dtype) == ((N_CTX,), torch.int64)
    joined = sum(len(corpus.tokenizer.tokenize(clean(story))) + 2 for story in made_stories(120))
    assert joined - 2 * N_CTX < N_CTX * (len(corpus.train) + len(corpus.validation)) <= joined


def test_the_blocks_are_the_stories_joined(load):
    corpus = load(validation_share=0.25)
    written = {" ".join(corpus.tokenizer.tokenize(clean(story))) for story in made_stories(120)}
    train, validation = (stories_in(corpus, split) for split in (corpus.train, corpus.validation))
    assert set(train) | set(validation) <= written
    assert not set(train) & set(validation)
    # The last story of a split is cut where its last whole block ends.
    assert (len(train), len(validation)) in {(90 - i, 30 - j) for i in range(4) for j in range(4)}
    assert train != sorted(train)


def test_special_tokens_that_a_story_spells_are_text(load, tmp_path):
    path = write(tmp_path / "odd.txt", [f"tale {number} [BOS] and [EOS]." for number in range(40)])
    corpus = load(path)
    ids = stream(corpus.train) + stream(corpus.validation)
    assert ids.count(corpus.tokenizer.bos_token_id) <= 40


def test_duplicates_go_whatever_file_and_case_they_are_in(load, tmp_path):
    stories = made_stories(40)
    folder = tmp_path / "folder"
    folder.mkdir()
    write(folder / "train.txt", stories)
    write(folder / "valid.txt", [story.upper() for story in stories[:20]] + ["Café  “one”"])
    write(folder / "more.txt", ['cafe "one"'])
    corpus = load(folder, validation_share=0.3)
    result = stories_in(corpus, corpus.train) + stories_in(corpus, corpus.validation)
    assert len(result) == len(set(result))
    assert 36 <= len(result) <= 41


def test_the_tokenizer_is_trained_on_the_training_split_alone(load, tmp_path):
    """Every story has a letter of its own, and letters are all in the vocabulary."""
    alone = write(tmp_path / "alone.txt", [f"{letter} " * 20 for letter in "!#$%&*+-/=?@"])
    corpus = load(alone, validation_share=0.25)
    assert len(set(stream(corpus.train)) - {corpus.tokenizer.unk_token_id}) == 9 + 2
    assert set(stream(corpus.validation)) == {1, 2, 3}


def test_the_same_seed_gives_the_same_corpus(load, tmp_path):
    first = load(seed=4, vocab_size=60)
    assert len(first.tokenizer) == 60
    blocks = stream(first.train)
    assert stream(load(seed=5, vocab_size=60).train) != blocks
    shutil.rmtree(tmp_path / "cache")
    again = load(seed=4, vocab_size=60)
    assert stream(again.train) == blocks
    assert again.tokenizer.get_vocab() == first.tokenizer.get_vocab()


def test_the_second_time_the_cache_is_opened(load, monkeypatch):
    first = load()
    for name in ("read_texts", "train_tokenizer", "clean"):
        monkeypatch.setattr(corpus_module, name, None)
    second = load()
    assert stream(second.train) == stream(first.train)
    assert second.tokenizer.get_vocab() == first.tokenizer.get_vocab()


def test_a_cache_that_cannot_be_used_is_named(load, tmp_path):
    load()
    for path in (tmp_path / "cache").rglob("generator-train.arrow"):
        path.write_bytes(b"")
    with pytest.raises(DataError, match="the cache of texts and tokens, cannot be used .*Delete"):
        load()


def test_a_bug_is_not_taken_for_a_cache_that_cannot_be_used(load, monkeypatch):
    monkeypatch.setattr(corpus_module, "clean", lambda text: {}[text])
    with pytest.raises(DatasetGenerationError):
        load()


def test_changed_files_are_another_cache(load, source):
    before = load()
    write(source, made_stories(140))
    assert len(load().train) > len(before.train)


def test_a_given_tokenizer_is_used_if_it_can_be(load):
    plain = train_tokenizer(["other words entirely, 0:."], 60, "tinystories")
    assert load(tokenizer=plain).tokenizer.get_vocab() == plain.get_vocab()
    assert len(load().tokenizer) != len(plain)
    message = "^tokenizer has 60 tokens, expected at most vocab_size=50; use the tokenizer that was"
    with pytest.raises(DataError, match=message):
        load(tokenizer=plain, vocab_size=50)
    plain.eos_token = None
    message = r"^tokenizer has bos_token=\[BOS\] and eos_token=None, expected a token for the begin"
    with pytest.raises(DataError, match=message):
        load(tokenizer=plain)


def test_the_grammar(load, monkeypatch):
    assert corpus_module.GRAMMAR_SENTENCES == 50_000
    monkeypatch.setattr("bilens.data.corpus.GRAMMAR_SENTENCES", 500)
    corpus = load("grammar", n_ctx=12)
    grammar = Grammar()
    assert (corpus.name, len(corpus.train), len(corpus.validation)) == ("grammar", 475, 25)
    blocks = corpus.validation[:]["input_ids"]
    assert blocks.dtype == torch.int64
    assert grammar.next_distribution(blocks).shape == (25, 12, 72)
    assert corpus.tokenizer.get_vocab() == grammar.tokenizer().get_vocab()
    assert torch.equal(load("grammar", n_ctx=12).validation[:]["input_ids"], blocks)
    other = load("grammar", n_ctx=12, seed=1, validation_share=0.1)
    assert not torch.equal(other.validation[:25]["input_ids"], blocks)
    assert len(other.validation) == 50


def test_the_grammar_keeps_its_tokenizer(load, tmp_path, monkeypatch):
    monkeypatch.setattr("bilens.data.corpus.GRAMMAR_SENTENCES", 500)
    Grammar().tokenizer().save_pretrained(tmp_path / "saved")
    saved = AutoTokenizer.from_pretrained(tmp_path / "saved")
    assert load("grammar", tokenizer=saved).tokenizer.get_vocab() == saved.get_vocab()
    with pytest.raises(DataError, match="^tokenizer has other tokens than grammar, expected"):
        load("grammar", tokenizer=train_tokenizer(made_stories(20), vocab_size=60))
    with pytest.raises(DataError, match="^tokenizer has 72 tokens, expected at most vocab_size=71"):
        load("grammar", vocab_size=71)


KEPT = [
    *("ROMEO:\nIt hath, happy KING.\n  And more.", "romeo:\nIt hath, happy KING.\n  And more."),
    *("def f(x):\n\treturn  x", "Café “day” 雪 😀", "Привет, мир", "a\r\nb\u2028c\x0bd"),
]


def test_a_text_of_yours_is_what_you_gave(load, tmp_path):
    path = tmp_path / "kept.jsonl"
    rows = [{"text": f"{text} {number}"} for text in KEPT for number in range(20)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    corpus = load(path, clean=None, vocab_size=1100, validation_share=0.1)
    assert corpus.provenance["clean"] == "none"
    found = []
    for split in (corpus.train, corpus.validation):
        ids = stream(split)
        assert corpus.tokenizer.unk_token_id not in ids
        texts = corpus.tokenizer.decode(ids).split("[BOS]")
        found += [text.removesuffix("[EOS]") for text in texts if text.endswith("[EOS]")]
    assert {*found} <= {row["text"] for row in rows}
    assert len(found) == len({*found}) >= len(rows) - 4


def test_the_cleaning_is_that_of_the_source_or_as_asked(load, source):
    assert load(source, clean=None).provenance["clean"] == "none"
    assert load(source).provenance["clean"] == "tinystories"
    assert corpus_module.cleaning_of("tinystories") == "tinystories"
    with pytest.raises(DataError, match="clean='none' has no effect on grammar; leave it out"):
        load("grammar", clean="none")
