"""Ten numbers of docs/results.md, measured again from another initialisation, within their spread.

`pytest -m slow tests/test_results.py` takes ten minutes of one core, four trainings on MNIST.
"""

import re
from functools import cache
from pathlib import Path

import pytest
from experiments.fig5 import KINDS, measure

from bilens.data import load_images
from bilens.nn import ClassifierConfig
from bilens.read import read_classifier
from bilens.train import ClassifierTraining, train_classifier

PAGE = (Path(__file__).parents[1] / "docs" / "results.md").read_text(encoding="utf-8")
SEED, SPREADS = 100, 4
# The section, how the row starts, the column of the number, the training and what is measured.
FIG3, FIG5 = "with ten eigenvectors", "Noise and weight decay"
NAMES = {
    "neither": "none",
    "weight decay 0.5": "weight decay",
    "input noise 1.0": "input noise",
    "both": "both",
}
ROWS = [
    *((FIG5, row, 2, kind, "accuracy") for row, kind in NAMES.items()),
    *((FIG5, row, 4, kind, "rank") for row, kind in NAMES.items()),
    (FIG3, "no regularisation", 1, "none", "lost"),
    (FIG3, "weight decay 0.5, input noise 1.0", 1, "both", "lost"),
]


def written(section: str, row: str, column: int) -> tuple[float, float]:
    """Mean and standard deviation of a cell of the page, like 98.04 ± 0.07 %."""
    chapter = next(part for part in re.split(r"^## ", PAGE, flags=re.M) if section in part[:80])
    (line,) = (line for line in chapter.splitlines() if line.startswith(f"| {row} |"))
    result = re.search(r"(-?[\d.]+) ± ([\d.]+)", line.split("|")[1:-1][column])
    return float(result[1]), float(result[2])


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


@pytest.mark.parametrize(("section", "row", "column", "kind", "key"), ROWS)
def test_the_page_gives_a_spread(section, row, column, kind, key):
    assert written(section, row, column)[1] > 0


@pytest.mark.slow
@pytest.mark.parametrize(("section", "row", "column", "kind", "key"), ROWS)
def test_a_number_comes_out_again(section, row, column, kind, key):
    mean, deviation = written(section, row, column)
    assert abs(measured(kind)[key] - mean) <= SPREADS * deviation
