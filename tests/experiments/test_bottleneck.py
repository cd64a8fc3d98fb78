import math

import pytest
import torch
from experiments.case_svd import bottleneck_curve
from hypothesis import given
from hypothesis import strategies as st

from tests.models import digit_model, digits
from tests.tensor.factors import normal, random_tensor, shapes


@given(shapes, st.integers(1, 4), st.integers(1, 20))
def test_the_curve_is_the_accuracy_of_cut_layers(shape, classes, at_once):
    layer = random_tensor(**shape)
    svd = layer.svd()
    readout, x = normal(classes, layer.n_out), normal(17, layer.n_in, seed=1)
    labels = torch.arange(17) % classes
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("bilens.read.fidelity.BLOCK", at_once)
        curve = bottleneck_curve(svd, readout, x, labels)
    assert len(curve.accuracy) == len(svd)
    # Components of no value leave ties that rounding decides.
    for k in range(1, int((svd.values > 1e-6 * svd.values[0]).sum()) + 1):
        logits = svd.truncate(k)(x) @ readout.T
        expected = (logits.argmax(-1) == labels).double().mean().item()
        assert math.isclose(curve.accuracy[k - 1], expected)
        cut = layer.change_basis(outputs=readout @ svd.truncate(k).projector())
        assert torch.allclose(cut(x), logits, atol=1e-5)


def test_all_components_are_the_model():
    model, data = digit_model(), digits()
    layer = model.layers[0].tensor().change_basis(inputs=model.embed.weight)
    readout = model.unembed.weight
    curve = bottleneck_curve(layer.svd(), readout, data.test_images, data.test_labels)
    assert math.isclose(curve.full, model.accuracy(data.test_images, data.test_labels))
    assert curve.drop(1) > 0.3
    assert curve.drop(20) < 0.01
