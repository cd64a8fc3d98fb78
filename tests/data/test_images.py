import os

import pytest
import torch
from sklearn.datasets import load_digits
from tests.devices import second_device
from tests.nightly import nightly

from bilens.data import load_images

FIELDS = ("train_images", "train_labels", "test_images", "test_labels")


def rows(images: torch.Tensor, labels: torch.Tensor) -> list[tuple[float, ...]]:
    return [(*image, label) for image, label in zip(images.tolist(), labels.tolist(), strict=True)]


def test_digits_are_sklearns_divided_by_16():
    data = load_images("digits")
    result = rows(data.train_images * 16, data.train_labels)
    result += rows(data.test_images * 16, data.test_labels)
    assert sorted(result) == sorted(rows(*load_digits(return_X_y=True)))


def test_digits_sizes_types_and_range():
    data = load_images("digits")
    assert (data.name, data.shape, data.class_names) == ("digits", (8, 8), tuple("0123456789"))
    assert (data.n_inputs, data.n_classes) == (64, 10)
    for split, count in (("train", 1437), ("test", 360)):
        images, labels = (getattr(data, f"{split}_{kind}") for kind in ("images", "labels"))
        assert (images.shape, images.dtype) == ((count, 64), torch.float32)
        assert (labels.shape, labels.dtype) == ((count,), torch.int64)
        assert (images.min(), images.max()) == (0, 1)


def test_digits_split_is_stratified():
    data = load_images("digits", seed=3)
    counts = torch.bincount(torch.from_numpy(load_digits().target))
    assert (torch.bincount(data.test_labels) - 0.2 * counts).abs().max() < 1


def test_digits_split_follows_the_seed():
    first, again, other = (load_images("digits", seed=seed) for seed in (1, 1, 2))
    for name in FIELDS:
        assert torch.equal(getattr(first, name), getattr(again, name))
    assert not torch.equal(first.test_images, other.test_images)


def test_to_moves_every_tensor_and_leaves_the_original():
    data = load_images("digits")
    with second_device() as device:
        moved = data.to(device)
    for field in FIELDS:
        assert getattr(moved, field).device == device
        assert getattr(moved, field).shape == getattr(data, field).shape
        assert getattr(data, field).device.type == "cpu"
    assert (moved.name, moved.shape, moved.class_names) == ("digits", (8, 8), data.class_names)


MNIST_COUNTS = [5923, 6742, 5958, 6131, 5842, 5421, 5918, 6265, 5851, 5949]
COUNTS = [("mnist", MNIST_COUNTS), ("fashion-mnist", [6000] * 10)]


@pytest.mark.skipif(not os.environ.get("BILENS_DATA"), reason="BILENS_DATA names no folder")
@pytest.mark.parametrize(("name", "train_counts"), nightly(COUNTS, COUNTS[1:]))
def test_the_real_sets(name, train_counts):
    data = load_images(name)
    assert (data.name, data.shape) == (name, (28, 28))
    assert torch.bincount(data.train_labels).tolist() == train_counts
    assert len(data.test_labels) == 10_000
    if name == "fashion-mnist":
        assert torch.bincount(data.test_labels).tolist() == [1000] * 10
    for images, count in ((data.train_images, 60_000), (data.test_images, 10_000)):
        assert (images.shape, images.dtype) == ((count, 784), torch.float32)
        assert (images.min(), images.max()) == (0, 1)
    # The mean of the pixels is known for both sets: 0.1307 and 0.2860.
    mean = float(data.train_images.double().mean())
    assert mean == pytest.approx({"mnist": 0.1307, "fashion-mnist": 0.2860}[name], abs=5e-5)
