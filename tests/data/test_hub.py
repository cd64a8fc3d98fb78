import re

import datasets
import numpy as np
import pytest
import torch
from PIL import Image

from bilens.data import load_images
from bilens.errors import DataError

REPOSITORIES = {"mnist": "ylecun/mnist", "fashion-mnist": "zalando-datasets/fashion_mnist"}
COUNTS = {"train": 12, "test": 5}


@pytest.fixture(autouse=True)
def no_folder(monkeypatch):
    monkeypatch.delenv("BILENS_DATA", raising=False)


def pictures(split: str) -> list[Image.Image]:
    random = np.random.default_rng(COUNTS[split])
    arrays = random.integers(0, 256, (COUNTS[split], 4, 3), dtype=np.uint8)
    return [Image.fromarray(array) for array in arrays]


def labels(split: str) -> list[int]:
    return [index % 10 for index in range(COUNTS[split])]


@pytest.fixture
def serve(monkeypatch):
    """Make the hub serve the given splits, and return the list of what it was asked for."""

    def start(**changed) -> list[tuple[str, str]]:
        asked = []

        def load_dataset(repository, *, split):
            asked.append((repository, split))
            images, numbers = changed.get(split, (pictures(split), labels(split)))
            features = datasets.Features(
                {"image": datasets.Image(), "label": datasets.Value("int64")}
            )
            return datasets.Dataset.from_dict({"image": images, "label": numbers}, features)

        monkeypatch.setattr(datasets, "load_dataset", load_dataset)
        return asked

    return start


@pytest.mark.parametrize("name", ["mnist", "fashion-mnist"])
def test_reads_the_hub_when_no_folder_is_given(serve, name):
    asked = serve()
    data = load_images(name)
    assert sorted(asked) == [(REPOSITORIES[name], "test"), (REPOSITORIES[name], "train")]
    assert data.name == name
    assert data.shape == (4, 3)
    assert data.n_classes == 10
    for split, images, numbers in (
        ("train", data.train_images, data.train_labels),
        ("test", data.test_images, data.test_labels),
    ):
        expected = [list(picture.tobytes()) for picture in pictures(split)]
        torch.testing.assert_close(images * 255, torch.tensor(expected, dtype=torch.float32))
        assert images.dtype == torch.float32
        assert numbers.tolist() == labels(split)
        assert numbers.dtype == torch.int64


def test_an_empty_environment_variable_is_no_folder(serve, monkeypatch):
    monkeypatch.setenv("BILENS_DATA", "")
    asked = serve()
    load_images("mnist")
    assert asked


class HttpError(Exception):
    """An http client's error: of no family that the code could know."""


@pytest.mark.parametrize(
    "cause",
    [
        ConnectionError("no route"),
        datasets.exceptions.DatasetNotFoundError("no route"),
        OSError("no route"),
        ValueError("no route"),
        HttpError("no route"),
    ],
    ids=lambda cause: type(cause).__name__,
)
def test_out_of_reach(monkeypatch, cause):
    def load_dataset(repository, *, split):
        raise cause

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    with pytest.raises(DataError) as info:
        load_images("fashion-mnist")
    assert str(info.value) == (
        "fashion-mnist: expected the data set zalando-datasets/fashion_mnist from the Hugging Face "
        f"hub, found {type(cause).__name__}: no route. Either pass data_dir (--data-dir) or set "
        "BILENS_DATA to a folder with the IDX files train-images-idx3-ubyte, "
        "train-labels-idx1-ubyte, t10k-images-idx3-ubyte, t10k-labels-idx1-ubyte, or connect to "
        "the hub and try again"
    )
    assert info.value.__cause__ is cause


def test_a_missing_column(monkeypatch):
    rows = datasets.Dataset.from_dict({"text": ["a"]})
    monkeypatch.setattr(datasets, "load_dataset", lambda repository, *, split: rows)
    with pytest.raises(DataError, match=r"from the Hugging Face hub, found \w+: .*image"):
        load_images("mnist")


def test_images_of_different_sizes(serve):
    mixed = [Image.new("L", (3, 4)), Image.new("L", (4, 4))]
    serve(train=(mixed, [0, 1]))
    message = (
        r"^ylecun/mnist, split train, column image: expected grey 8-bit images of one size "
        r"\(mode L\), found L 4x3, L 4x4$"
    )
    with pytest.raises(DataError, match=message):
        load_images("mnist")


@pytest.mark.parametrize("mode", ["RGB", "1", "LA"])
def test_images_that_are_not_grey(serve, mode):
    serve(test=([Image.new(mode, (3, 4))], [0]))
    message = f"split test, column image: expected grey 8-bit images .*, found {mode} 4x3$"
    with pytest.raises(DataError, match=message):
        load_images("mnist")


def test_an_empty_split(serve):
    serve(train=([], []))
    message = "split train, column image: expected at least one pixel, found shape"
    with pytest.raises(DataError, match=message):
        load_images("mnist")


@pytest.mark.parametrize("wrong", [-1, 10])
def test_a_label_out_of_range(serve, wrong):
    serve(test=(pictures("test"), [0, 1, wrong, 2, 3]))
    message = (
        "ylecun/mnist, split test, column label: expected labels from 0 to 9, "
        f"found {wrong} at index 2"
    )
    with pytest.raises(DataError, match=f"^{re.escape(message)}$"):
        load_images("mnist")
