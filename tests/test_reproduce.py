"""Recipes are found by their files, listed with their titles, and run."""

import json
from functools import partial
from importlib import import_module

import pytest
from experiments.results import FIGURE, values_of

import experiments
from bilens.cli import main, running
from bilens.errors import BilensError
from experiments import results
from tests.command_line import in_json

RECIPE = '''"""Nothing: a recipe that says where it runs.

And no more.
"""

import pandas as pd

from bilens.sections import Table
from experiments.context import Outcome, RecipeContext


def run(context: RecipeContext) -> Outcome:
    table = Table(pd.DataFrame({"answer": ["42"]}), words=0)
    return Outcome({"answer": context.choose(42, 43)}, parts=[table])
'''


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Return a folder with a recipe and another file."""
    place = tmp_path / "experiments"
    place.mkdir()
    (place / "nothing.py").write_text(RECIPE)
    (place / "helper.py").write_text("def runs():\n    pass\n")
    monkeypatch.setattr(running, "FOLDER", place)
    monkeypatch.setattr(experiments, "__path__", [*experiments.__path__, str(place)])
    return place


def test_every_recipe_is_found_with_its_title():
    result = running.recipes()
    assert {"fig3", "compare", "grammar", "case_pairs"} <= set(result)
    assert not {"context", "curves", "case", "__init__"} & set(result)
    for name, title in result.items():
        module = import_module(f"experiments.{name}")
        assert module.__doc__.startswith(title)
        assert title.endswith(".")
        # A file of results refuses such a title, after all that was measured.
        assert not values_of(FIGURE.sub("", title))


@pytest.mark.usefixtures("folder")
def test_a_new_recipe_is_one_file(tmp_path, capsys):
    main(["reproduce"])
    assert "a recipe that says where it runs" in capsys.readouterr().out
    (title,) = in_json(capsys, "reproduce")["recipes"].values()
    assert title.endswith("a recipe that says where it runs.")
    output = tmp_path / "output"
    main(["reproduce", "nothing", "--output", str(output)])
    record = json.loads((output / "nothing.json").read_text())
    assert (record["recipe"], record["scale"], record["answer"]) == ("nothing", "small", 42)
    assert "And no more." in (output / "nothing.html").read_text()


@pytest.mark.usefixtures("folder")
def test_an_unknown_recipe_is_refused_with_those_there_are(capsys):
    with pytest.raises(SystemExit):
        main(["reproduce", "something"])
    assert "recipe='something', expected one of nothing" in capsys.readouterr().err


def test_without_the_repository_there_are_none(tmp_path, monkeypatch):
    monkeypatch.setattr(running, "FOLDER", tmp_path / "nowhere")
    with pytest.raises(BilensError, match="recipes are part of the repository, not of the package"):
        running.recipes()


ROWS = "    rows = [Row('seeds', len(found), n=context.seed)]\n"
ROW = "from experiments.results import Row\n\nSEEDS = (2, 20)"
RETURN = "    return Outcome("
SEEDED = (
    RECIPE.replace("import Outcome, RecipeContext", "import Outcome, RecipeContext\n" + ROW)
    .replace("    return Outcome(", ROWS + RETURN)
    .replace("    table =", "    found = context.seed_range(SEEDS)\n    table =")
    .replace("parts=[table])", "parts=[table], rows=rows)")
)


@pytest.mark.usefixtures("folder")
def test_a_recipe_writes_its_rows_and_says_its_seeds(tmp_path, monkeypatch, folder):
    (folder / "seeded.py").write_text(SEEDED)
    monkeypatch.setattr(results, "_git", lambda *words: "" if words[0] == "status" else "01ab\n")
    recording = partial(results.Recording, tmp_path)
    monkeypatch.setattr(results, "Recording", recording)
    place = ["--output", str(tmp_path / "output")]
    main(["reproduce", "seeded", *place, "--write", "--seeds", "3", "--seed", "7"])
    result = json.loads((tmp_path / "seeded.json").read_text())
    assert result["command"] == "bilens reproduce seeded --seeds 3 --seed 7 --write"
    assert result["title"] == "Nothing: a recipe that says where it runs"
    assert (result["seeds"], result["settings"]) == ([7, 8, 9], {"scale": "small"})
    assert (result["rows"][0]["value"], result["rows"][0]["n"]) == (3, 7)
    main(["reproduce", "seeded", *place, "--write", "--scale", "paper"])
    result = json.loads((tmp_path / "seeded.json").read_text())
    assert result["command"] == "bilens reproduce seeded --scale paper --write"
    assert result["seeds"] == list(range(20))


@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize(
    ("options", "text"),
    [
        (["--seeds", "3"], "nothing trains nothing from a seed: leave out --seeds and --seed"),
        (["--seeds", "0"], "seeds=0, expected a whole number, at least 1"),
    ],
)
def test_seeds_without_effect_are_refused(tmp_path, capsys, options, text):
    with pytest.raises(SystemExit):
        main(["reproduce", "nothing", "--output", str(tmp_path), *options])
    assert text in capsys.readouterr().err
