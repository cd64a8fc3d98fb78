import math

import pytest
import torch

from bilens.nn import ClassifierConfig, ImageClassifier
from bilens.read import read_deep
from bilens.tensor import decompile
from tests.models import digit_model, digits
from tests.tensor.factors import normal


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("n_layers", [1, 2])
def test_all_paths_are_the_model(n_layers, bias):
    torch.manual_seed(0)
    model = ImageClassifier(ClassifierConfig(9, 3, 4, n_layers, bias=bias, residual=bias)).double()
    x = normal(5, 9)
    paths = decompile(model.tensors(), torch.eye(3, dtype=torch.float64))
    assert torch.allclose(paths(x), model(x), rtol=1e-9, atol=1e-12)


def test_a_deep_reading():
    model, data = digit_model(n_layers=2), digits()
    reading = read_deep(model, data, k=200)
    assert [k for k, _ in reading.by_paths] == [1, 3, 10, 30, 100, 200]
    assert reading.accuracy == model.accuracy(data.test_images, data.test_labels)
    predicted = reading.paths.truncate(30)(data.test_images).argmax(-1)
    expected = float((predicted == data.test_labels).double().mean())
    assert math.isclose(dict(reading.by_paths)[30], expected)
    assert reading.by_paths[-1][1] > 0.5
    assert reading.record()["paths"] == 200


def test_more_paths_than_there_are():
    torch.manual_seed(0)
    model = ImageClassifier(ClassifierConfig(64, 10, 3, 2, image_shape=(8, 8)))
    reading = read_deep(model, digits(), k=10_000)
    assert reading.by_paths[-1][0] == 10 * 3 * 3
    assert math.isclose(reading.by_paths[-1][1], reading.accuracy)


def test_the_paths_of_one_class():
    model = digit_model(n_layers=2)
    paths = decompile(model.tensors(), torch.eye(10), 40)
    parts = [paths.of(label) for label in range(10)]
    assert sum(len(part) for part in parts) == 40
    assert all((part.roots == label).all() for label, part in enumerate(parts))
    x = digits().test_images[:5]
    assert torch.allclose(parts[3](x)[:, 3], paths(x)[:, 3], atol=1e-4)
