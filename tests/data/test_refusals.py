"""What `bilens.data` refuses."""

import gzip
import io
import math
import re
from pathlib import Path
from unittest.mock import Mock

import datasets
import numpy as np
import pytest
import torch
from PIL import Image, ImageOps
from tests.data.conftest import GREY, NAMES, RAMP, clear
from tests.models import TOKENS, digits
from tests.refusals import refused

from bilens.data import (
    DeepGrammar,
    Grammar,
    ImageData,
    fit_drawing,
    load_corpus,
    load_documents,
    load_images,
)
from bilens.data.image_sets import read_idx
from bilens.data.texts import read_texts
from bilens.errors import DataError


@pytest.fixture(autouse=True)
def no_folder(monkeypatch, tmp_path):
    monkeypatch.delenv("BILENS_DATA", raising=False)
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)


def write(path, content):
    """Write bytes, a text or a picture, or make a folder or a link."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if isinstance(content, Image.Image):
        content.save(path)
    elif isinstance(content, Path):
        path.symlink_to(content)
    elif content is None:
        path.mkdir()
    else:
        path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


def idx(content, name="some-idx"):
    return lambda tmp_path: read_idx(write(tmp_path / name, content))


def texts(content, name):
    return lambda tmp_path: list(read_texts(write(tmp_path / name, content)))


def images(*files):
    """Return how a folder with a name like a pattern is read."""

    def load(tmp_path):
        write(tmp_path / "[data]", None)
        for name, content in files:
            write(tmp_path / "[data]" / name, content)
        load_images(str(tmp_path / "[data]"))

    return load


def mnist(replaced):
    return lambda tmp_path, write_set: load_images("mnist", write_set(tmp_path, replaced=replaced))


def damaged_mnist(tmp_path, write_set):
    path = write_set(tmp_path) / NAMES[3]
    path.write_bytes(path.read_bytes()[:-2])
    load_images("mnist", tmp_path)


def incomplete_mnist(tmp_path, write_set):
    raw = write_set(tmp_path / "FashionMNIST" / "raw", ending=".gz")
    for name in (NAMES[1], NAMES[3]):
        (raw / f"{name}.gz").unlink()
    load_images("fashion-mnist", tmp_path)


def from_environment(monkeypatch):
    monkeypatch.setenv("BILENS_DATA", "/nowhere")
    load_images("mnist")


def incomplete_stories(tmp_path):
    write(tmp_path / "tinystories" / "train.txt.gz", gzip.compress(b"train"))
    next(read_texts("tinystories", tmp_path))


def without_hub(monkeypatch):
    monkeypatch.setattr(datasets, "load_dataset", Mock(side_effect=ConnectionError("no route")))
    next(read_texts("tinystories"))


def empty_split(serve):
    features = {"image": datasets.Image(), "label": datasets.ClassLabel(10)}
    serve(features, lambda split: {name: [] for name in features})
    load_images("mnist")


def without_labels(serve):
    features = {"img": datasets.Image(), "text": datasets.Value("string")}
    serve(features, lambda split: {"img": [GREY], "text": ["a"]})
    load_images("hub:someone/insects")


def corpus(stories=None, **options):
    def load(tmp_path):
        tales = stories or [f"Tale {number}: lily saw a big dog." for number in range(120)]
        path = write(tmp_path / "tales.txt", "".join(f"{tale}\n<|endoftext|>\n" for tale in tales))
        load_corpus(path, **{"n_ctx": 16, "clean": "tinystories", **options})

    return load


def documents(**options):
    def load(tmp_path):
        path = write(tmp_path / "texts.txt", "".join(f"t{i % 30} t4\n" for i in range(200)))
        load_documents(path, TOKENS, **options)

    return load


def pixels(**changed):
    images = {"train_images": torch.zeros(2, 4), "test_images": torch.zeros(1, 4), "shape": (2, 2)}
    labels = {"train_labels": torch.tensor([0, 1]), "test_labels": torch.tensor([0])}
    return lambda: ImageData("own", **{**images, **labels, "class_names": ("a", "b"), **changed})


def sentences(language, *texts):
    def read(text):
        ids = torch.tensor(language.tokenizer()(text)["input_ids"])
        return lambda: language.next_distribution(ids)

    return [read(text) for text in texts]


ARGUMENTS = {
    "^n_ctx=1, expected a whole number, at least 2 and at most 1,048,576$": corpus(n_ctx=1),
    "^validation_share=0.0, expected a finite number, above 0 and": corpus(validation_share=0.0),
    "^seed=-1, expected a whole number, at least 0 and at most 4,294,967,295$": corpus(seed=-1),
    "^vocab_size=0, expected a whole number, at least 1 and": corpus(vocab_size=0),
    "^the corpus has too little text, expected a row of 400 tokens.*--n-ctx": corpus(n_ctx=400),
    "^n_ctx=1, expected a whole number, at least 2": documents(n_ctx=1),
    "^shortest=9, expected a whole number, 1 to 8, tokens of a": documents(shortest=9, n_ctx=8),
    "^validation_share=1.0, expected a finite number, above 0": documents(validation_share=1.0),
    "^data='grammar' is a language with tokens of its own, .*; expected tinystories, or": (
        lambda: load_documents("grammar", TOKENS)
    ),
    "expected a row of 100 to 200 tokens": documents(shortest=100, n_ctx=200),
    "ink is empty: expected a drawing": lambda: fit_drawing(np.zeros((9, 9)), digits()),
    "^seed=-1, expected a whole number, at least 0": lambda: load_images("digits", seed=-1),
    "^seed=4294967296, expected a whole num": lambda: load_images("digits", seed=2**32),
    "strength=0.5, expected a finite number, above 0.5 and below 1$": lambda: Grammar(strength=0.5),
    "strength=1.0, expected a finite number, above 0.5 and below 1$": lambda: Grammar(strength=1.0),
    "^strength=-1.0, expected a finite number, above 0.5": lambda: Grammar(strength=-1.0),
    "^ids holds a row that is not a sentence of the language; expected sentences": [
        *sentences(Grammar(), "lily ate", "[BOS] ate", "[BOS] lily tom", "[BOS] tom pie"),
        *sentences(DeepGrammar(), "[BOS] map one", "[BOS] code )", "[BOS] tale near", "[BOS] red"),
    ],
    r"^data='own' has images of the classes \('a',\), expected two classes or more to": pixels(
        class_names=("a",), train_labels=torch.tensor([0, 0])
    ),
    "^train_labels holds the number 2, expected 0 to 1, numbers of": pixels(
        train_labels=torch.tensor([0, 2])
    ),
    "^test_labels holds the number -1, expected 0 to 1, ": pixels(test_labels=torch.tensor([-1])),
    r"^test_labels is a tensor of shape \(2,\) and": pixels(test_labels=torch.tensor([0, 1])),
    "^test_labels is a .*float32, expected a tensor o": pixels(test_labels=torch.tensor([0.0])),
    "^test_images holds NaN or infinite value": pixels(test_images=torch.full((1, 4), math.nan)),
    r"^train_images has shape \(2, 4\), expected \(count, 6\), one image": pixels(shape=(2, 3)),
}
test_arguments_out_of_range = refused(ARGUMENTS)

# 2 x 3 bytes after a header of 12.
HEADER = bytes([0, 0, 8, 2, 0, 0, 0, 2, 0, 0, 0, 3])
WHOLE = HEADER + bytes(range(6))
PACKED = gzip.compress(WHOLE, mtime=0)
DAMAGED = (b"\x89PNG1234", b"\0\0\7\1" + bytes(8), b"", HEADER[:11])
DAMAGED += (WHOLE[:-1], HEADER, WHOLE + b"\0")
TYPES = {9: "signed bytes", 11: "int16", 12: "int32", 13: "float32", 14: "float64"}
IDX = {
    "/some-idx cannot be read as an IDX file of bytes: .*Fetch it again": [*map(idx, DAMAGED)],
    "/some-idx.gz cannot be read as an IDX file of bytes: .*Fetch it again": [
        *(idx(gzip.compress(content, mtime=0), "some-idx.gz") for content in DAMAGED),
        *(idx(content, "some-idx.gz") for content in (WHOLE, PACKED[:-9], PACKED + b"more")),
    ],
    "nothing cannot be read as an IDX file .*No such": lambda: read_idx(Path("nothing")),
    **{
        f"some-idx holds {kind}, expected bytes; save it as bytes": idx(
            bytes([0, 0, code, 1, 0, 0, 0, 1]) + bytes(8)
        )
        for code, kind in TYPES.items()
    },
}
test_files_of_other_bytes_are_named = refused(IDX, DataError)

# No images of 2 x 3 pixels, and no labels.
NOTHING = [bytes([0, 0, 8, 3, *bytes(4), 0, 0, 0, 2, 0, 0, 0, 3]), bytes([0, 0, 8, 1] + [0] * 4)]
A, B, BEE, EMPTY = ("a/1.png", GREY), ("b/1.png", GREY), ("b/2.png", GREY), ("c", None)
SPLIT = (("train/a/1.png", GREY), ("test/a/1.png", GREY))
REMEDY = "unpack archives first, and save arrays of .npz or .npy as pictures in class folders$"
NO_MODE = "a/1.tiff cannot be read: .*mode is"
FRAMES = io.BytesIO()
GREY.save(FRAMES, "tiff", save_all=True, append_images=[ImageOps.invert(GREY)])


def tiff(picture):
    return images(("a/1.tiff", picture))


FOLDERS = {
    f"{NO_MODE} I, expected one of 1, L, LA": tiff(Image.fromarray(RAMP.astype(np.int32))),
    f"{NO_MODE} LAB, expected one of": tiff(Image.new("LAB", (4, 4))),
    "a/1.tiff .* from 0 to 255, expected 0 to 1": tiff(Image.fromarray(RAMP.astype(np.float32))),
    "a/1.tiff .* from nan to nan, expected": tiff(Image.fromarray(np.full((4, 4), np.nan, "f"))),
    "a/1.tiff .* white on a transparent ground, which is taken as white": tiff(clear("L", 255)),
    "a/1.tiff .* it has several frames, expected one": tiff(FRAMES.getvalue()),
    "has neither the IDX files .* nor class folders with imag": images(),
    "nor class folders with images; unpack archives first": images(("notes.txt", "none")),
    f"neither the IDX .*{REMEDY}": [images((name, b"PK")) for name in ("a.npz", "a.npy", "a.zip")],
    "^[^:]*c holds no pictures; fill it, or remove it$": [images(EMPTY), images(A, B, BEE, EMPTY)],
    "holds the folders test, of which test hold further fold": images(SPLIT[1]),
    "holds the folders more, test, train, of which": images(*SPLIT, ("more/a/1.png", GREY)),
    "a holds folders, expected pictures only": images(*SPLIT, ("train/a/more/b/1.png", GREY)),
    "holds 2 pictures, expected at least 3, to train and to t": images(A, B),
    r"has images of the classes \('b',\), expected two classes": images(B, BEE, ("b/3.png", GREY)),
    "b/2.png .* it has 5x5 pixels, expected 4x16 ": images(A, B, ("b/2.png", GREY.resize((5, 5)))),
    "b/2.png cannot be read: .*remove it": images(A, B, ("b/2.png", b"\x89PNG")),
    **{
        f"{place} is a link to .*gone, which is not there": images(A, B, BEE, (place, Path("gone")))
        for place in ("c", "b/3.png", "b/c")
    },
    **{
        f"{name} is a file, expected a folder of IDX .*{REMEDY}": (
            lambda tmp_path, name=name: load_images(str(write(tmp_path / name, b"PK")))
        )
        for name in ("digits.npz", "digits.zip", "train.parquet")
    },
}
FOLDERS |= {
    r"(?s), train: .*\. Fetch it again": [
        images(("train-0.parquet", content), ("test-0.parquet", content))
        for content in (b"", b"PAR1", b"PAR1" + bytes(100) + b"PAR1")
    ],
    r"train_images has shape \(0, 6\), .* one image or more of 2x3 pixels$": images(
        *zip(NAMES, NOTHING * 2, strict=True)
    ),
}
test_folders_without_classes_of_pictures_are_refused = refused(FOLDERS, DataError)

IMAGES, LABELS = np.zeros((12, 4, 3)), np.arange(12) % 10
NOWHERE = "='/nowhere' is not a folder; correct it, or leave it out$"
NAMED = (
    "expected digits, mnist, fashion-mnist, hub:owner/name or the path of a folder of "
    "IDX files or of class folders with images"
)
SETS = {
    f"^data_dir{NOWHERE}": lambda: load_images("mnist", "/nowhere"),
    f"^BILENS_DATA{NOWHERE}": from_environment,
    "FashionMNIST/raw lacks train-labels-idx1-ubyte, t10k-labels-idx1-ubyte; ex": incomplete_mnist,
    "t10k-labels-idx1-ubyte cannot be read as an IDX file": damaged_mnist,
    "mnist, train holds no images": empty_split,
    "has the columns .*text.*, expected one Image and one ClassLabel": without_labels,
    r"the images are \(12,\) .*; expected bytes .count, height, width. of one": mnist({0: LABELS}),
    r"the images are .* \(5,\), .*; expected bytes": mnist({2: LABELS[:5]}),
    r"the images are \(12, 4, 3\) and \(5, 3, 4\), .* one size$": mnist({2: np.zeros((5, 3, 4))}),
    r": train_labels is a tensor of shape \(12, 4, 3\) and .*, expected a t": mnist({1: IMAGES}),
    r": test_labels is a tensor of shape \(5, 4, 3\) and .*, expected a te": mnist({3: IMAGES[:5]}),
    r": train_labels is .* \(11,\) .* beside .*train_images \(12, 12\)": mnist({1: LABELS[1:]}),
    r": test_labels is .* \(4,\) .* beside .*test_images \(5, 12\)": mnist({3: LABELS[:4]}),
    r"train_images has shape \(0, .*\), expected \(count, ": mnist({0: IMAGES[:0], 1: LABELS[:0]}),
    r"train_images has shape .*, expected \(count, ": mnist({0: IMAGES[:, :0], 2: IMAGES[:5, :0]}),
    ": train_labels holds the number 10, expected 0 to 9, ": mnist({1: LABELS + 1}),
    ": test_labels holds the number 10, expected 0 to 9, ": mnist({3: LABELS[:5] + 6}),
    **{
        f"^name={re.escape(repr(name))}, {NAMED}$": lambda name=name: load_images(name)
        for name in ("", "MNIST", "no/such/folder", "x" * 5000, "null\0byte")
    },
}
test_sets_that_do_not_fit_are_named = refused(SETS, DataError)

TEXTS = {
    "^Distinct stories in the corpus: 1, expected at least one for training and one for": (
        corpus(["a b c", "A b  c"])
    ),
    "tales.txt': cleaning leaves .* characters, those of ASCII; expected texts in Latin": [
        corpus([text * n for n in range(1, 200)])
        for text in ("你好，世界。", "Привет, мир", "😀", "हिन्दी")
    ],
    "/a.jsonl holds no stories; leave it out$": texts("", "a.jsonl"),
    "/tinystories and /.* lack train.txt.gz or valid.txt.gz of tiny": incomplete_stories,
    r"^roneneldan/TinyStories, split train, could not be loaded from the Hugging Face hub "
    r"\(ConnectionError: no route\). Connect to the hub, or put tinystories/train.t": without_hub,
    "/a.txt holds no stories; leave it out$": [
        texts(content, "a.txt") for content in ("", " \n\n<|endoftext|>\n")
    ],
    r"(?s)a.txt cannot be read \(Unicode.*UTF-8.$": texts("a story".encode("utf-16"), "a.txt"),
    r"/a.txt cannot be read \(UnicodeDecodeError": texts("café".encode("latin-1"), "a.txt"),
    r"/a.txt.gz cannot be read \(BadGzipFile: .*\). Fetch it again": texts("plain", "a.txt.gz"),
    r"/a.txt.gz cannot be read \(EOFError": texts(gzip.compress(b"cut", mtime=0)[:-9], "a.txt.gz"),
    r"(?s)/a.parquet cannot be read \(.*\). Fetch it again": texts("plain", "a.parquet"),
    r"(?s)/a.jsonl cannot be read \(.*\). Fetch it again": texts('{"text": "a"}\n{', "a.jsonl"),
    "a.jsonl has the columns body, expected text or story; rename": texts('{"body": 1}', "a.jsonl"),
    "/a.jsonl holds '3', expected text as text$": texts('{"text": 3}', "a.jsonl"),
    " is a folder without files .txt, .txt.gz, .parquet, .jsonl;": texts(None, "empty"),
    **{
        f"^data='{name}', expected grammar, deep-grammar, tinystories, or the path of a f": (
            lambda name=name: next(read_texts(name))
        )
        for name in ("", "tinystory", "x" * 300, "x" * 300 + ".txt")
    },
    "^data='.*/a.docx', expected grammar, deep-grammar, tinystories, or the": texts("PK", "a.docx"),
}
test_texts_that_cannot_be_read_are_named = refused(TEXTS, DataError)


def standing_in(content, cause):
    return {
        f"2.png should hold .* and holds {cause}": images(A, B, ("b/2.png", content)),
        f"ubyte should hold .* and holds {cause}": images(*((n, content) for n in NAMES)),
        f"texts.txt should hold texts, and holds {cause}": texts(content, "texts.txt"),
        f"texts.parquet should hold texts, and holds {cause}": texts(content, "texts.parquet"),
    }


POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n"
STANDING = standing_in(POINTER, "a pointer of Git LFS")
STANDING |= standing_in("<!DOCTYPE html>", "a web page")
test_what_stands_in_the_place_of_data_is_named = refused(STANDING, DataError)
