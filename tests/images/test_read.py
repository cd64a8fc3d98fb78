"""Readings of classifiers, on the device that they are on, wherever their data is."""

import math
from copy import deepcopy
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from bilens.images import (
    TruncationCurve,
    attack,
    class_mask,
    class_spectra,
    explain,
    read_bonds,
    read_classifier,
    read_deep,
    shared_by_classes,
    shared_by_paths,
    top_inputs,
    truncation_curve,
)
from bilens.nn import ClassifierConfig, ImageClassifier
from bilens.tensor import Spectrum, cluster, decompile
from tests.devices import Elsewhere, second_device
from tests.models import digit_model, digits, small_model
from tests.nightly import nightly
from tests.tensor.factors import close, normal, random_tensor


@given(st.integers(1, 40), st.integers(1, 5), st.integers(1, 50))
def test_top_inputs_in_blocks_are_top_inputs(samples, k, batch_size):
    spectrum = random_tensor(5, 6, 3, samples).interaction(output=[0, 2]).eigh()
    x, k = normal(samples, 5), min(k, samples)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("bilens.images.classifier.BLOCK", batch_size)
        result = top_inputs(spectrum, x, k)
    strength = torch.einsum("bki,si->bks", spectrum.vectors, x).abs()
    expected = strength.sort(-1, descending=True).indices[..., :k]
    assert torch.equal(strength.gather(-1, result), strength.gather(-1, expected))


def test_top_inputs_of_a_single_form():
    spectrum = random_tensor(5, 6, 3, 0).interaction(output=1).eigh()
    assert top_inputs(spectrum, normal(9, 5), 2).shape == (5, 2)


@pytest.mark.parametrize("bias", [False, True])
def test_the_curve_is_the_accuracy_of_cut_models(bias, monkeypatch):
    monkeypatch.setattr("bilens.images.fidelity.BLOCK", 50)
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
    named = replace(explanation, class_names=list("abcdefghij"))
    best = "abcdefghij"[int(logits.argmax())]
    assert named.facts()[:2] == [
        ("the model answers", best),
        (f"logit of class {best}", explanation.parts[0].logit),
    ]
    assert named.frame()["class"].iloc[0] == best
    strongest = explanation.parts[0]
    assert explanation.record()["parts"][0]["logit"] == strongest.logit
    assert len(explanation.plot().axes[0].patches) == len(explanation.frame())


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("basis", ["model", "pixels"])
def test_a_reading_is_complete(basis, bias):
    model, data = digit_model(bias=bias), digits()
    reading = read_classifier(model, data, basis)
    assert math.isclose(reading.accuracy, reading.curve.full)
    rebuilt = reading.spectrum(data.test_images)
    assert torch.allclose(rebuilt, model(data.test_images), atol=1e-3)
    record = reading.record()
    assert reading.accuracy == record["test accuracy"]
    assert reading.accuracy == record["How well it holds"][-1]["accuracy"]
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


def planted() -> Spectrum:
    """Three classes: the first two use e0, up to sign, and the last uses e1 twice."""
    e = torch.eye(6)
    vectors = torch.stack([e[[0, 2]], torch.stack([-2 * e[0], e[3]]), e[[1, 1]]])
    values = torch.tensor([[4.0, -1.0], [-2.0, 1.0], [3.0, 2.0]])
    return Spectrum(values, vectors, torch.zeros(3, 2))


def test_what_was_planted_is_found():
    shared = shared_by_classes(planted())
    assert (shared.compared, shared.groups) == (6, 4)
    (feature,) = shared.features
    assert torch.allclose(feature.vector.abs(), torch.eye(6)[0])
    # Weights |lambda| |v|^2 are 4 + 2 * 4 of 4 + 1 + 8 + 1 + 3 + 2.
    assert feature.weight == pytest.approx(12 / 19)
    assert shared.weight == pytest.approx(12 / 19)
    uses = [(use.label, use.place, use.raises) for use in feature.uses]
    assert uses == [(1, (0,), False), (0, (0,), True)]
    assert feature.agreement == pytest.approx(1)
    assert not shared_by_classes(planted()[2:]).features
    assert shared_by_classes(planted(), k=1).compared == 3


def test_eigenvectors_without_weight_are_left_out():
    spectrum = planted()
    silent = Spectrum(spectrum.values * 0, spectrum.vectors * 0, spectrum.residuals)
    assert shared_by_classes(silent).compared == 0
    assert shared_by_classes(silent).weight == 0
    spectrum.vectors[2, 1] = 0
    assert shared_by_classes(spectrum).compared == 5


def test_the_paths_of_a_deep_model_share_their_ends():
    paths = decompile(digit_model(n_layers=2).tensors(), torch.eye(10), 60)
    shared = shared_by_paths(paths)
    assert shared.compared == 60
    features = cluster(paths.vectors, paths.effective.abs(), 0.7)
    several = [i for i, rows in enumerate(features.members) if len(paths.roots[rows].unique()) > 1]
    assert shared.groups == len(features)
    assert len(shared.features) == len(several)
    assert shared.weight == pytest.approx(float(features.coverage[several].sum()), rel=1e-4)
    places = zip(paths.roots.tolist(), paths.indices.tolist(), strict=True)
    numbers = {(root, *indices): row for row, (root, indices) in enumerate(places)}
    for feature in shared.features:
        weights = [use.weight for use in feature.uses]
        assert weights == sorted(weights, reverse=True)
        for use in feature.uses:
            row = numbers[use.label, *use.place]
            assert use.raises == (paths.eigenvalues[row, 0] > 0)
            assert abs(paths.vectors[row] @ feature.vector) >= feature.agreement - 1e-5


def test_features_have_a_row_each():
    shared = shared_by_classes(class_spectra(digit_model()))
    frame = shared.frame()
    assert frame.weight.sum() == pytest.approx(shared.weight)
    for row, feature in zip(frame.itertuples(), shared.features, strict=True):
        labels = {*row.raises.split(", "), *row.lowers.split(", ")} - {""}
        assert labels == {str(use.label) for use in feature.uses}
    assert shared.record()["shared features"] == len(shared.features)


@given(st.integers(1, 6), st.booleans(), st.integers(0, 10_000))
def test_a_mask_is_two_steps_uphill_in_the_positive_part(n_in, constant, seed):
    tensor = random_tensor(n_in, 4, 2, seed)
    if constant:
        tensor = tensor.with_bias(normal(4, seed=seed), normal(4, seed=seed + 1))
    form = tensor.interaction(torch.eye(2, dtype=torch.float64))
    values, vectors = torch.linalg.eigh(form.dense())
    positive = vectors @ (values.clamp_min(0)[..., None] * vectors.mT)
    expected = (positive @ positive).sum(-1)[..., :n_in]
    spectrum = form.eigh()
    if (expected.norm(dim=-1) < 1e-6).any():
        return
    masks = class_mask(spectrum)
    assert close(masks, expected / expected.norm(dim=-1, keepdim=True))
    assert close(class_mask(spectrum[1]), masks[1])
    turned = Spectrum(spectrum.values, -spectrum.vectors, spectrum.residuals, spectrum.constant)
    assert close(class_mask(turned), masks)


def test_an_attack_by_hand(monkeypatch):
    monkeypatch.setattr("bilens.images.chain.BATCH", 50)
    model, data = digit_model(), digits()
    x, labels = data.test_images, data.test_labels
    mask = class_mask(model.tensor().interaction(output=3).eigh())
    result = attack(model, x, labels, 7 * mask, label=3, norm=2.0)
    targeted, fooled, others = 0, 0, 0
    for image, label in zip(x, labels.tolist(), strict=True):
        if label != 3:
            others += 1
            predicted = int(model(torch.clip(image + 2 * mask, 0, 1)[None]).argmax())
            targeted += predicted == 3
            fooled += predicted != label
    assert result.targeted == pytest.approx(targeted / others)
    assert result.fooled == pytest.approx(fooled / others)
    assert list(result.record().values()) == [result.targeted, result.fooled]
    assert f"{result.targeted:.2%}" in repr(result)


def test_masks_beat_random_ones_of_equal_norm():
    model, data = digit_model(), digits()
    x, labels = data.test_images, data.test_labels
    masks = class_mask(model.tensor().interaction(output=range(10)).eigh())
    noise, wins = torch.randn(10, 64, generator=torch.Generator().manual_seed(0)), 0
    for label in range(10):
        pair = masks[label], noise[label]
        ours, random = (attack(model, x, labels, mask, label=label, norm=2.0) for mask in pair)
        assert ours.targeted <= ours.fooled
        wins += ours.targeted > random.targeted + 0.1
    assert wins >= 9


def test_no_mask_is_no_attack():
    model, data = digit_model(), digits()
    x, labels = data.test_images, data.test_labels
    nothing = attack(model, x, labels, torch.ones(64), label=0, norm=0.0)
    others = labels != 0
    assert nothing.fooled == pytest.approx(1 - model.accuracy(x[others], labels[others]))


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


def there(model, device):
    return deepcopy(model).requires_grad_(False).to(device)


def few_images():
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
