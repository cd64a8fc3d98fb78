import gzip
import json

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from bilens.data.texts import read_texts
from bilens.errors import DataError

STORIES = ["Once upon a time.\n\nThe end.", "A dog ran.", "It was café “day”."]


@pytest.fixture(autouse=True)
def no_folder(monkeypatch):
    monkeypatch.delenv("BILENS_DATA", raising=False)


def marked(stories: list[str]) -> str:
    return "".join(f"{story}\n<|endoftext|>\n" for story in stories)


@pytest.fixture
def write(tmp_path):
    """Write stories in the format that the name of the file asks for."""

    def write(name: str, stories: list[str]):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        if name.endswith(".gz"):
            path.write_bytes(gzip.compress(marked(stories).encode()))
        elif name.endswith(".parquet"):
            pq.write_table(pa.table({"number": range(len(stories)), "text": stories}), path)
        elif name.endswith(".jsonl"):
            path.write_text("".join(json.dumps({"story": story}) + "\n" for story in stories))
        else:
            path.write_text(marked(stories))
        return path

    return write


@pytest.mark.parametrize("name", ["a.txt", "a.txt.gz", "a.parquet", "a.jsonl", "A.TXT"])
def test_every_format_gives_the_same_stories_without_a_network(write, monkeypatch, name):
    monkeypatch.setattr("socket.getaddrinfo", None)
    monkeypatch.setattr("socket.socket.connect", None)
    assert list(read_texts(write(name, STORIES))) == STORIES


def test_a_name_is_no_pattern(write, tmp_path):
    (tmp_path / "[a]").mkdir()
    assert list(read_texts(write("[a]/b*.jsonl", ["first"]))) == ["first"]


def test_a_folder_is_read_by_name_and_without_other_files(write, tmp_path):
    write("b.jsonl", ["third"])
    write("a.txt", ["first", "second"])
    (tmp_path / "notes.md").write_text("no story")
    assert list(read_texts(tmp_path)) == ["first", "second", "third"]


@pytest.mark.parametrize(
    ("content", "stories"),
    [
        ("a\nb\n\n\nc\n", ["a\nb", "c"]),
        ("\n\na\nb\n\n", ["a", "b"]),
        ("one only", ["one only"]),
        ("a\n\nb\n<|endoftext|>\nlast", ["a\n\nb", "last"]),
        ("a\r\n<|endoftext|> \r\nb", ["a", "b"]),
        ("\ufeffa\n<|endoftext|>\n", ["a"]),
    ],
)
def test_where_text_is_cut(tmp_path, content, stories):
    path = tmp_path / "a.txt"
    path.write_bytes(content.encode())
    assert list(read_texts(path)) == stories


def test_missing_and_blank_rows_are_no_stories(tmp_path):
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"text": ["a", None, "  ", "b"]}), path)
    assert list(read_texts(path)) == ["a", "b"]


@pytest.mark.parametrize("rows", [[[], ["a", "b"]], [["a"], [], ["b"]], [["a", "b"], []], [[]]])
def test_groups_of_rows_may_be_empty(tmp_path, rows):
    path, stories = tmp_path / "a.parquet", [story for group in rows for story in group]
    with pq.ParquetWriter(path, pa.schema([("text", pa.string())])) as file:
        for group in rows:
            file.write_table(pa.table({"text": pa.array(group, pa.string())}))
    if stories:
        assert list(read_texts(path)) == stories
    else:
        with pytest.raises(DataError, match="holds no stories; leave it out$"):
            list(read_texts(path))


def test_rows_may_have_either_column(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "a"}\n{"story": "b"}\n{"text": null, "story": "c"}\n')
    assert list(read_texts(path)) == ["a", "b", "c"]


@pytest.mark.parametrize("below", ["tinystories", "."])
def test_tinystories_from_a_folder(write, tmp_path, monkeypatch, below):
    for name in ("train.txt.gz", "valid.txt", "extra_lowercase.txt.gz"):
        write(f"{below}/{name}", [name])
    assert list(read_texts("tinystories", tmp_path)) == ["train.txt.gz", "valid.txt"]
    monkeypatch.setenv("BILENS_DATA", str(tmp_path))
    assert list(read_texts("tinystories")) == ["train.txt.gz", "valid.txt"]


def test_tinystories_from_the_hub(monkeypatch):
    asked = []

    def load_dataset(repository, *, split, streaming):
        asked.append((repository, split, streaming))
        return [{"text": f"{split} {number}"} for number in range(2)]

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    splits = ("train", "validation")
    assert list(read_texts("tinystories")) == [f"{split} {n}" for split in splits for n in (0, 1)]
    assert asked == [("roneneldan/TinyStories", split, True) for split in splits]


@pytest.mark.parametrize("ending", ["", "\n<|endoftext|>\nshort", "\n\nshort"])
@pytest.mark.parametrize("name", ["a.txt", "a.txt.gz"])
def test_a_text_is_never_held_that_is_too_long(tmp_path, monkeypatch, name, ending):
    monkeypatch.setattr("bilens.data.texts.LONGEST", 1000)
    opened = gzip.open if name.endswith(".gz") else open
    for text in ("a" * 1001, "a b\n" * 251 if ending else "a" * 2000):
        with opened(tmp_path / name, "wt") as file:
            file.write(text + ending)
        with pytest.raises(DataError, match=f"{name} holds a text of more than 1,000 characters"):
            list(read_texts(tmp_path / name))
    with opened(tmp_path / name, "wt") as file:
        file.write("a" * 900 + ending)
    assert next(iter(read_texts(tmp_path / name))) == "a" * 900
