from unittest.mock import Mock

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
def asked(serve):
    """Return what the hub was asked for."""
    features = {"image": datasets.Image(), "label": datasets.ClassLabel(10)}
    return serve(features, lambda split: {"image": pictures(split), "label": labels(split)})


@pytest.mark.parametrize("name", ["mnist", "fashion-mnist"])
def test_reads_the_hub_when_no_folder_is_given(asked, name):
    data = load_images(name)
    assert sorted(asked) == [(REPOSITORIES[name], "test"), (REPOSITORIES[name], "train")]
    assert (data.name, data.shape, data.n_classes) == (name, (4, 3), 10)
    for split in COUNTS:
        images, numbers = (getattr(data, f"{split}_{kind}") for kind in ("images", "labels"))
        expected = [list(picture.tobytes()) for picture in pictures(split)]
        torch.testing.assert_close(images * 255, torch.tensor(expected, dtype=torch.float32))
        torch.testing.assert_close(numbers, torch.tensor(labels(split)))


def test_an_empty_environment_variable_is_no_folder(asked, monkeypatch):
    monkeypatch.setenv("BILENS_DATA", "")
    load_images("mnist")
    assert asked


CAUSES = (ConnectionError, datasets.exceptions.DatasetNotFoundError, OSError, HTTPError)


@pytest.mark.parametrize("kind", [*CAUSES, RuntimeError])
def test_out_of_reach(monkeypatch, kind):
    cause = kind("no route")
    monkeypatch.setattr(datasets, "load_dataset", Mock(side_effect=cause))
    if kind is RuntimeError:  # what the hub did not do is not blamed on it
        with pytest.raises(RuntimeError, match="no route"):
            load_images("fashion-mnist")
        return
    with pytest.raises(DataError) as info:
        load_images("fashion-mnist")
    assert str(info.value) == (
        "zalando-datasets/fashion_mnist, split train, could not be loaded from the Hugging Face "
        f"hub ({kind.__name__}: no route). Connect to the hub, or put the IDX files "
        "train-images-idx3-ubyte, train-labels-idx1-ubyte, t10k-images-idx3-ubyte, "
        "t10k-labels-idx1-ubyte into a folder and name it: data_dir, or BILENS_DATA."
    )
    assert info.value.__cause__ is cause
