import gzip
import json

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bilens.data import clean, read_texts
from bilens.errors import DataError

STORIES = ["Once upon a time.\n\nThe end.", "A dog ran.", "It was café “day”."]


@pytest.fixture(autouse=True)
def no_folder(monkeypatch):
    monkeypatch.delenv("BILENS_DATA", raising=False)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("“It’s late…” — she said", '"It\'s late..." - she said'),
        ("â€œIt isâ€\x9d â€“ he saidâ€¦ itâ€™s", '"It is" - he said... it\'s'),
        ("â€œcutâ€ off", '"cut" off'),
        ("Café Ångström naïve", "Cafe Angstrom naive"),
        ("ﬁne ﬀ ①", "fine ff 1"),
        ("1½ it´s", "11/2 it's"),
        ("Æsop, œuvre, Søren, Łódź, groß", "AEsop, oeuvre, Soren, Lodz, gross"),
        ("a ☃ snowman 雪 ", "a snowman"),
        (" two \t\n\n lines\xa0here\u200b\x07x\x00 ", "two lines here x"),
        ("", ""),
    ],
)
def test_cleaning(text, expected):
    assert clean(text) == expected


@given(st.text())
def test_what_is_clean_is_ascii_on_one_line_and_stays(text):
    once = clean(text)
    assert all(" " <= letter <= "~" for letter in once)
    assert once == " ".join(once.split(" ")).strip()
    assert clean(once) == once


@given(st.text(st.characters(min_codepoint=33, max_codepoint=126)))
def test_cleaning_keeps_ascii(text):
    assert clean(text) == text


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
def test_every_format_gives_the_same_stories(write, name):
    assert list(read_texts(write(name, STORIES))) == STORIES


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


@pytest.mark.parametrize("below", ["tinystories", "."])
@pytest.mark.parametrize("by_environment", [True, False])
def test_tinystories_from_a_folder(write, tmp_path, monkeypatch, below, by_environment):
    write(f"{below}/train.txt.gz", ["train"])
    write(f"{below}/valid.txt", ["valid"])
    write(f"{below}/extra_lowercase.txt.gz", ["not this"])
    if by_environment:
        monkeypatch.setenv("BILENS_DATA", str(tmp_path))
    data_dir = None if by_environment else tmp_path
    assert list(read_texts("tinystories", data_dir)) == ["train", "valid"]


def test_tinystories_incomplete(write, tmp_path):
    write("tinystories/train.txt.gz", ["train"])
    message = r"^data_dir: expected the files train.txt.gz, valid.txt.gz .* of tinystories in .*"
    with pytest.raises(DataError, match=message + "found not all of them there$"):
        next(read_texts("tinystories", tmp_path))


def test_tinystories_from_the_hub(monkeypatch):
    asked = []

    def load_dataset(repository, *, split, streaming):
        asked.append((repository, split, streaming))
        return [{"text": f"{split} {number}"} for number in range(2)]

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    stories = list(read_texts("tinystories"))
    assert stories == ["train 0", "train 1", "validation 0", "validation 1"]
    assert asked == [
        ("roneneldan/TinyStories", "train", True),
        ("roneneldan/TinyStories", "validation", True),
    ]


def test_the_hub_out_of_reach(monkeypatch):
    def load_dataset(repository, *, split, streaming):
        raise ConnectionError("no route")

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    message = (
        r"^tinystories: expected the data set roneneldan/TinyStories from the Hugging Face hub, "
        r"found ConnectionError: no route. Either pass data_dir .* try again$"
    )
    with pytest.raises(DataError, match=message):
        next(read_texts("tinystories"))


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.txt", b"", "expected stories, found none in the file; leave it out$"),
        ("a.txt", b" \n\n<|endoftext|>\n", "expected stories, found none in the file"),
        ("a.txt", b"ab\x00\x01", r"found a binary file \(it has zero bytes\); leave it out"),
        ("a.txt", "café".encode("latin-1"), "expected text in UTF-8, .* iconv"),
        ("a.txt.gz", b"plain", "expected a readable file, found BadGzipFile: .*; fetch it again"),
        (
            "a.txt.gz",
            gzip.compress(b"cut off", mtime=0)[:-9],
            "expected a readable file, found EOFError",
        ),
        ("a.parquet", b"plain", "expected a Parquet file, found ArrowInvalid: .*; fetch it again"),
        ("a.jsonl", b'{"text": "a"}\n{', "one JSON object per line, found in line 2: Expecting"),
        ("a.jsonl", b"[1]", "one JSON object per line, found in line 1 a list$"),
        ("a.jsonl", b'{"body": "a"}', "expected a column text or story, found body; rename"),
        ("a.jsonl", b'{"text": 3}', "expected text in the column text, found a int: 3$"),
        ("a.docx", b"PK", r"expected a file .txt, .txt.gz, .parquet, .jsonl, found a.docx; rename"),
    ],
)
def test_files_that_are_no_stories(tmp_path, name, content, message):
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(DataError, match=f"(?s)^{path}: .*{message}"):
        list(read_texts(path))


@pytest.mark.parametrize("source", ["", "tinystory", "x" * 300])
def test_an_unknown_name(source):
    message = "^corpus: expected grammar, tinystories, or the path of a file or a folder of files "
    with pytest.raises(DataError, match=f"{message}.* found '{source}'$"):
        next(read_texts(source))


def test_a_folder_without_stories(tmp_path):
    message = f"^corpus: expected files .txt, .* in the folder {tmp_path}, found none$"
    with pytest.raises(DataError, match=message):
        next(read_texts(tmp_path))
