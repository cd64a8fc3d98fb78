"""Recipes are found by their files, listed with their titles, and run."""

import json
from importlib import import_module

import pytest

import experiments
from bilens.cli import installation, main
from bilens.errors import BilensError
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
    monkeypatch.setattr(installation, "FOLDER", place)
    monkeypatch.setattr(experiments, "__path__", [*experiments.__path__, str(place)])
    return place


def test_every_recipe_is_found_with_its_title():
    result = installation.recipes()
    assert {"fig3", "compare", "grammar", "case_pairs"} <= set(result)
    assert not {"context", "curves", "case", "__init__"} & set(result)
    for name, title in result.items():
        module = import_module(f"experiments.{name}")
        assert module.__doc__.startswith(title)
        assert title.endswith(".")


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
    monkeypatch.setattr(installation, "FOLDER", tmp_path / "nowhere")
    with pytest.raises(BilensError, match="recipes are part of the repository, not of the package"):
        installation.recipes()
