"""The recipe of figure 8 and Table 5, on a tiny random model and stories of its letters."""

from pathlib import Path

import pytest
from experiments.context import RecipeContext

from bilens.errors import DataError
from experiments import anneal as recipe
from tests.experiments import test_llama2c as llama2c
from tests.experiments.tiny import check_outcome, write_gzip

pytestmark = pytest.mark.long


@pytest.fixture
def data(tmp_path, monkeypatch):
    llama2c.write_stories(tmp_path, monkeypatch)
    monkeypatch.setattr(recipe, "LENGTH", 8)
    monkeypatch.setattr(recipe, "BATCH", 4)
    monkeypatch.setattr(recipe, "TOKENS", 8 * 4 * 8)
    texts = [f"the {'hare ' * (1 + i % 3)}ate {'tea ' * (i // 3)}there" for i in range(60)]
    write_gzip(tmp_path / "text" / "wikitext2_test.txt.gz", "\n\n".join(texts))
    return tmp_path


def test_the_recipe_runs_and_keeps_its_models(data, monkeypatch):
    context = RecipeContext("small", data / "models", data)
    outcome = check_outcome(recipe.run(context), {"loss"})
    losses = outcome.numbers["losses"]
    assert losses.keys() == recipe.NAMES.keys()
    # A validation where beta reaches 0, and three after it.
    assert [len(one) for one in losses["linear"]] == [4, 4]
    rows = {row.claim: row for row in outcome.rows}
    assert rows["annealed: loss where beta is all gone"].high == max(
        one[0] for one in losses["linear"]
    )
    rise = rows["rise over the fine-tuned model"]
    both = zip(losses["linear"], losses["held"], strict=True)
    assert rise.low == pytest.approx(min(100 * (a[-1] / b[-1] - 1) for a, b in both))
    monkeypatch.setattr("bilens.train.trainer.ResumableTrainer", None)
    assert recipe.run(context).numbers == outcome.numbers


def test_the_model_has_to_be_there(tmp_path):
    with pytest.raises(DataError, match=r"stories260K.bin is missing; this recipe needs"):
        recipe.run(RecipeContext("small", Path("nowhere"), tmp_path))
