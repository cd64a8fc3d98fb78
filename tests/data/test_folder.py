import shutil
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from tests.data.conftest import NAMES

from bilens.data import load_images
from bilens.errors import DataError


@pytest.fixture(autouse=True)
def no_other_source(monkeypatch):
    """Fail, since with a folder nothing may go to the hub."""
    monkeypatch.delenv("BILENS_DATA", raising=False)
    refuse = Mock(side_effect=AssertionError("the hub was asked"))
    monkeypatch.setattr("bilens.data.image_sets._read_hub", refuse)


def assert_tiny(data, tiny_set):
    assert (data.shape, data.n_inputs) == ((4, 3), 12)
    read = (data.train_images, data.train_labels, data.test_images, data.test_labels)
    for result, array in zip(read, map(torch.from_numpy, tiny_set), strict=True):
        expected = array.flatten(1) / 255 if array.ndim == 3 else array.long()
        torch.testing.assert_close(result, expected, rtol=0, atol=1e-7)


PLACES = [("mnist", "mnist"), ("mnist", "MNIST/raw"), ("fashion-mnist", "fashion-mnist")]
PLACES += [("fashion-mnist", "FashionMNIST/raw")]


@pytest.mark.parametrize("ending", ["", ".gz"])
@pytest.mark.parametrize("dotted", [False, True])
@pytest.mark.parametrize(("name", "below"), [*PLACES, ("mnist", "."), ("fashion-mnist", ".")])
def test_every_layout_and_spelling(tmp_path, write_set, tiny_set, ending, dotted, name, below):
    write_set(tmp_path / below, ending=ending, dotted=dotted)
    data = load_images(name, data_dir=tmp_path)
    assert data.name == name
    assert_tiny(data, tiny_set)


def test_class_names(tmp_path, write_set):
    write_set(tmp_path)
    assert load_images("mnist", tmp_path).class_names == tuple("0123456789")
    fashion = load_images("fashion-mnist", str(tmp_path))
    spelled = "T-shirt/top, Trouser, Pullover, Dress, Coat, Sandal, Shirt, Sneaker, Bag, Ankle boot"
    assert ", ".join(fashion.class_names) == spelled
    assert fashion.n_classes == 10


def test_the_environment_names_the_folder_as_default(tmp_path, write_set, tiny_set, monkeypatch):
    write_set(tmp_path / "mnist")
    monkeypatch.setenv("BILENS_DATA", str(tmp_path))
    assert_tiny(load_images("mnist"), tiny_set)
    monkeypatch.setenv("BILENS_DATA", str(tmp_path / "nowhere"))
    assert_tiny(load_images("mnist", tmp_path), tiny_set)


def test_a_whole_subfolder_goes_first_and_so_do_unpacked_files(tmp_path, write_set, tiny_set):
    others = {0: np.zeros((12, 4, 3))}
    write_set(tmp_path / "named", replaced=others)
    write_set(tmp_path / "named" / "mnist")
    write_set(tmp_path / "incomplete")
    (tmp_path / "incomplete" / "mnist").mkdir()
    write_set(tmp_path / "packed", ending=".gz", replaced=others)
    write_set(tmp_path / "packed")
    for folder in tmp_path.iterdir():
        assert_tiny(load_images("mnist", folder), tiny_set)


@pytest.mark.parametrize("origin", ["data_dir", "BILENS_DATA"])
def test_an_empty_folder(tmp_path, monkeypatch, origin):
    monkeypatch.setenv("BILENS_DATA", str(tmp_path))
    with pytest.raises(DataError) as info:
        load_images("mnist", tmp_path if origin == "data_dir" else None)
    four = ", ".join(NAMES)
    assert str(info.value) == (
        f"{tmp_path}/mnist lacks {four}; expected {four} (each also with .gz, or with a dot in "
        f"place of the dash before idx) in {tmp_path}/mnist or {tmp_path}/MNIST/raw or {tmp_path}"
    )


@pytest.mark.parametrize(("name", "below"), PLACES)
def test_the_folder_of_the_set_itself(tmp_path, write_set, tiny_set, name, below):
    folder = write_set(tmp_path / below)
    assert_tiny(load_images(name, folder), tiny_set)
    (other,) = {"mnist", "fashion-mnist"} - {name}
    message = f"^{folder} is a folder of {name} by its name, expected {other}. Use its parent"
    with pytest.raises(DataError, match=message):
        load_images(other, folder)


def test_a_folder_as_name(tmp_path, write_set, tiny_set, monkeypatch):
    labels = np.array([0, 1, 13, 2, 0], dtype=np.uint8)
    folder = write_set(tmp_path / "letters", replaced={3: labels})
    data = load_images(str(folder))
    assert_tiny(data, [*tiny_set[:3], labels])
    assert data.name == "letters"
    assert data.class_names == tuple(str(label) for label in range(14))
    monkeypatch.chdir(folder)
    assert load_images(".").name == "letters"
    shutil.move(folder / "train-images-idx3-ubyte", folder / "train-images")
    with pytest.raises(DataError, match=f"^{folder} lacks train-images-idx3-ubyte; expected"):
        load_images(str(folder))
