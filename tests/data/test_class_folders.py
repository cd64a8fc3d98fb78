from itertools import product
from pathlib import Path

import datasets
import numpy as np
import pytest
from PIL import Image, ImageOps

from bilens.data import load_images
from bilens.data.images import BYTE_MODES, DEEP_MODES, grey_levels
from bilens.data.texts import read_texts
from bilens.errors import DataError

CLASSES = ("ant", "bee", "wasp")


def write(folder, *, count=10, size=(5, 4), mode="L", ending=".png"):
    """Write images whose grey level is ten times their class and one more for each number."""
    for label, name in enumerate(CLASSES):
        (folder / name).mkdir(parents=True)
        for number in range(count):
            grey = 10 * label + number
            color = grey if mode == "L" else (grey, grey, grey)
            Image.new(mode, size, color).save(folder / name / f"{number}{ending}")
    return folder


def levels(images):
    return (images * 255).round().int().unique(dim=1).squeeze(1).tolist()


def test_class_folders_are_split_by_the_seed(tmp_path):
    folder = write(tmp_path / "insects")
    data = load_images(str(folder), seed=1)
    assert (data.name, data.class_names, data.shape) == ("insects", CLASSES, (4, 5))
    assert (len(data.train_labels), len(data.test_labels)) == (24, 6)
    for images, labels in (
        (data.train_images, data.train_labels),
        (data.test_images, data.test_labels),
    ):
        assert [level // 10 for level in levels(images)] == labels.tolist()
    both = levels(data.train_images) + levels(data.test_images)
    assert sorted(both) == [10 * label + number for label in range(3) for number in range(10)]
    again, other = load_images(str(folder), seed=1), load_images(str(folder), seed=2)
    assert levels(again.train_images) == levels(data.train_images)
    assert levels(other.train_images) != levels(data.train_images)


@pytest.mark.parametrize("name", ["test", "valid", "val"])
def test_a_split_in_folders_is_kept(tmp_path, name):
    write(tmp_path / "train", mode="RGB")
    write(tmp_path / name, count=2)
    data = load_images(str(tmp_path))
    assert data.class_names == CLASSES
    assert data.train_labels.bincount().tolist() == [10, 10, 10]
    assert data.test_labels.bincount().tolist() == [2, 2, 2]
    assert levels(data.test_images) == [0, 1, 10, 11, 20, 21]


RAMP = np.tile(np.linspace(0, 255, 16).astype(np.uint8), (4, 1))
LEVELS = RAMP / 255
GREY = Image.fromarray(RAMP)


def clear(mode, ink):
    """Return a picture whose ink shows only by its opacity."""
    picture = Image.new(mode, GREY.size, ink)
    picture.putalpha(ImageOps.invert(GREY))
    return picture


def turned():
    """Return a picture that is stored on its side, as cameras do."""
    picture = GREY.rotate(90, expand=True)
    picture.getexif()[274] = 6
    return picture


READ = {
    "L": (GREY, "png"),
    "P": (GREY.convert("P"), "png"),
    "RGB": (GREY.convert("RGB"), "bmp"),
    "CMYK": (GREY.convert("RGB").convert("CMYK"), "tiff"),
    "RGBA": (GREY.convert("RGBA"), "png"),
    "16 bits": (Image.fromarray(RAMP.astype(np.uint16) * 257), "png"),
    "16 bits, TIFF": (Image.fromarray(RAMP.astype(np.uint16) * 257), "tiff"),
    "16 bits, big-endian": (Image.fromarray((RAMP.astype(np.uint16) * 257).astype(">u2")), "tiff"),
    "floats": (Image.fromarray(LEVELS.astype(np.float32)), "tiff"),
    "ink by opacity, grey": (clear("L", 0), "png"),
    "ink by opacity, colours": (clear("RGB", (0, 0, 0)), "webp"),
    "turned": (turned(), "png"),
}


@pytest.mark.parametrize("kind", READ)
def test_pictures_of_these_kinds_have_all_their_levels(tmp_path, kind):
    picture, ending = READ[kind]
    for label in "ab":
        (tmp_path / label).mkdir()
        for number in range(3):
            how = {"exif": picture.getexif()} if kind == "turned" else {}
            how |= {"lossless": True} if ending == "webp" else {}
            picture.save(tmp_path / label / f"{number}.{ending}", **how)
    images = load_images(str(tmp_path)).train_images
    np.testing.assert_allclose(images[0].reshape(4, 16), LEVELS, atol=1e-6)


REFUSED = {
    "32 bits": (Image.fromarray(RAMP.astype(np.int32)), "mode is I, expected one of 1, L, LA"),
    "floats": (Image.fromarray(RAMP.astype(np.float32)), "from 0 to 255, expected 0 to 1"),
    "NaN": (Image.fromarray(np.full((4, 4), np.nan, np.float32)), "from nan to nan, expected"),
    "LAB": (Image.new("LAB", (4, 4)), "mode is LAB, expected one of"),
    "white ink": (clear("L", 255), "white on a transparent ground, which is taken as white"),
}


@pytest.mark.parametrize("kind", [*REFUSED, "frames"])
def test_pictures_of_other_kinds_are_refused(tmp_path, kind):
    (tmp_path / "a").mkdir()
    file = tmp_path / "a" / "1.tiff"
    if kind == "frames":
        message = "it has several frames, expected one"
        GREY.save(file, save_all=True, append_images=[ImageOps.invert(GREY)])
    else:
        picture, message = REFUSED[kind]
        picture.save(file)
    with pytest.raises(DataError, match=f"a/1.tiff cannot be read: .*{message}"):
        load_images(str(tmp_path))


def test_every_mode_of_pillow_is_read_whole_or_refused():
    modes = {*BYTE_MODES, *DEEP_MODES, "LAB", "HSV", "I", "RGBX", "RGBa", "La", "I;16N"}
    for mode in modes:
        picture = Image.new(mode, (2, 2))
        if mode in (*BYTE_MODES, *DEEP_MODES):
            assert grey_levels(picture).shape == (2, 2)
        else:
            with pytest.raises(DataError, match=f"its mode is {mode}"):
                grey_levels(picture)


A, B, BEE = ("a/1.png", GREY), ("b/1.png", GREY), ("b/2.png", GREY)
SPLIT = (("train/a/1.png", GREY), ("test/a/1.png", GREY))
REMEDY = "unpack archives first, and save arrays of .npz or .npy as pictures in class folders$"
FOLDERS = [
    ([], "has neither the IDX files .* nor class folders with imag"),
    ([("notes.txt", b"none")], "nor class folders with images; unpack archives first"),
    *(([(n, b"PK")], f"neither the IDX files .*{REMEDY}") for n in ("a.npz", "a.npy", "a.zip")),
    ([("ant", None)], "ant holds no pictures; fill it, or remove it"),
    (SPLIT[1:], "holds the folders test, of which test hold further fold"),
    ([*SPLIT, ("more/a/1.png", GREY)], "holds the folders more, test, train, of which"),
    ([*SPLIT, ("train/a/more/b/1.png", GREY)], "a holds folders, expected pictures only"),
    ([A, B], "holds 2 pictures, expected at least 3, to train and to t"),
    ([A, B, ("b/2.png", GREY.resize((5, 5)))], "b/2.png .* it has 5x5 pixels, expected 4x16 "),
    ([A, B, ("b/2.png", b"\x89PNG")], "b/2.png cannot be read: .*remove it"),
    *(
        ([A, B, BEE, (place, Path("gone"))], f"{place} is a link to .*gone, which is not there")
        for place in ("c", "b/3.png", "b/c")
    ),
]


@pytest.mark.parametrize(("files", "words"), FOLDERS)
def test_folders_without_classes_of_pictures_are_refused(tmp_path, files, words):
    folder = tmp_path / "[classes]"
    folder.mkdir()
    for name, content in files:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if isinstance(content, Image.Image):
            content.save(path)
        elif isinstance(content, bytes):
            path.write_bytes(content)
        elif content is None:
            path.mkdir()
        else:
            path.symlink_to(tmp_path / content)
    with pytest.raises(DataError, match=words):
        load_images(str(folder))


@pytest.mark.parametrize("name", ["digits.npz", "digits.zip", "train.parquet"])
def test_a_file_is_no_folder(tmp_path, name):
    (tmp_path / name).write_bytes(b"PK")
    with pytest.raises(DataError, match=f"{name} is a file, expected a folder of IDX .*{REMEDY}"):
        load_images(str(tmp_path / name))


@pytest.mark.parametrize("names", ["train bus", "test control", "train test", "valid val"])
@pytest.mark.parametrize("linked", [False, True])
def test_classes_have_any_names_and_may_be_links(tmp_path, names, linked):
    place = tmp_path / "elsewhere" if linked else tmp_path / "data"
    (tmp_path / "data").mkdir()
    for name in names.split():
        (place / name).mkdir(parents=True)
        for number in range(5):
            GREY.save(place / name / f"{number}.png")
        if linked:
            (tmp_path / "data" / name).symlink_to(place / name)
    data = load_images(str(tmp_path / "data"))
    assert data.class_names == tuple(sorted(names.split()))
    assert len(data.train_labels) + len(data.test_labels) == 10


POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n"


@pytest.mark.parametrize(
    ("content", "cause"), [(POINTER, "a pointer of Git LFS"), ("<!DOCTYPE html>", "a web page")]
)
def test_what_stands_in_the_place_of_data_is_named(tmp_path, content, cause):
    for name in "ab":
        (tmp_path / "c" / name).mkdir(parents=True)
        GREY.save(tmp_path / "c" / name / "1.png")
    (tmp_path / "c" / "b" / "2.png").write_text(content)
    (tmp_path / "d").mkdir()
    for split, kind in product(("train", "t10k"), ("images-idx3", "labels-idx1")):
        (tmp_path / "d" / f"{split}-{kind}-ubyte").write_text(content)
    (tmp_path / "texts.txt").write_text(content)
    (tmp_path / "texts.parquet").write_text(content)
    for place, named in (("c", "2.png"), ("d", "ubyte")):
        with pytest.raises(DataError, match=f"{named} should hold .* and holds {cause}"):
            load_images(str(tmp_path / place))
    for name in ("texts.txt", "texts.parquet"):
        with pytest.raises(DataError, match=f"{name} should hold texts, and holds {cause}"):
            next(read_texts(tmp_path / name))


@pytest.mark.parametrize("below", [".", "data"])
def test_parquet_files_of_the_hub(tmp_path, monkeypatch, below):
    names = datasets.ClassLabel(names=list(CLASSES))
    features = datasets.Features({"img": datasets.Image(), "label": names})
    place = tmp_path / "mnist" / below
    place.mkdir(parents=True)
    for split, levels_of in (("train", [0, 1, 2]), ("test", [2])):
        pictures = [Image.new("L", (3, 4), level) for level in levels_of]
        rows = datasets.Dataset.from_dict({"img": pictures, "label": levels_of}, features)
        rows.to_parquet(place / f"{split}-00000-of-00001.parquet")
    for data in (load_images(str(tmp_path / "mnist")), load_images("mnist", tmp_path)):
        assert (levels(data.train_images), levels(data.test_images)) == ([0, 1, 2], [2])
        assert data.train_labels.tolist() == [0, 1, 2]
    assert load_images(str(tmp_path / "mnist")).class_names == CLASSES
    with pytest.raises(DataError, match="is a folder of mnist by its name, expected fashion-mnist"):
        load_images("fashion-mnist", tmp_path / "mnist")


def test_no_network_is_asked(tmp_path, monkeypatch):
    monkeypatch.setattr("socket.getaddrinfo", None)
    monkeypatch.setattr("socket.socket.connect", None)
    assert load_images(str(write(tmp_path / "[insects]", ending=".JPG"))).n_classes == 3


@pytest.fixture
def serve(monkeypatch):
    def start(features):
        def load_dataset(repository, *, split):
            pictures = [Image.fromarray(np.full((4, 3, 3), n, np.uint8)) for n in range(6)]
            columns = {"img": pictures, "label": [0, 1, 2] * 2, "text": ["a"] * 6}
            return datasets.Dataset.from_dict({k: columns[k] for k in features}, features)

        monkeypatch.setattr(datasets, "load_dataset", load_dataset)

    return start


def test_a_data_set_of_the_hub(serve):
    names = datasets.ClassLabel(names=list(CLASSES))
    serve(datasets.Features({"img": datasets.Image(), "label": names}))
    data = load_images("hub:someone/insects")
    assert (data.name, data.class_names, data.shape) == ("insects", CLASSES, (4, 3))
    assert levels(data.train_images) == [0, 1, 2, 3, 4, 5]
    assert data.test_labels.tolist() == [0, 1, 2, 0, 1, 2]


def test_a_data_set_of_the_hub_without_labels(serve):
    serve(datasets.Features({"img": datasets.Image(), "text": datasets.Value("string")}))
    with pytest.raises(
        DataError, match="has the columns .*text.*, expected an image and a class la"
    ):
        load_images("hub:someone/insects")
