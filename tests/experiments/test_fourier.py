"""Waves put into the weights are read out of them."""

import json
import math
from dataclasses import replace
from pathlib import Path

import experiments.fourier
import experiments.modular as recipe
import pytest
import torch
from experiments.context import RecipeContext
from experiments.fourier import read_fourier
from experiments.running import run_recipe

from bilens.analyses import load_file
from bilens.errors import BilensError, NotBilinearError
from bilens.nn import ClassifierConfig, ImageClassifier


def adding_model(p: int, strengths: dict[int, float]) -> ImageClassifier:
    """Logits sum_k s_k cos(2 pi k (a + b - c) / p), made of products of cosines and sines.

    cos(x + y - z) = (cos x cos y - sin x sin y) cos z + (sin x cos y + cos x sin y) sin z.
    """
    model = ImageClassifier(ClassifierConfig(2 * p, p, 4 * len(strengths)))
    angle = 2 * math.pi * torch.arange(p) / p
    reads, pairs, writes = [], [], []
    for number, (k, strength) in enumerate(strengths.items()):
        cos, sin, none = torch.cos(k * angle), torch.sin(k * angle), torch.zeros(p)
        reads += [torch.cat(wave) for wave in ((cos, none), (sin, none), (none, cos), (none, sin))]
        first = 4 * number
        pairs += [(first + i, first + j) for i, j in ((0, 2), (1, 3), (1, 2), (0, 3))]
        writes += [strength * cos, -strength * cos, strength * sin, strength * sin]
    layer = model.layers[0]
    with torch.no_grad():
        model.embed.weight.copy_(torch.stack(reads))
        layer.left.weight.copy_(torch.eye(len(pairs))[[a for a, _ in pairs]])
        layer.right.weight.copy_(torch.eye(len(pairs))[[b for _, b in pairs]])
        model.unembed.weight.copy_(torch.stack(writes, dim=1))
    return model


@pytest.mark.parametrize("p", [12, 13])
def test_the_waves_of_a_known_model(p):
    reading = read_fourier(adding_model(p, {2: 3.0, 5: 1.0, 3: 0.05}))
    assert reading.frequencies == (2, 5)
    expected = torch.zeros(p // 2, dtype=torch.float64)
    expected[[1, 4, 2]] = torch.tensor([9, 1, 0.0025]).double() / (9 + 1 + 0.0025)
    assert torch.allclose(reading.power, expected, atol=1e-6)
    assert reading.accuracy == reading.accuracy_kept == 1.0
    # Frequency 3 alone still adds, but modulo 4 where p is 12.
    assert (reading.accuracy_removed == 1.0) == (p == 13)
    assert math.isclose(reading.unit_share, 1.0, rel_tol=1e-6)
    assert read_fourier(adding_model(p, {2: 3.0, 5: 1.0}), least=0.5).frequencies == (2,)


def test_half_the_modulus_is_counted_once():
    reading = read_fourier(adding_model(12, {6: 1.0, 1: 1.0}))
    # cos(pi n) squares to 1 on average, any other wave to 1/2.
    assert torch.allclose(reading.power[[0, 5]], torch.tensor([1 / 3, 2 / 3]).double(), atol=1e-6)


def test_the_waves_are_those_of_the_tensor():
    torch.manual_seed(0)
    p = 7
    model = ImageClassifier(ClassifierConfig(2 * p, p, 20))
    dense = model.tensor().interaction(output=range(p)).dense().detach().double()
    waves = torch.fft.fftn(dense[:, :p, p:])
    k = torch.arange(1, 4)
    power = 2 * waves[-k, k, k].abs() ** 2 / (waves[1:, 1:, 1:].abs() ** 2).sum()
    assert torch.allclose(read_fourier(model).power, power, atol=1e-5)


def test_a_model_that_does_not_add():
    reading = read_fourier(adding_model(13, {2: 1.0}), least=1.0 - 1e-6)
    assert reading.frequencies == (2,)
    assert reading.accuracy_removed < 0.5
    with pytest.raises(BilensError, match="^The model has 9 pixels and 3 classes, expected twice"):
        read_fourier(ImageClassifier(ClassifierConfig(9, 3, 4)))
    with pytest.raises(NotBilinearError, match="norm"):
        read_fourier(ImageClassifier(ClassifierConfig(6, 3, 4, norm="rms")))


def test_frequencies_have_a_row_each():
    model = ImageClassifier(ClassifierConfig(14, 7, 8)).requires_grad_(False)
    result = read_fourier(model)
    assert result.frame().share.tolist() == result.power.tolist()
    assert result.record()["accuracy"] == result.accuracy
    assert len(result.sections()) == 1
    (entry,) = load_file(Path(experiments.fourier.__file__))
    assert entry.fits(model)
    (least,) = entry.options
    assert least.name == "least"
    assert least.help


def test_the_recipe_writes_its_numbers_and_its_page(tmp_path, monkeypatch):
    monkeypatch.setattr(recipe, "TRAINING", replace(recipe.TRAINING, epochs=2))
    monkeypatch.setattr(RecipeContext, "choose", lambda _, small, paper: {59: 7, 5: 2}[small])
    record = run_recipe("modular", RecipeContext("small", tmp_path), tmp_path)
    assert json.loads((tmp_path / "modular.json").read_text()) == record
    for name in ("1 layer", "2 layers"):
        assert len(record[name]["frequencies"]) == record[name]["accuracy_kept"]["n"] == 2
        assert 0 < record[name]["share_of_addition"]["mean"] <= 1
    page = (tmp_path / "modular.html").read_text()
    assert "Waves of modular addition" in page
    assert "Share of each frequency, 2 layers" in page
