"""Classifiers are read on the device that they are on, whatever device their data is on."""

from dataclasses import replace

import pytest
import torch

from bilens.data import ImageData
from bilens.nn import ImageClassifier
from bilens.read import class_spectra, read_bonds, read_classifier, read_deep
from tests.devices import Elsewhere, second_device
from tests.models import digit_model, digits, small_model
from tests.nightly import nightly


def test_the_second_device_refuses_what_a_gpu_refuses():
    with second_device() as device:
        x = torch.ones(2, 3).to(device)
        assert (x.device, (x @ x.T).device) == (device, device)
        assert (x @ x.T).cpu().tolist() == [[3, 3], [3, 3]]
        with pytest.raises(RuntimeError, match="expected all tensors on one device"):
            x + torch.ones(3)
        with pytest.raises(TypeError, match="use Tensor.cpu"):
            x.numpy()
    with second_device(wide=False) as device, pytest.raises(TypeError, match="float64"):
        torch.ones(2).to(device).double()


def there(model: ImageClassifier, device: torch.device) -> ImageClassifier:
    copy = ImageClassifier(model.config)
    copy.load_state_dict(model.state_dict())
    return copy.requires_grad_(False).to(device)


def few_images() -> ImageData:
    data = digits()
    return replace(data, test_images=data.test_images[:20], test_labels=data.test_labels[:20])


@pytest.mark.parametrize("wide", [True, False])
@pytest.mark.parametrize("basis", nightly(["model", "pixels"], ["model"]))
def test_a_classifier_is_read_where_it_is(basis, wide):
    data = few_images()
    expected = read_classifier(small_model(), data, basis)
    with second_device(wide=wide) as device:
        model = there(small_model(), device)
        reading = read_classifier(model, data, basis)
        assert reading.spectrum.values.device == (device if wide else torch.device("cpu"))
        torch.testing.assert_close(reading.spectrum.values.cpu(), expected.spectrum.values)
        assert reading.accuracy == expected.accuracy
        assert reading.record().keys() == expected.record().keys()
        u = torch.eye(10)[3] - torch.eye(10)[8]
        assert class_spectra(model, u, basis).values.shape[0] in (6, 64)
        assert isinstance(class_spectra(model, basis=basis).values, Elsewhere) == wide


@pytest.mark.parametrize("wide", [True, False])
def test_a_deep_classifier_is_read_where_it_is(wide):
    expected = read_deep(small_model(2), few_images(), 30)
    with second_device(wide=wide) as device:
        reading = read_deep(there(small_model(2), device), few_images(), 30)
        assert reading.by_paths == expected.by_paths
        assert reading.accuracy == expected.accuracy


@pytest.mark.slow
def test_bonds_are_found_on_the_cpu():
    data = digits()
    expected = read_bonds(digit_model(2), data, drop=0.1)
    with second_device(wide=False) as device:
        reading = read_bonds(there(digit_model(2), device), data, drop=0.1)
        assert reading.cut.ranks == expected.cut.ranks
        assert reading.accuracy == expected.accuracy
