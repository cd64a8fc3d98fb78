import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from bilens.errors import BilensError
from bilens.nn import ClassifierConfig, ImageClassifier
from bilens.read import (
    TruncationCurve,
    class_spectra,
    explain,
    read_classifier,
    top_inputs,
    truncation_curve,
)
from tests.models import digit_model, digits
from tests.tensor.factors import normal, random_tensor


@given(st.integers(1, 40), st.integers(1, 5), st.integers(1, 50))
def test_top_inputs_in_blocks_are_top_inputs(samples, k, batch_size):
    spectrum = random_tensor(5, 6, 3, samples).interaction(output=[0, 2]).eigh()
    x, k = normal(samples, 5), min(k, samples)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("bilens.read.classifier.BLOCK", batch_size)
        result = top_inputs(spectrum, x, k)
    strength = torch.einsum("bki,si->bks", spectrum.vectors, x).abs()
    expected = strength.sort(-1, descending=True).indices[..., :k]
    assert torch.equal(strength.gather(-1, result), strength.gather(-1, expected))


def test_top_inputs_of_a_single_form():
    spectrum = random_tensor(5, 6, 3, 0).interaction(output=1).eigh()
    assert top_inputs(spectrum, normal(9, 5), 2).shape == (5, 2)
    with pytest.raises(BilensError, match="k=10, expected a whole number, 1 to 9"):
        top_inputs(spectrum, normal(9, 5), 10)


@pytest.mark.parametrize("bias", [False, True])
def test_the_curve_is_the_accuracy_of_cut_models(bias, monkeypatch):
    monkeypatch.setattr("bilens.read.fidelity.BLOCK", 50)
    model, data = digit_model(bias=bias), digits()
    spectrum = model.tensor().interaction(output=range(10)).eigh()
    curve = truncation_curve(spectrum, data.test_images, data.test_labels)
    for k in (1, 4, spectrum.k):
        predicted = spectrum.truncate(k)(data.test_images).argmax(-1)
        expected = (predicted == data.test_labels).double().mean().item()
        assert math.isclose(curve.accuracy[k - 1], expected)
    assert math.isclose(curve.full, model.accuracy(data.test_images, data.test_labels))


def test_drops_and_needs():
    curve = TruncationCurve((0.5, 0.9, 0.8, 0.95, 0.96, 0.96), 0.96)
    assert math.isclose(curve.drop(2), 0.06)
    assert curve.needed(0.02) == 4
    assert curve.needed(0.0) == 5
    assert curve.needed(0.6) == 1
    with pytest.raises(BilensError, match="k=7, expected a whole number, 1 to 6"):
        curve.drop(7)


def test_an_explanation_adds_up():
    model, data = digit_model(), digits()
    spectrum = model.tensor().interaction(output=range(10)).eigh()
    x = data.test_images[3]
    explanation = explain(spectrum, x, n_classes=3, k=4)
    logits = model(x)
    assert torch.allclose(explanation.logits, logits, atol=1e-4)
    assert [part.label for part in explanation.parts] == logits.topk(3).indices.tolist()
    for part in explanation.parts:
        activations, vectors = part.activations, part.vectors
        assert math.isclose(float(activations.sum()) + part.remainder, part.logit, abs_tol=1e-4)
        assert (activations.abs().diff() <= 0).all()
        assert (vectors @ x >= 0).all()
        Q = model.tensor().interaction(output=part.label).dense()
        values = activations / (vectors @ x) ** 2
        assert torch.allclose(Q.detach() @ vectors.T, vectors.T * values, atol=1e-3)
        rows = explanation.frame().query(f"`class` == '{part.label}'")
        assert rows.activation.sum() == pytest.approx(part.logit, abs=1e-3)
    strongest = explanation.parts[0]
    assert explanation.record()[f"logit of class {strongest.label}"] == strongest.logit
    assert len(explanation.plot().data) == 3


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("basis", ["model", "pixels"])
def test_a_reading_is_complete(basis, bias):
    model, data = digit_model(bias=bias), digits()
    reading = read_classifier(model, data, basis)
    assert math.isclose(reading.accuracy, reading.curve.full)
    rebuilt = reading.spectrum(data.test_images)
    assert torch.allclose(rebuilt, model(data.test_images), atol=1e-3)
    record = reading.record()
    assert (
        record["How well it holds"][-1]["accuracy"] == reading.accuracy == record["test accuracy"]
    )
    assert set(reading.frame()["form"]) == set(data.class_names)


@given(
    st.booleans(),
    st.sampled_from(["model", "pixels"]),
    st.none() | st.lists(st.integers(1, 3), max_size=2),
    st.integers(0, 99),
)
def test_spectra_rebuild_the_logits_and_any_sum_of_them(bias, basis, batch, seed):
    torch.manual_seed(seed)
    model, x = ImageClassifier(ClassifierConfig(9, 4, 5, bias=bias)).double(), normal(6, 9)
    directions = None if batch is None else normal(*batch, 4)
    rebuilt = class_spectra(model, directions, basis)(x)
    sums = torch.eye(4).double() if directions is None else directions
    expected = torch.einsum("sc,...c->s...", model(x), sums)
    assert torch.allclose(rebuilt, expected, rtol=1e-10, atol=1e-12)
