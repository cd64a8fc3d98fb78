import datasets
import numpy as np
import pytest
from PIL import Image

from bilens.data import load_images
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


def test_images_of_two_sizes_and_files_that_are_no_images_are_named(tmp_path):
    folder = write(tmp_path / "insects")
    Image.new("L", (5, 5)).save(folder / "bee" / "5.png")
    with pytest.raises(DataError, match=r"insects, train: image 15 has 5x5 pixels, expected 4x5"):
        load_images(str(folder))
    (folder / "bee" / "5.png").write_bytes(b"\x89PNG")
    with pytest.raises(DataError, match=r"insects, train: image 15 cannot be read.*Remove it"):
        load_images(str(folder))


def test_folders_without_pictures_are_refused(tmp_path):
    with pytest.raises(DataError, match="has neither the IDX files .* nor class folders with imag"):
        load_images(str(tmp_path))
    (tmp_path / "notes.txt").write_text("none")
    with pytest.raises(DataError, match="holds no images, expected pictures in class folders"):
        load_images(str(tmp_path))
    folder = tmp_path / "[classes]"
    write(folder / "test")
    with pytest.raises(DataError, match="has images in test, expected class folders, or class"):
        load_images(str(folder))


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
