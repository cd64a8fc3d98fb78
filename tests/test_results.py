"""Results are files: the page is made from them, and README's numbers stand in them.

`pytest -m slow tests/test_results.py` takes ten minutes of one core, four trainings on MNIST.
"""

import re
from functools import cache
from pathlib import Path

import pytest
from docs import unseen
from docs.results import GROUPS, OF_THE_PROJECT, load_results, page
from experiments.fig5 import KINDS, measure

from bilens.data import load_images
from bilens.nn import ClassifierConfig
from bilens.read import read_classifier
from bilens.train import ClassifierTraining, train_classifier
from experiments import results as numbers

ROOT = Path(__file__).parents[1]
RESULTS = load_results()
SEED, SPREADS = 100, 4
# Rows of two files: the file, the claim, the kind of training of figure 5, and what is measured.
ROWS = [
    ("fig5", "neither: accuracy", "none", "accuracy"),
    ("fig5", "weight decay 0.5: accuracy", "weight decay", "accuracy"),
    ("fig5", "input noise 1.0: accuracy", "input noise", "accuracy"),
    ("fig5", "both: accuracy", "both", "accuracy"),
    ("fig5", "neither: effective rank", "none", "rank"),
    ("fig5", "weight decay 0.5: effective rank", "weight decay", "rank"),
    ("fig5", "input noise 1.0: effective rank", "input noise", "rank"),
    ("fig5", "both: effective rank", "both", "rank"),
    ("ten_eigenvectors", "no regularisation", "none", "lost"),
    ("ten_eigenvectors", "weight decay 0.5, input noise 1.0", "both", "lost"),
]
# Numbers of README that nothing measures: versions, years, sizes of models and names of parts.
NUMBER = re.compile(r"(?<![\w.-])\d[\d,]*(?:\.\d+)?(?![\w])")


def numbers_of(text: str) -> set[str]:
    """Return the numbers of a text, with neither commas nor zeros at the end."""
    return {number.strip(",").replace(",", "") for number in NUMBER.findall(text)}


def claims_of_readme() -> str:
    """Return README's prose above its first command, without code, links and pictures."""
    text = (ROOT / "README.md").read_text(encoding="utf-8").partition("\n## Try it")[0]
    text = re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)
    return re.sub(r"`[^`]*`|\]\([^)]*\)", "", text)


def test_the_page_is_made_from_the_files():
    assert (ROOT / "docs" / "results.md").read_text(encoding="utf-8") == page(RESULTS)
    listed = [name for names in GROUPS.values() for name in names]
    assert sorted(RESULTS) == sorted([*listed, *OF_THE_PROJECT])


def test_the_tables_of_unseen_templates_are_made_from_the_files():
    text = unseen.PAGE.read_text(encoding="utf-8")
    assert text == unseen.page(text, numbers.load_results())


@pytest.mark.parametrize("name", RESULTS)
def test_a_file_says_how_to_measure_it_again(name):
    result = RESULTS[name]
    for key in ("title", "command", "commit", "date", "hardware"):
        assert result[key], key
    assert re.fullmatch(r"\d{4}-\d{2}-\d{2}", result["date"])
    assert result["rows"]
    for row in result["rows"]:
        assert list(row) == ["claim", "number", "spread", "baseline"]
        assert row["claim"]
        assert row["number"]


def is_measured(number: str) -> bool:
    """Return whether a row of a file has a number, at the digits that README gives it."""
    digits = len(number.partition(".")[2])
    for result in numbers.load_results().values():
        if "machine" in result:
            for row in result["rows"]:
                found = (
                    row["value"],
                    row["low"],
                    row["high"],
                    row["n"],
                    *row["baselines"].values(),
                )
                if number in {f"{value:.{digits}f}" for value in found if value is not None}:
                    return True
    return False


def test_every_number_of_readme_is_in_a_file():
    measured: set[str] = set()
    for result in RESULTS.values():
        for row in result["rows"]:
            measured |= numbers_of(" ".join(map(str, row.values())))
        measured |= numbers_of(result["title"] + result["note"])
    assert [x for x in numbers_of(claims_of_readme()) - measured if not is_measured(x)] == []


def test_seconds_of_the_tasks_are_those_of_the_file():
    lines = (ROOT / "docs" / "howto" / "tasks.md").read_text(encoding="utf-8").splitlines()
    # Task, call, seconds and page.
    cells = [line.strip("| ").split(" | ") for line in lines if line.startswith("| ")]
    seconds = {row[0]: row[2] for row in cells[1:] if row[2].strip()}
    measured = {row["claim"]: row["number"] for row in RESULTS["tasks"]["rows"]}
    assert len(seconds) > 20
    assert seconds.items() <= measured.items()


def test_a_number_that_no_file_has_is_noticed():
    assert numbers_of("R² is 0.93, of 1,232 nodes; SmolLM2, head 26.0") == {"0.93", "1232", "26.0"}


def written(name: str, claim: str) -> tuple[float, float]:
    """Return the mean and the standard deviation of a row, like 98.04 % and ± 0.07."""
    (row,) = (row for row in RESULTS[name]["rows"] if row["claim"].endswith(claim))
    return float(row["number"].split()[0]), float(row["spread"].removeprefix("± "))


@cache
def measured(kind: str) -> dict[str, float]:
    data = load_images("mnist")
    decay, noise = KINDS[kind]
    training = ClassifierTraining(weight_decay=decay, input_noise=noise, seed=SEED)
    model, _ = train_classifier(ClassifierConfig(784, 10, image_shape=(28, 28)), data, training)
    numbers = measure(model, data)
    lost = read_classifier(model, data).curve.drop(10)
    return {
        "accuracy": 100 * numbers["accuracy"],
        "rank": numbers["effective_rank"],
        "lost": 100 * lost,
    }


@pytest.mark.parametrize(("name", "claim", "kind", "key"), ROWS)
def test_a_row_has_a_spread(name, claim, kind, key):
    assert written(name, claim)[1] > 0


@pytest.mark.slow
@pytest.mark.parametrize(("name", "claim", "kind", "key"), ROWS)
def test_a_number_comes_out_again(name, claim, kind, key):
    mean, deviation = written(name, claim)
    assert abs(measured(kind)[key] - mean) <= SPREADS * deviation
