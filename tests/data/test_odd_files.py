"""Files of texts and pictures that are not the usual ones, read in full or refused."""

import gzip
import json
import struct
import sys
import unicodedata

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.data.conftest import GREY

from bilens.data import clean, load_images
from bilens.data.texts import SUFFIXES, read_texts
from bilens.errors import DataError

END_OF_STORY = "<|endoftext|>"
KEPT = settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
PIECES = st.sampled_from([END_OF_STORY, "\n", "\n\n", " ", "a", "b.", "<|endoftext", "|>"])
LEFT = ("._a.txt", "._0.png", ".DS_Store", ".draft.txt", ".hidden/a.txt", "__MACOSX/._a/0.png")
DATES = (
    "2020-01-01",
    "12:30",
    "2021-02-03T04:05:06Z",
    "12",
    "1e5",
    "true",
    "null",
    "NaN",
    '"',
    "[",
)


def write_text(path, text):
    """Write one text in the format of a file's name."""
    if path.name.endswith(".gz"):
        path.write_bytes(gzip.compress(text.encode()))
    elif path.suffix == ".parquet":
        pq.write_table(pa.table({"text": [text]}), path)
    else:
        path.write_text(json.dumps({"text": text}) if path.suffix == ".jsonl" else text)


@pytest.mark.parametrize("ending", SUFFIXES)
@given(text=st.lists(PIECES, min_size=1, max_size=12).map("".join))
@settings(KEPT, max_examples=60, deadline=None)
def test_no_story_holds_the_end_of_one_and_none_is_lost(tmp_path, ending, text):
    path = tmp_path / f"a{ending}"
    write_text(path, text)
    expected = text.split(END_OF_STORY)
    if not "".join(expected).strip():
        with pytest.raises(DataError, match="holds no stories"):
            list(read_texts(path))
        return
    stories = list(read_texts(path))
    assert not any(END_OF_STORY in story for story in stories)
    assert "".join("".join(stories).split()) == "".join("".join(expected).split())
    if END_OF_STORY in text or ending in (".jsonl", ".parquet"):
        assert stories == [story.strip() for story in expected if story.strip()]


@pytest.mark.parametrize("kind", ["texts", "pictures"])
def test_what_systems_leave_in_a_folder_is_not_read(tmp_path, kind):
    def read():
        if kind == "texts":
            return list(read_texts(tmp_path))
        data = load_images(str(tmp_path))
        return data.class_names, len(data.train_labels) + len(data.test_labels)

    if kind == "texts":
        (tmp_path / "a.txt").write_text("One.")
    else:
        for name in "ab":
            (tmp_path / name).mkdir()
            for number in range(3):
                GREY.save(tmp_path / name / f"{number}.png")
    before = read()
    for folder in [tmp_path, *filter(type(tmp_path).is_dir, sorted(tmp_path.iterdir()))]:
        for name in LEFT:
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_bytes(b"\0\5\x16\7\0\2\0\0Mac OS X")
    assert read() == before


@given(texts=st.lists(st.text(st.characters(codec="utf-8"), min_size=1) | st.sampled_from(DATES)))
@settings(KEPT, max_examples=60, deadline=None)
def test_texts_of_jsonl_are_kept_as_they_are(tmp_path, texts):
    path = tmp_path / "a.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in ["first", *texts]))
    assert list(read_texts(path)) == ["first", *filter(None, map(str.strip, texts))]


@pytest.mark.parametrize("line", ["3", "[]", '"a"', '{"text": "\\ud83d"}', "[" * 100_000, "{"])
def test_lines_of_jsonl_that_are_no_texts_are_refused(tmp_path, line):
    path = tmp_path / "a.jsonl"
    path.write_text(f'{{"text": "a"}}\n{line}\n')
    with pytest.raises(DataError, match="a.jsonl"):
        list(read_texts(path))


def test_all_white_space_parts_words():
    for code in range(sys.maxunicode):
        if chr(code).isspace() or unicodedata.category(chr(code)) == "Cc":
            assert clean(f"one{chr(code)}two") == "one two", hex(code)
            assert clean(f"é{chr(code)}{chr(code)}two") == "e two", hex(code)


RAMP = np.tile(np.arange(16) / 15, (2, 1))


UNREAD = {(12, "MM", 0), (12, "MM", 1), (12, "II", 0), (16, "MM", 0)}
"""Kinds of TIFF that Pillow does not open."""


def tiff(bits, order, photometric):
    """Return a TIFF of the ramp, uncompressed, with so many bits a pixel; 32 are floats."""
    mark, most = ("<" if order == "II" else ">"), 2 ** min(bits, 16) - 1
    levels = RAMP if photometric else 1 - RAMP
    if bits == 32:
        data = levels.astype(f"{mark}f4").tobytes()
    elif bits == 16:
        data = np.round(levels * most).astype(f"{mark}u2").tobytes()
    else:
        digits = "".join(f"{round(level * most):0{bits}b}" for level in levels.ravel())
        data = int(digits, 2).to_bytes(len(digits) // 8)
    height, width = RAMP.shape
    tags = [(256, 3, width), (257, 3, height), (258, 3, bits), (259, 3, 1), (262, 3, photometric)]
    tags += [(273, 4, 0), (277, 3, 1), (278, 3, height), (279, 4, len(data))]
    tags += [(339, 3, 3)] * (bits == 32)
    start = 8 + 2 + 12 * len(tags) + 4
    head = order.encode() + struct.pack(f"{mark}HIH", 42, 8, len(tags))
    for tag, kind, value in tags:
        place = start if tag == 273 else value
        packed = struct.pack(f"{mark}HH", place, 0) if kind == 3 else struct.pack(f"{mark}I", place)
        head += struct.pack(f"{mark}HHI", tag, kind, 1) + packed
    return head + bytes(4) + data


@pytest.mark.parametrize("photometric", [0, 1], ids=["white is 0", "black is 0"])
@pytest.mark.parametrize("order", ["II", "MM"])
@pytest.mark.parametrize("bits", [1, 2, 4, 8, 12, 16, 32])
def test_tiffs_have_their_levels_or_are_refused(tmp_path, bits, order, photometric):
    for label in "ab":
        (tmp_path / label).mkdir()
        for number in range(3):
            (tmp_path / label / f"{number}.tif").write_bytes(tiff(bits, order, photometric))
    if (bits, order, photometric) in UNREAD:
        with pytest.raises(DataError, match="cannot be read"):
            load_images(str(tmp_path))
        return
    images, most = load_images(str(tmp_path)).train_images, 2 ** min(bits, 16) - 1
    expected = RAMP if bits == 32 else np.round(RAMP * most) / most
    np.testing.assert_allclose(images[0].reshape(2, 16), expected, atol=1e-6)


PICTURE, AB = datasets.Image(), datasets.ClassLabel(names=["x", "y"])
ROWS = [{"image": GREY, "label": number % 2} for number in range(4)]
COLUMNS = {
    "two columns of labels": ({"image": PICTURE, "fine": AB, "coarse": AB}, {}),
    "two columns of images": ({"image": PICTURE, "mask": PICTURE, "label": AB}, {}),
    "other names to test": ({"image": PICTURE, "label": AB}, {"label": ["y", "x"]}),
    "no label": ({"image": PICTURE, "label": AB}, {"row": {"label": None}}),
    "no picture": ({"image": PICTURE, "label": AB}, {"row": {"image": None}}),
    "one name twice": ({"image": PICTURE, "label": AB}, {"both": ["café", "cafe\u0301"]}),
}
REFUSED = "expected one Image and one ClassLabel|expected the same|it has no (class|picture)|twice"


@pytest.mark.parametrize("kind", COLUMNS)
def test_a_column_is_the_only_one_of_its_kind_and_whole(tmp_path, kind):
    features, changed = COLUMNS[kind]
    for split in ("train", "test"):
        rows, names = [dict(row) for row in ROWS], changed.get("both", ["x", "y"])
        for row in rows:
            row |= {
                name: row["image" if name == "mask" else "label"] for name in features.keys() - row
            }
        if split == "test":
            rows[-1] |= changed.get("row", {})
            names = changed.get("label", names)
        kinds = {n: datasets.ClassLabel(names=names) if f is AB else f for n, f in features.items()}
        rows = [{name: row[name] for name in features} for row in rows]
        table = datasets.Dataset.from_list(rows, features=datasets.Features(kinds))
        table.to_parquet(tmp_path / f"{split}-0.parquet")
    with pytest.raises(DataError, match=REFUSED):
        load_images(str(tmp_path))


@pytest.mark.parametrize("names", [("train", "Train"), ("training", "TRAIN"), ("test", "Test")])
def test_no_split_is_left_out_in_silence(tmp_path, names):
    for split in {*names, "train", "test"}:
        for name in "ab":
            (tmp_path / split / name).mkdir(parents=True, exist_ok=True)
            GREY.save(tmp_path / split / name / "0.png")
    with pytest.raises(DataError, match="in one folder train and in one folder test"):
        load_images(str(tmp_path))


@pytest.mark.parametrize("form", ["NFC", "NFD"])
def test_a_class_is_one_however_its_accents_are_stored(tmp_path, form):
    for split, kept in (("train", "NFC"), ("test", form)):
        for name in ("café", "Zoë", "été"):
            folder = tmp_path / split / unicodedata.normalize(kept, name)
            folder.mkdir(parents=True)
            for number in range(2):
                GREY.save(folder / f"{number}.png")
    data = load_images(str(tmp_path))
    assert data.class_names == ("Zoë", "café", "été")
    assert data.test_labels.tolist() == data.train_labels.tolist() == [0, 0, 1, 1, 2, 2]
