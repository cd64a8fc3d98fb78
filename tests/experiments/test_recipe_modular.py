"""Modular addition in small: brief trainings modulo 7."""

import json
from dataclasses import dataclass, replace

import experiments.modular as recipe
from experiments.context import RecipeContext

from bilens.cli.installation import FOLDER, recipes, reproduce


@dataclass(frozen=True)
class BriefContext(RecipeContext):
    def choose(self, small, paper):
        return {59: 7, 5: 2}[small]


def test_the_recipe_writes_its_numbers_and_its_page(tmp_path, monkeypatch):
    assert "modular" in recipes()
    assert (FOLDER / "modular.py").is_file()
    monkeypatch.setattr("experiments.context.RecipeContext", BriefContext)
    monkeypatch.setattr(recipe, "TRAINING", replace(recipe.TRAINING, epochs=2))
    record = reproduce("modular", scale="small", output=tmp_path, models=tmp_path, data_dir=None)
    assert json.loads((tmp_path / "modular.json").read_text()) == record
    for name in ("1 layer", "2 layers"):
        assert len(record[name]["frequencies"]) == record[name]["accuracy_kept"]["n"] == 2
        assert 0 < record[name]["share_of_addition"]["mean"] <= 1
    page = (tmp_path / "modular.html").read_text()
    assert "Waves of modular addition" in page
    assert "Share of each frequency, 2 layers" in page
