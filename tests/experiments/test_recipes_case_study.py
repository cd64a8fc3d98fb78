"""The recipes of the MNIST case study, on the bundled digits with tiny models."""

import math
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from experiments.autoencoder import (
    AutoencoderTraining,
    SparseAutoencoder,
    row_sampler,
    train_autoencoder,
)
from experiments.case import PixelModel, direction_names, layer_tensor
from experiments.case_pairs import most_specific, pair_activations
from experiments.case_sae import compare, few_interactions, loss_recovered
from experiments.case_svd import bottleneck_curve, form_cosines, reproducibility
from experiments.context import RecipeContext
from hypothesis import given
from hypothesis import strategies as st

from bilens.tensor.features import unit_rows
from tests.experiments.test_recipes_single_layer import TinyContext
from tests.experiments.tiny import check_one_seed, check_outcome
from tests.models import digit_model, digits
from tests.nightly import nightly
from tests.tensor.factors import close, dense, normal, random_tensor, shapes

pytestmark = pytest.mark.long

FIGURES = {
    "case_digits": {"digits-12", "digits-16"},
    "case_svd": {"components", "singular_values", "bottleneck", "reproducibility"},
    "case_sae": {"features", "activations"},
    "case_pairs": {"features"},
}


class BriefContext(TinyContext):
    """The tiny context, with a hundred steps for its autoencoders."""

    def autoencoder(self, vectors, n_features, sample, training):
        return train_autoencoder(sample, n_features, replace(training, steps=100, batch_size=64))


SIZES = {"SHOWN": 2, "FEATURES": 60, "INPUT_FEATURES": 50, "PAIRS": 500, "STOPS": (3, 9)}
SIZES |= {"FIRST": 2, "FOLLOWED": 12, "WIDTHS": (12, 16), "MATCHED": 5}


@pytest.mark.parametrize("scale", nightly(["small", "paper"], ["small"]))
@pytest.mark.parametrize("name", FIGURES)
def test_recipes_run(name, scale, monkeypatch, tmp_path):
    recipe = import_module(f"experiments.{name}")
    for constant in SIZES.keys() & vars(recipe).keys():
        monkeypatch.setattr(recipe, constant, SIZES[constant])
    context = BriefContext(scale, tmp_path, seeds=2)
    check_outcome(recipe.run(context), FIGURES[name])
    if "WIDTHS" in vars(recipe):
        # From the files, the same.
        monkeypatch.setattr("experiments.case.train", None)
        recipe.run(context)


@pytest.mark.parametrize("name", FIGURES)
def test_recipes_run_from_one_seed_or_say_why_not(name, monkeypatch, tmp_path):
    recipe = import_module(f"experiments.{name}")
    for constant in SIZES.keys() & vars(recipe).keys():
        monkeypatch.setattr(recipe, constant, SIZES[constant])
    check_one_seed(name, BriefContext("small", Path("nowhere"), seeds=1), tmp_path)


def test_the_model_on_pixels_is_its_spectra():
    torch.manual_seed(0)
    model, x = PixelModel(64, 12, 10), digits().test_images[:50]
    assert torch.allclose(model.class_spectra()(x), model(x), atol=1e-4)
    assert 0 < model.accuracy(digits()) < 1
    relu = PixelModel(64, 12, 10, relu=True)
    weights, of_relu = (sum(p.numel() for p in m.layer.parameters()) for m in (model, relu))
    assert weights == of_relu


def test_directions_are_named_by_the_digits_they_raise_and_lower():
    readout = torch.tensor([[2.0, 0, 0, 0], [0, 0, 0, 5], [-1, 0, 0, 0]])
    model = SimpleNamespace(unembed=SimpleNamespace(weight=readout))
    data = SimpleNamespace(class_names=("a", "b", "c"))
    directions = torch.eye(4)[[0, 3]] * torch.tensor([[1.0], [-1.0]])
    assert direction_names(directions, model, data) == ["1: a against c", "2: a against b"]


def test_components_that_come_back_are_counted():
    layer = random_tensor(6, 9, 5, 0)
    svd, turned = layer.svd(), layer.change_basis(outputs=torch.linalg.qr(normal(5, 5)).Q).svd()
    # Components that change places match as well, out of place.
    weights = svd.components.weights[[1, 0, 2, 3, 4]]
    swapped = replace(svd, components=replace(svd.components, weights=weights))
    for other, places in ((turned, [1, 1, 1, 1, 1]), (swapped, [0, 0, 1, 1, 1])):
        best, in_place = reproducibility([svd, other])
        assert torch.allclose(best, torch.ones(2, 5, dtype=torch.float64), atol=1e-6)
        assert in_place.tolist() == [places] * 2
    best, in_place = reproducibility([svd, svd, random_tensor(6, 9, 5, 1).svd()])
    assert (best[:2] < 0.99).all()
    assert (in_place < 1).any()


@torch.no_grad()
def test_both_kinds_of_activations_are_compared():
    model, data = digit_model(), digits()
    y = layer_tensor(model)(data.test_images)
    torch.manual_seed(0)
    autoencoder = SparseAutoencoder(24, 60).requires_grad_(False)
    autoencoder.encoder_bias.fill_(-y.norm(dim=-1).max() * 0.2)
    result = compare(model, autoencoder, data)
    f = autoencoder.encode(y)
    active, numbers = (f != 0).any(0), result.numbers
    assert 24 < int(active.sum()) == numbers["active"] < 60
    assert torch.equal(result.relu, f[:, active])
    assert result.dictionary.rank == 24
    assert numbers["pseudoinverse_recovered"] == pytest.approx(1, abs=1e-4)
    assert close(result.pseudo, y @ torch.linalg.pinv(autoencoder.features[:, active]).T, 1e-3)
    rebuilt = f @ autoencoder.features.T + autoencoder.decoder_bias
    expected = loss_recovered(model(data.test_images), model.unembed(rebuilt), data.test_labels)
    assert numbers["relu_recovered"] == pytest.approx(expected, abs=1e-4)
    on = result.relu != 0
    correlation = torch.stack([result.relu[on], result.pseudo[on]]).double().corrcoef()[0, 1]
    assert numbers["correlation_where_active"] == pytest.approx(float(correlation))
    silent = result.pseudo[~on].pow(2).mean().sqrt() / result.pseudo[on].pow(2).mean().sqrt()
    assert numbers["silent_to_active_size"] == pytest.approx(float(silent))


def test_few_entries_hold_most_of_a_sparse_form():
    form = torch.zeros(10, 10)
    form[2, 3] = form[3, 2] = 5.0
    form[1, 1] = 0.1
    assert few_interactions(form) == 0.02
    assert few_interactions(torch.ones(10, 10)) == 0.9


def test_pair_activations_are_those_of_the_pairs():
    layer = random_tensor(5, 6, 4, 0)
    torch.manual_seed(0)
    autoencoder = SparseAutoencoder(4, 7).double().requires_grad_(False)
    autoencoder.encoder_bias.normal_()
    autoencoder.decoder_bias.normal_()
    selected = torch.tensor([5, 2])
    expected = autoencoder.encode(dense(layer).permute(1, 2, 0))[..., selected].permute(2, 0, 1)
    assert (expected == 0).any()
    assert close(pair_activations(layer, autoencoder, selected), expected)


def test_the_most_specific_of_the_most_active_are_chosen(monkeypatch):
    monkeypatch.setattr("experiments.case_pairs.CANDIDATES", 3)
    monkeypatch.setattr("experiments.case_pairs.SHOWN", 2)
    autoencoder = SparseAutoencoder(2, 4).requires_grad_(False)
    autoencoder.features.copy_(torch.tensor([[1.0, 0.6, 0.0, 0.9], [0.0, 0.8, -1.0, 0.4]]))
    model = SimpleNamespace(unembed=SimpleNamespace(weight=torch.eye(2)))
    activity = torch.tensor([0.1, 0.5, 0.4, 0.3])
    # The first is the most specific, and not active enough.
    assert most_specific(activity, autoencoder, model).tolist() == [2, 3]


def test_autoencoders_are_kept(tmp_path, monkeypatch):
    context = RecipeContext("small", tmp_path)
    sample, training = row_sampler(normal(50, 3).float()), AutoencoderTraining(steps=5, l1=0.3)
    first = context.autoencoder("rows", 4, sample, training)
    (file,) = tmp_path.iterdir()
    assert file.name == "rows-4-steps=5-l1=0.3-seed=0.safetensors"
    monkeypatch.setattr(torch.optim.Adam, "step", None)
    again = context.autoencoder("rows", 4, sample, training)
    assert torch.equal(first.features, again.features)
    assert not again.features.requires_grad


@given(shapes, st.integers(1, 6), st.integers(1, 6))
def test_form_cosines_are_those_of_the_matrices(shape, rank, k):
    a = random_tensor(**shape).svd().components
    b = random_tensor(shape["n_in"], rank, k, shape["seed"] + 1).interaction(normal(k, k))
    Q, other = (unit_rows(form.dense().flatten(1)) for form in (a, b))
    assert close(form_cosines(a, b), Q @ other.T, 1e-7)


def test_components_of_no_value_match_none():
    svd, dead = random_tensor(5, 8, 6, 0).svd(), random_tensor(5, 2, 3, 0).svd()
    assert (form_cosines(dead.components, svd.components)[2] == 0).all()


def test_recovered_loss_runs_from_guessing_to_the_model():
    labels = torch.tensor([0, 1, 2, 1])
    logits = 3 * torch.nn.functional.one_hot(labels, 3).float()
    assert math.isclose(loss_recovered(logits, logits, labels), 1.0)
    assert math.isclose(loss_recovered(logits, torch.zeros(4, 3), labels), 0.0, abs_tol=1e-6)
    assert 0 < loss_recovered(logits, 0.3 * logits, labels) < 1
    assert loss_recovered(logits, -logits, labels) < 0


@given(shapes, st.integers(1, 4), st.integers(1, 20))
def test_the_curve_is_the_accuracy_of_cut_layers(shape, classes, at_once):
    layer = random_tensor(**shape)
    svd = layer.svd()
    readout, x = normal(classes, layer.n_out), normal(17, layer.n_in, seed=1)
    labels = torch.arange(17) % classes
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("bilens.images.fidelity.BLOCK", at_once)
        curve = bottleneck_curve(svd, readout, x, labels)
    assert len(curve.accuracy) == len(svd)
    # Components of no value leave ties that rounding decides.
    for k in range(1, int((svd.values > 1e-6 * svd.values[0]).sum()) + 1):
        logits = svd.truncate(k)(x) @ readout.T
        expected = (logits.argmax(-1) == labels).double().mean().item()
        assert math.isclose(curve.accuracy[k - 1], expected)
        cut = layer.change_basis(outputs=readout @ svd.truncate(k).projector())
        assert torch.allclose(cut(x), logits, atol=1e-5)
