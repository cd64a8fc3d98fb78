import os

import numpy as np
import pytest
import torch
from sklearn.datasets import load_digits
from tests.devices import second_device

from bilens.data import load_images


def rows(images: torch.Tensor, labels: torch.Tensor) -> list[tuple[float, ...]]:
    return [(*image, label) for image, label in zip(images.tolist(), labels.tolist(), strict=True)]


def test_digits_are_sklearns_divided_by_16():
    data = load_images("digits")
    images, labels = load_digits(return_X_y=True)
    expected = [(*image, label) for image, label in zip(images.tolist(), labels, strict=True)]
    result = rows(data.train_images * 16, data.train_labels)
    result += rows(data.test_images * 16, data.test_labels)
    assert sorted(result) == sorted(expected)


def test_digits_sizes_types_and_range():
    data = load_images("digits")
    assert data.name == "digits"
    assert data.shape == (8, 8)
    assert data.n_inputs == 64
    assert data.n_classes == 10
    assert data.class_names == tuple("0123456789")
    for images, labels, count in (
        (data.train_images, data.train_labels, 1437),
        (data.test_images, data.test_labels, 360),
    ):
        assert images.shape == (count, 64)
        assert labels.shape == (count,)
        assert images.dtype == torch.float32
        assert labels.dtype == torch.int64
        assert images.min() == 0
        assert images.max() == 1


def test_digits_split_is_stratified():
    data = load_images("digits", seed=3)
    counts = torch.bincount(torch.from_numpy(load_digits().target))
    assert (torch.bincount(data.test_labels) - 0.2 * counts).abs().max() < 1


def test_digits_split_follows_the_seed():
    first, again, other = (load_images("digits", seed=seed) for seed in (1, 1, 2))
    for name in ("train_images", "train_labels", "test_images", "test_labels"):
        assert torch.equal(getattr(first, name), getattr(again, name))
    assert not torch.equal(first.test_images, other.test_images)


def test_to_moves_every_tensor_and_leaves_the_original():
    data = load_images("digits")
    with second_device() as device:
        moved = data.to(device)
    fields = ("train_images", "train_labels", "test_images", "test_labels")
    for field in fields:
        assert getattr(moved, field).device == device
        assert getattr(moved, field).shape == getattr(data, field).shape
        assert getattr(data, field).device.type == "cpu"
    assert (moved.name, moved.shape, moved.class_names) == ("digits", (8, 8), data.class_names)


MNIST_COUNTS = [5923, 6742, 5958, 6131, 5842, 5421, 5918, 6265, 5851, 5949]


@pytest.mark.skipif(
    not os.environ.get("BILENS_DATA"),
    reason="set BILENS_DATA to a folder with the real mnist and fashion-mnist",
)
@pytest.mark.parametrize(
    ("name", "train_counts"),
    [pytest.param("mnist", MNIST_COUNTS, marks=pytest.mark.slow), ("fashion-mnist", [6000] * 10)],
)
def test_the_real_sets(name, train_counts):
    data = load_images(name)
    assert data.name == name
    assert data.shape == (28, 28)
    assert data.train_images.shape == (60_000, 784)
    assert data.test_images.shape == (10_000, 784)
    assert torch.bincount(data.train_labels).tolist() == train_counts
    assert len(data.test_labels) == 10_000
    if name == "fashion-mnist":
        assert torch.bincount(data.test_labels).tolist() == [1000] * 10
    for images in (data.train_images, data.test_images):
        assert images.dtype == torch.float32
        assert images.min() == 0
        assert images.max() == 1
    # The mean of the pixels is known for both sets: 0.1307 and 0.2860.
    mean = np.float64(data.train_images.double().mean())
    assert mean == pytest.approx({"mnist": 0.1307, "fashion-mnist": 0.2860}[name], abs=5e-5)
