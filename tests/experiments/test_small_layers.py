"""Small layers: what is known of XOR, and of features at an angle, is found."""

from functools import partial
from math import cos
from pathlib import Path

import experiments.small_layers as recipe
import pytest
import torch
from experiments.context import RecipeContext
from experiments.small_layers import ANGLE, TILTED, U, V, along, ends, spectrum, train

from tests.experiments.tiny import check_outcome

pytestmark = pytest.mark.long


def test_xor_has_two_eigenvectors_of_opposite_signs(monkeypatch):
    monkeypatch.setattr(recipe, "STEPS", 400)
    found = spectrum(train(recipe.signs, 3))
    assert (found.values.max() > 0.4, found.values.min() < -0.4) == (True, True)
    first, last = ends(found)
    assert along(first, U + V) > 0.95
    assert along(last, U - V) > 0.95


def test_features_at_an_angle_are_split(monkeypatch):
    monkeypatch.setattr(recipe, "STEPS", 400)
    first, _ = ends(spectrum(train(partial(recipe.squares, torch.stack([U, TILTED])), 3)))
    assert along(first, U + TILTED) > 0.99
    assert along(first, U) == pytest.approx(cos(ANGLE / 2), abs=0.05)


def test_boolean_functions_are_those_of_bits():
    for name, expected in {"AND": [0, 0, 0, 1], "OR": [0, 1, 1, 1], "XOR": [0, 1, 1, 0]}.items():
        a, b = torch.tensor([[0.0, 0, 1, 1], [0, 1, 0, 1]])
        assert recipe.BOOLEAN[name](a, b).tolist() == expected


def test_the_recipe_runs(monkeypatch):
    monkeypatch.setattr(recipe, "STEPS", 5)
    outcome = check_outcome(recipe.run(RecipeContext("small", Path("nowhere"))), {"quadrants"})
    assert len(outcome.rows) == 6


def test_a_relu_of_equal_size_has_as_many_weights():
    layer, relu = (
        sum(p.numel() for p in make().parameters()) for make in (recipe.with_bias, recipe.with_relu)
    )
    assert 0 <= relu - layer <= recipe.HIDDEN
