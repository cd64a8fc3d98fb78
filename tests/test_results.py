"""Results are files: pages are made from them, and README's numbers stand in them.

`make test-results` takes ten minutes of one core, four trainings on MNIST.
"""

import json
import re
from collections.abc import Iterable
from functools import cache
from pathlib import Path

import pytest
from docs import results, tables
from docs.results import GROUPS, OF_THE_PROJECT, short
from experiments.claims import shown
from experiments.fig5 import FEW, KINDS, measure
from experiments.results import check, load_results, numbers_of, values_of
from experiments.stale import OF_README
from scipy import stats

from bilens.data import load_images
from bilens.nn import ClassifierConfig
from bilens.train import ClassifierTraining, train_classifier
from experiments import claims, verdicts

ROOT = Path(__file__).parents[1]
RESULTS = load_results()
KEYS = {"title", "command", "commit", "date", "machine", "seconds", "settings", "seeds", "rows"}
PAGES = sorted((ROOT / "docs").rglob("*.md"))
BY_PEOPLE = [p for p in PAGES if p.stem != "sources" and p.parent.name != "results"]
TABLE = re.compile(r"results/\w+\.md#(\w+)")
"""A link to the table of a file of results."""
CITING = [page for page in BY_PEOPLE if TABLE.search(page.read_text(encoding="utf-8"))]
LOST = f"points lost with {FEW} eigenvectors of each class"
CLAIMS = {"accuracy": "accuracy", "effective rank": "rank", LOST: "lost"}
ROWS = [(kind, claim) for kind in KINDS for claim in CLAIMS]
SEED, LEVEL = 100, 0.99
GENERATED = re.compile(r"<!-- tables .*?<!-- end -->", re.DOTALL)
PARTS = r"[Ss]ections? [\d., to]+|appendix \w[\d.]*"
REFERENCE = re.compile(rf"\d{{4}}\.\d{{5}}|{PARTS}|(?:Python|SAELens|torch) [\d.]+")
"""Citations and versions, whose numbers are not measured."""
SMALL = 20  # whole numbers up to this are often counts of a page's own
OF_SHARES = r"accuracy$|held out$|cosine$|(?<!words are )found|match of|correlation|recovered"
OF_SHARES += r"|taken for|two eigenv"
BEFORE_SHARES = {"case_sae", "grammar"}
"""Files written when intervals of shares could leave 0 to 1; the next run of their recipe mends
them."""
NOT_MEASURED = ("95", "64", "1.702", "1.24", "6.18", "3.9", "5.8")
"""Levels of intervals, sizes of heads, models and installs, GELU's slope as Swish, and versions."""


@cache
def measurements(names: tuple[str, ...]) -> list[float]:
    """Return every number that these files have, in their rows and as a setting."""
    found: list[float | None] = []
    for result in map(RESULTS.get, names):
        found += values_of(json.dumps(result["settings"]))
        for row in result["rows"]:
            found += [row[key] for key in ("value", "low", "high", "n", "source")]
            found += row["baselines"].values()
    return [number for number in found if number is not None]


def prose(path: Path) -> str:
    """Return the text of a page without code, links and pictures."""
    return re.sub(r"^```.*?^```$", "", path.read_text(encoding="utf-8"), flags=re.M | re.S)


def unmeasured(text: str, names: Iterable[str] = RESULTS) -> list[str]:
    """Return the numbers of a text that none of these files has at the digits of the text."""
    missing = []
    for number in sorted(numbers_of(re.sub(r"`[^`]*`|\]\([^)]*\)", "", text))):
        digits = len(number.partition(".")[2])
        if number not in {f"{value:.{digits}f}" for value in measurements(tuple(names))}:
            missing.append(number)
    return missing


def test_pages_are_made_from_the_files():
    made = results.pages(RESULTS) | {Path("sources.md"): results.sources_page(RESULTS)}
    for path, text in made.items():
        assert (ROOT / "docs" / path).read_text("utf-8") == text, "python -m docs.results"
    for path in tables.PAGES:
        assert path.read_text(encoding="utf-8") == tables.page(path, RESULTS), "docs.tables"
    listed = [name for names in GROUPS.values() for name in names]
    assert sorted(RESULTS) == sorted([*listed, *OF_THE_PROJECT])


@pytest.mark.parametrize("name", RESULTS)
def test_a_file_has_numbers_as_numbers(name):
    result = RESULTS[name]
    assert set(result) - {"note", "details"} == KEYS
    assert all(result[key] for key in ("title", "command", "commit", "date", "machine"))
    assert re.fullmatch(r"\d{4}-\d{2}-\d{2}", result["date"])
    # What was not written by a program of today says why.
    assert result["seconds"] is not None or result["note"]
    check(result)


def test_intervals_of_shares_are_of_shares():
    impossible = set()
    for name, result in RESULTS.items():
        for row in result["rows"]:
            most = 100 if row["unit"] == "%" else 1
            is_share = row["low"] is not None and re.search(OF_SHARES, row["claim"])
            if is_share and not 0 <= row["low"] <= row["high"] <= most:
                impossible.add(name)
    assert impossible <= BEFORE_SHARES


def test_every_number_of_readme_is_in_one_of_its_files():
    text = prose(ROOT / "README.md").partition("\n## Cite")[0]
    assert unmeasured(REFERENCE.sub("", text), OF_README) == []
    assert unmeasured("one of 98765.4, in SmolLM2, `1.23456`") == ["98765.4"]


@pytest.mark.parametrize("page", CITING, ids=lambda page: page.stem)
def test_every_number_beside_a_link_to_results_is_in_the_file_that_it_names(page):
    for text in prose(page).split("\n\n"):
        names = tuple(TABLE.findall(text))
        if names:
            numbers = set(unmeasured(REFERENCE.sub("", text), names)) - {*NOT_MEASURED}
            assert not [n for n in numbers if "." in n or float(n) > SMALL], text


def test_every_number_with_a_point_on_a_page_is_in_a_file():
    found = {}
    for page in PAGES:
        # Generated pages, and a table that has a test of its own.
        if page.stem not in ("results", "sources", "tasks") and page.parent.name != "results":
            notebook = page.with_suffix(".ipynb")
            cells = json.loads(notebook.read_text("utf-8"))["cells"] if notebook.exists() else []
            outputs = [output for cell in cells for output in cell.get("outputs", ())]
            printed = str([output["text"] for output in outputs if "text" in output])
            numbers = unmeasured(REFERENCE.sub("", GENERATED.sub("", prose(page))))
            numbers = [n for n in numbers if "." in n and n not in NOT_MEASURED]
            if numbers := [number for number in numbers if number not in printed]:
                found[page.stem] = numbers
    assert found == {}


def test_seconds_of_the_tasks_are_those_of_the_file():
    lines = (ROOT / "docs" / "howto" / "tasks.md").read_text(encoding="utf-8").splitlines()
    # Task, call, seconds and page.
    cells = [line.strip("| ").split(" | ") for line in lines if line.startswith("| ")]
    seconds = {row[0]: float(row[2]) for row in cells[1:] if row[2].strip()}
    details = RESULTS["tasks"]["details"]
    tasks = {row["task"]: float(row["seconds"]) for row in details if row["seconds"]}
    assert len(seconds) > 20
    assert seconds.items() <= tasks.items()


@pytest.mark.parametrize(
    ("numbers", "text"),
    [
        *(((None,), ""), ((1232.0,), "1,232"), ((98.05,), "98.05"), ((2.4e-15,), "2.4e-15")),
        *(((98.1234, 98.04, 98.16), "98.12"), ((22, 21, 24), "22"), ((0.5, -1.82, 0.98), "0.5")),
        ((4e-5, 2e-5, 6e-5), "4e-05"),
    ],
)
def test_a_number_has_the_digits_that_its_interval_leaves(numbers, text):
    assert shown(*numbers) == text


def test_a_claim_is_short_where_the_one_above_says_the_rest():
    claims = ["a: x", "a: y", "b: y", "c", "c", "b: y"]
    assert short(claims) == ["a: x", "… y", "b: …", "c", "c", "b: y"]


def test_rows_of_one_claim_stand_together():
    claims = ["a: x", "a: y", "c", "b: x", "b: z", "b: y"]
    ordered = results.by_claim([{"claim": claim} for claim in claims])
    assert [row["claim"] for row in ordered] == ["a: x", "b: x", "a: y", "b: y", "c", "b: z"]


@pytest.mark.parametrize("claim", claims.claims(), ids=lambda claim: claim["claim"])
def test_a_claim_of_a_source_has_a_number_a_test_or_a_reason(claim):
    assert claim["document"] in results.DOCUMENTS
    assert claim["kind"] in results.KINDS
    if claim["kind"] == "number":
        row, held = claims.row_of(claim, RESULTS), claims.verdict(claim, RESULTS)
        if claim["source"]:
            assert held in ("yes", "no", "cannot tell")
        # A number without an interval, or with nothing beside it, says why.
        assert claim["where"] or (row["low"] is not None and claim["beside"]), claim["claim"]
        numbers = verdicts.numbers_of_source(claim["source"])
        if numbers and row["source"] is not None and " to " not in claim["source"]:
            assert [*numbers] == pytest.approx([row["source"]], rel=1e-3)
    else:
        assert not any(claim[key] for key in ("source", "row", "beside"))
    if claim["kind"] == "exact":
        assert claim["file"]
        for name in claim["file"].split():
            file, _, function = name.partition("::")
            text = (ROOT / file).read_text(encoding="utf-8")
            assert re.search(f"^def {function}\\(", text, re.M), name
    if claim["kind"] in ("not a claim", "not tried"):
        assert not claim["file"]
        assert claim["where"]


@pytest.mark.parametrize(
    ("source", "ends", "beside", "held"),
    [
        *(("98.05", (97.8, 98.3), None, "yes"), ("98.05", (97.6, 98.3), None, "cannot tell")),
        *(("98.05", (97.0, 97.7), None, "no"), ("98.05", (None, None), None, "yes")),
        *(("87", (80, 94), None, "yes"), ("87", (47, 206), None, "cannot tell")),
        *(("0.9", (0.86, 0.94), None, "yes"), ("0.9", (0.81, 0.84), None, "no")),
        *(("at most 1", (0.2, 1), None, "yes"), ("at most 1", (0.2, 1.1), None, "cannot tell")),
        *(("at least 99", (5, 6), None, "no"), ("0.5 to 0.6", (0.47, 0.51), None, "cannot tell")),
        *(("below", (1, 2), (3, 4), "yes"), ("below", (3, 4), (1, 2), "no")),
        *(("below", (1, 3), (2, 4), "cannot tell"), ("above", (3, 4), (1, 2), "yes")),
        *(("above", (1, 2), (3, 4), "no"), ("equal", (97.1, 97.4), (97.2, 97.2), "yes")),
        *(("equal", (97.1, 97.6), (97.2, 97.2), "cannot tell"),),
    ],
)
def test_one_rule_says_whether_a_claim_held(source, ends, beside, held):
    middle = 98 if ends[0] is None else sum(ends) / 2
    unit = "%" if middle > 90 else ""
    row = {"claim": "accuracy", "unit": unit, "value": middle, "low": ends[0], "high": ends[1]}
    assert verdicts.held(source, {**row, "n": None}, beside) == held
    assert verdicts.held(source, {**row, "n": 1}, beside) == "cannot tell"


@pytest.mark.parametrize("source", ["yes", "below", "about 4", ""])
def test_what_no_rule_compares_is_refused(source):
    row = {"claim": "accuracy", "unit": "%", "value": 98.0, "low": None, "high": None, "n": None}
    with pytest.raises(ValueError, match="expected a number beside|could not convert"):
        verdicts.held(source, row)


@cache
def measured(kind: str) -> dict[str, float]:
    data = load_images("mnist")
    decay, noise = KINDS[kind]
    training = ClassifierTraining(weight_decay=decay, input_noise=noise, seed=SEED)
    model, _ = train_classifier(ClassifierConfig(784, 10, image_shape=(28, 28)), data, training)
    found = measure(model, data)
    percent = {"accuracy": 100 * found["accuracy"], "lost": 100 * found["drop"]}
    return {**percent, "rank": found["effective_rank"]}


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "claim"), ROWS)
def test_a_number_comes_out_again(kind, claim):
    """A new seed is where the interval of the file's seeds predicts it."""
    name = f"{'neither' if kind == 'none' else kind}: {claim}"
    (row,) = (row for row in RESULTS["fig5"]["rows"] if row["claim"] == name)
    half, n = (row["high"] - row["low"]) / 2, row["n"]
    assert half > 0
    wider = stats.t.ppf((1 + LEVEL) / 2, n - 1) / stats.t.ppf(0.975, n - 1)
    assert abs(measured(kind)[CLAIMS[claim]] - row["value"]) <= half * wider * (n + 1) ** 0.5
