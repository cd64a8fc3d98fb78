import datasets
import numpy as np
import pytest
from PIL import Image
from tests.data.conftest import GREY, LEVELS, RAMP, clear

from bilens.data import load_images
from bilens.data.pictures import BYTE_MODES, DEEP_MODES, grey_levels
from bilens.errors import DataError

CLASSES = ("ant", "bee", "wasp")
LABELS = datasets.ClassLabel(names=list(CLASSES))
FEATURES = datasets.Features({"img": datasets.Image(), "label": LABELS})


def write(folder, *, count=10, size=(5, 4), mode="L", ending=".png"):
    """Write images whose grey level is ten times their class and one more for each number."""
    for label, name in enumerate(CLASSES):
        (folder / name).mkdir(parents=True)
        for number in range(count):
            grey = 10 * label + number
            color = grey if mode == "L" else (grey,) * 3
            Image.new(mode, size, color).save(folder / name / f"{number}{ending}")
    return folder


def levels(images):
    return (images * 255).round().int().unique(dim=1).squeeze(1).tolist()


def test_class_folders_are_split_by_the_seed(tmp_path):
    folder = write(tmp_path / "insects")
    data = load_images(str(folder), seed=1)
    assert (data.name, data.class_names, data.shape) == ("insects", CLASSES, (4, 5))
    assert (len(data.train_labels), len(data.test_labels)) == (24, 6)
    both = levels(data.train_images) + levels(data.test_images)
    assert [level // 10 for level in both] == data.train_labels.tolist() + data.test_labels.tolist()
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


def turned():
    """Return a picture that is stored on its side, as cameras do."""
    picture = GREY.rotate(90, expand=True)
    picture.getexif()[274] = 6
    return picture


DEEP = RAMP.astype(np.uint16) * 257
READ = {
    "L": (GREY, "png"),
    "P": (GREY.convert("P"), "png"),
    "RGB": (GREY.convert("RGB"), "bmp"),
    "CMYK": (GREY.convert("RGB").convert("CMYK"), "tiff"),
    "RGBA": (GREY.convert("RGBA"), "png"),
    "16 bits": (Image.fromarray(DEEP), "png"),
    "16 bits, TIFF": (Image.fromarray(DEEP), "tiff"),
    "16 bits, big-endian": (Image.fromarray(DEEP.astype(">u2")), "tiff"),
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
        how = {"exif": picture.getexif()} if kind == "turned" else {}
        how |= {"lossless": True} if ending == "webp" else {}
        for number in range(3):
            picture.save(tmp_path / label / f"{number}.{ending}", **how)
    images = load_images(str(tmp_path)).train_images
    np.testing.assert_allclose(images[0].reshape(4, 16), LEVELS, atol=1e-6)


def test_every_mode_of_pillow_is_read_whole_or_refused():
    for mode in (*BYTE_MODES, *DEEP_MODES):
        assert grey_levels(Image.new(mode, (2, 2))).shape == (2, 2)
    for mode in {"LAB", "HSV", "I", "RGBX", "RGBa", "La", "I;16N"} - {*BYTE_MODES, *DEEP_MODES}:
        with pytest.raises(DataError, match=f"its mode is {mode}"):
            grey_levels(Image.new(mode, (2, 2)))


@pytest.mark.parametrize("names", ["train bus", "test control", "train test", "valid val"])
@pytest.mark.parametrize("linked", [False, True])
def test_classes_have_any_names_and_may_be_links(tmp_path, names, linked):
    folder = tmp_path / "data"
    place = tmp_path / "elsewhere" if linked else folder
    folder.mkdir()
    for name in names.split():
        (place / name).mkdir(parents=True)
        for number in range(5):
            GREY.save(place / name / f"{number}.png")
        if linked:
            (folder / name).symlink_to(place / name)
    data = load_images(str(folder))
    assert data.class_names == tuple(sorted(names.split()))
    assert len(data.train_labels) + len(data.test_labels) == 10


@pytest.mark.parametrize("below", [".", "data"])
def test_parquet_files_of_the_hub(tmp_path, below):
    place = tmp_path / "mnist" / below
    place.mkdir(parents=True)
    for split, levels_of in (("train", [0, 1, 2]), ("test", [2])):
        pictures = [Image.new("L", (3, 4), level) for level in levels_of]
        rows = datasets.Dataset.from_dict({"img": pictures, "label": levels_of}, FEATURES)
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


def test_a_data_set_of_the_hub(serve):
    pictures = [Image.fromarray(np.full((4, 3, 3), n, np.uint8)) for n in range(6)]
    serve(FEATURES, lambda split: {"img": pictures, "label": [0, 1, 2] * 2})
    data = load_images("hub:someone/insects")
    assert (data.name, data.class_names, data.shape) == ("insects", CLASSES, (4, 3))
    assert levels(data.train_images) == [0, 1, 2, 3, 4, 5]
    assert data.test_labels.tolist() == [0, 1, 2, 0, 1, 2]
