"""Recipes are found by their files, listed with their titles, and run."""

from functools import partial
from importlib import import_module

import pytest
from experiments.claims import claims, table_of
from experiments.results import FIGURE, Row, values_of
from experiments.verdicts import numbers_of_source

import experiments
from bilens.cli import main, running
from bilens.errors import BilensError
from bilens.files import read_json
from experiments import results
from tests.command_line import in_json, output_of, refusal

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
        assert import_module(f"experiments.{name}").__doc__.startswith(title)
        assert title.endswith(".")
        # A file of results refuses such a title, after all that was measured.
        assert not values_of(FIGURE.sub("", title))


@pytest.mark.usefixtures("folder")
def test_a_new_recipe_is_one_file(tmp_path, capsys):
    assert "a recipe that says where it runs" in output_of(capsys, "reproduce")
    (title,) = in_json(capsys, "reproduce")["recipes"].values()
    assert title.endswith("a recipe that says where it runs.")
    output = tmp_path / "output"
    main(["reproduce", "nothing", "--output", str(output)])
    record = read_json(output / "nothing.json")
    assert (record["recipe"], record["scale"], record["answer"]) == ("nothing", "small", 42)
    assert "And no more." in (output / "nothing.html").read_text()


def test_without_the_repository_there_are_none(tmp_path, monkeypatch):
    monkeypatch.setattr(running, "FOLDER", tmp_path / "nowhere")
    with pytest.raises(BilensError, match="recipes are part of the repository, not of the package"):
        running.recipes()


ROWS = "    rows = [Row('seeds', len(found), n=context.seed)]\n"
ROW = "from experiments.results import Row\nSEEDS = (2, 20)"
SEEDED = (
    RECIPE.replace("import Outcome, RecipeContext", "import Outcome, RecipeContext\n" + ROW)
    .replace("    return Outcome(", f"{ROWS}    return Outcome(")
    .replace("    table =", "    found = context.seed_range(SEEDS)\n    table =")
    .replace("parts=[table])", "parts=[table], rows=rows)")
)


@pytest.mark.usefixtures("folder")
def test_a_recipe_writes_its_rows_and_says_its_seeds(tmp_path, monkeypatch, folder, capsys):
    (folder / "seeded.py").write_text(SEEDED)
    monkeypatch.setattr(results, "_git", lambda *words: "" if words[0] == "status" else "01ab\n")
    monkeypatch.setattr(results, "Recording", partial(results.Recording, tmp_path))
    command = ["reproduce", "seeded", "--output", str(tmp_path / "output"), "--write"]
    main([*command, "--seeds", "3", "--seed", "7"])
    result = read_json(tmp_path / "seeded.json")
    assert result["command"] == "bilens reproduce seeded --seeds 3 --seed 7 --write"
    assert result["title"] == "Nothing: a recipe that says where it runs"
    assert (result["seeds"], result["settings"]) == ([7, 8, 9], {"scale": "small"})
    assert (result["rows"][0]["value"], result["rows"][0]["n"]) == (3, 7)
    header, row = capsys.readouterr().out.splitlines()[:2]
    assert header.split() == ["claim", "number", "low…high", "beside", "source", "held"]
    assert row.split() == ["seeds", "3"]
    assert ">seeds</td>" in (tmp_path / "output" / "seeded.html").read_text()
    main([*command, "--scale", "paper"])
    result = read_json(tmp_path / "seeded.json")
    assert result["command"] == "bilens reproduce seeded --scale paper --write"
    assert result["seeds"] == list(range(20))


@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["something"], "recipe='something', expected one of nothing"),
        (["nothing", "--seeds", "3"], "nothing trains nothing from a seed: leave out --seeds and"),
        (["twins", "--seeds", "1"], "seeds=1, expected at least 2: twins compares each model with"),
        (["nothing", "--seeds", "0"], "seeds=0, expected a whole number, at least 1"),
    ],
)
def test_unknown_recipes_and_seeds_without_effect_are_refused(
    tmp_path, capsys, folder, words, text
):
    if words[0] == "twins":
        (folder / "twins.py").write_text(f"{RECIPE}SEEDS, LEAST_SEEDS = (2, 2), 2\n")
    assert text in refusal(capsys, "reproduce", *words, "--output", tmp_path)


def test_a_row_stands_beside_the_number_of_the_source():
    """The claim's number, its verdict, and what the recipe noted where there is no claim."""
    claim = next(x for x in claims() if x["kind"] == "number" and x["source"] and not x["beside"])
    (number,) = numbers_of_source(claim["source"].split(" to ")[0])
    rows = [Row(claim["row"], number), Row(claim["row"] + "?", 1, held=False)]
    table = table_of(claim["file"], rows)
    assert table["source"].tolist() == [claim["source"], ""]
    assert table["held"].tolist() == ["yes", "no"]
    assert table_of("another", rows[:1])["source"].tolist() == [""]
