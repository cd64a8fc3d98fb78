"""The recipe of figure 8 and Table 5, on a tiny random model and stories of its letters."""

import gzip
import json
from pathlib import Path

import pytest
from experiments.context import RecipeContext

from bilens.errors import DataError
from experiments import anneal as recipe
from tests.experiments import test_llama2c as llama2c

TOKENS = 8 * 4 * 8


class TinyContext(RecipeContext):
    def choose(self, small, paper):
        return TOKENS


@pytest.fixture
def data(tmp_path, monkeypatch):
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(llama2c, "VOCAB", len(llama2c.ALL_PIECES))
    monkeypatch.setattr(recipe, "LENGTH", 8)
    monkeypatch.setattr(recipe, "BATCH", 4)
    for folder in ("llama2c", "tinystories"):
        (tmp_path / folder).mkdir()
    llama2c.write(tmp_path / recipe.MODEL, llama2c.weights(True))
    llama2c.write_tokenizer(tmp_path / "llama2c" / f"tok{len(llama2c.ALL_PIECES)}.bin")
    stories = [f"the {'hare ' * (1 + i % 3)}ate {'tea ' * (i // 3)}there" for i in range(60)]
    for split, several in (("train", stories[:50]), ("valid", stories[50:])):
        with gzip.open(tmp_path / "tinystories" / f"{split}.txt.gz", "wt") as file:
            file.write("\n<|endoftext|>\n".join(several))
    return tmp_path


def test_the_recipe_runs_and_keeps_its_models(data, monkeypatch):
    context = TinyContext("small", data / "models", data)
    outcome = recipe.run(context)
    numbers = json.loads(json.dumps(outcome.numbers, allow_nan=False))
    assert numbers["tokens"] == TOKENS
    losses = numbers["validation"]
    assert losses["base model"] > 0
    assert set(losses["all tokens"]) == set(recipe.NAMES.values())
    assert outcome.figures.keys() == {"loss"}
    monkeypatch.setattr("bilens.train.trainer.ResumableTrainer", None)
    assert recipe.run(context).numbers == outcome.numbers


def test_the_model_has_to_be_there(tmp_path):
    with pytest.raises(DataError, match=r"stories260K.bin is missing; this recipe needs"):
        recipe.run(TinyContext("small", Path("nowhere"), tmp_path))
