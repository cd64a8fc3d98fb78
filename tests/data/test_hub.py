import datasets
import numpy as np
import pytest
import torch
from PIL import Image

from bilens.data import load_images
from bilens.errors import DataError
from bilens.hub import HTTPError

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
    """Make the hub serve the given splits, and return the list of its requests."""

    def start(**changed) -> list[tuple[str, str]]:
        asked = []

        def load_dataset(repository, *, split):
            asked.append((repository, split))
            images, numbers = changed.get(split, (pictures(split), labels(split)))
            features = datasets.Features(
                {"image": datasets.Image(), "label": datasets.ClassLabel(10)}
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


@pytest.mark.parametrize(
    "cause",
    [
        ConnectionError("no route"),
        datasets.exceptions.DatasetNotFoundError("no route"),
        OSError("no route"),
        HTTPError("no route"),
        RuntimeError("no route"),
    ],
    ids=lambda cause: type(cause).__name__,
)
def test_out_of_reach(monkeypatch, cause):
    def load_dataset(repository, *, split):
        raise cause

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    if isinstance(cause, RuntimeError):  # what the hub did not do is not blamed on it
        with pytest.raises(RuntimeError, match="no route"):
            load_images("fashion-mnist")
        return
    with pytest.raises(DataError) as info:
        load_images("fashion-mnist")
    assert str(info.value) == (
        "zalando-datasets/fashion_mnist, split train, could not be loaded from the Hugging Face "
        f"hub ({type(cause).__name__}: no route). Connect to the hub, or put the IDX files "
        "train-images-idx3-ubyte, train-labels-idx1-ubyte, t10k-images-idx3-ubyte, "
        "t10k-labels-idx1-ubyte into a folder and name it: --data-dir (data_dir), or BILENS_DATA."
    )
    assert info.value.__cause__ is cause


def test_an_empty_split(serve):
    serve(train=([], []))
    with pytest.raises(DataError, match="mnist, train holds no images"):
        load_images("mnist")
