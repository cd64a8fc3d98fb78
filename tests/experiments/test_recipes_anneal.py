"""The recipe of figure 8 and Table 5, on a tiny random model and stories of its letters."""

from pathlib import Path

import pytest
from experiments.context import RecipeContext

from bilens.errors import DataError
from experiments import anneal as recipe
from tests.experiments import test_llama2c as llama2c
from tests.experiments.tiny import check_outcome

TOKENS = 8 * 4 * 8


@pytest.fixture
def data(tmp_path, monkeypatch):
    llama2c.write_stories(tmp_path, monkeypatch)
    monkeypatch.setattr(recipe, "LENGTH", 8)
    monkeypatch.setattr(recipe, "BATCH", 4)
    monkeypatch.setattr(RecipeContext, "choose", lambda *_: TOKENS)
    return tmp_path


def test_the_recipe_runs_and_keeps_its_models(data, monkeypatch):
    context = RecipeContext("small", data / "models", data)
    outcome = check_outcome(recipe.run(context), {"loss"})
    assert outcome.numbers["tokens"] == TOKENS
    losses = outcome.numbers["validation"]
    assert losses["base model"] > 0
    assert set(losses["all tokens"]) == set(recipe.NAMES.values())
    monkeypatch.setattr("bilens.train.trainer.ResumableTrainer", None)
    assert recipe.run(context).numbers == outcome.numbers


def test_the_model_has_to_be_there(tmp_path):
    with pytest.raises(DataError, match=r"stories260K.bin is missing; this recipe needs"):
        recipe.run(RecipeContext("small", Path("nowhere"), tmp_path))
