"""Files of results: written by what measured, with numbers as numbers."""

import json
from dataclasses import replace
from itertools import count

import pytest
from experiments.context import RecipeContext
from experiments.pretrained import saved_rows
from experiments.results import Recording, Row, numbers_of

from bilens.errors import BilensError
from experiments import results
from tests.refusals import refused

pytestmark = pytest.mark.long

ROW = Row("eigenvectors, d = 300", 19.2, 17.5, 20.9, 5, baselines={"PCA": 43}, source=20, held=True)


@pytest.fixture
def clean(monkeypatch):
    """Answer as git does in a clone without changes."""
    answers = {"status": "", "rev-parse": "0123abcd\n"}
    monkeypatch.setattr(results, "_git", lambda *words: answers[words[0]])


def written(folder, *rows: Row, title: str = "Eigenvectors (figure 3)"):
    about = {"title": title, "command": "bilens reproduce fig3 --write", "seeds": range(5)}
    return Recording(folder).write("fig3", rows=rows, settings={"d_model": 300}, **about)


@pytest.mark.usefixtures("clean")
def test_a_file_has_the_run_and_its_numbers(tmp_path):
    result = written(tmp_path, ROW)
    assert json.loads((tmp_path / "fig3.json").read_text()) == result
    assert (result["commit"], result["seeds"]) == ("0123abcd", [0, 1, 2, 3, 4])
    (row,) = result["rows"]
    assert (row["value"], row["low"], row["high"], row["n"]) == (19.2, 17.5, 20.9, 5)
    assert (row["baselines"], row["source"], row["held"]) == ({"PCA": 43}, 20, True)
    assert "torch" in result["machine"]
    assert result["seconds"] >= 0


def writing(*rows: Row, **how):
    """Return the writing of a file, which leaves nothing."""

    def write(tmp_path, clean):
        try:
            written(tmp_path, *rows, **how)
        finally:
            assert not list(tmp_path.iterdir())

    return write


NUMBERS = {
    "has the number 17, which is no setting": writing(replace(ROW, claim="17 parts, d = 300")),
    "has the number 1200": writing(replace(ROW, unit="of 1,200")),
    "has the number 40": writing(replace(ROW, baselines={"PCA with 40": 0.1})),
    "value='17; 1.02', expected a number": writing(replace(ROW, value="17; 1.02")),
    "PCA='0.1', expected a number": writing(replace(ROW, baselines={"PCA": "0.1"})),
    "low=nan, expected a finite number": writing(replace(ROW, low=float("nan"))),
    "low='0.81', expected a number": writing(replace(ROW, low="0.81")),
    "held=0.5, expected true, false or nothing": writing(replace(ROW, held=0.5)),
    "has the number 42": writing(ROW, title="42 eigenvectors (figure 3)"),
    "expected at least one row": writing(),
}
test_a_number_in_a_text_and_an_empty_file_are_refused = refused(NUMBERS)


def test_code_that_no_commit_has_measures_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(results, "_git", lambda *_: " M src/bilens/nn/glu.py\n")
    with pytest.raises(BilensError, match="src/bilens/nn/glu.py has changes that are not commit"):
        Recording(tmp_path)


def test_samples_become_a_mean_with_its_interval_or_a_range():
    row = Row.of("accuracy", [0.97, 0.98, 0.99], scale=100, unit="%")
    assert row.value == pytest.approx(98)
    # Student's t of two degrees of freedom, 4.303, times 1 / sqrt(3).
    assert row.high == pytest.approx(98 + 2.484, abs=1e-3)
    assert (row.n, row.unit) == (3, "%")
    assert Row.of("accuracy", [0.9]) == Row("accuracy", 0.9, n=1)
    assert Row.of_range("directions", [21, 24, 22]) == Row("directions", 22, 21, 24, 3)
    assert Row.of_range("share", [0.1]) == Row("share", 0.1, n=1)


@pytest.mark.parametrize("shares", [[1, 1, 1], [0, 0], [0.99, 1, 0.97], [0, 0, 0, 0.6], [0.5] * 3])
def test_an_interval_of_shares_is_of_shares(shares):
    row = Row.of_shares("accuracy", shares, scale=100, unit="%")
    assert 0 <= row.low <= row.value <= row.high <= 100
    assert row.value == pytest.approx(100 * sum(shares) / len(shares))
    # Student's interval, where neither end is near.
    middle = [0.502, 0.498, 0.5, 0.504]
    ends, plain = Row.of_shares("accuracy", middle), Row.of("accuracy", middle)
    assert (ends.low, ends.high) == pytest.approx((plain.low, plain.high), abs=1e-6)
    assert Row.of_shares("accuracy", [0.9]) == Row("accuracy", 0.9, n=1)
    assert Row.of_shares("cosine", [1 + 1e-7]).value == 1
    with pytest.raises(BilensError, match="'cosine': expected shares from 0 to 1, got 1.1"):
        Row.of_shares("cosine", [0.5, 1.1])


def test_numbers_of_a_text():
    assert numbers_of("R² 0.93 of 1,232; SmolLM2, -0.1, 1e-12") == {"0.93", "1232", "-0.1", "1e-12"}


def test_measurements_of_another_commit_are_made_again(tmp_path, monkeypatch):
    context = RecipeContext("small", tmp_path)
    counted = count()
    for name, expected in (("aaaaaaaa", 0), ("aaaaaaaa", 0), ("bbbbbbbb", 1), ("aaaaaaaa", 0)):
        monkeypatch.setattr("experiments.context.commit", lambda name=name: name)
        monkeypatch.setattr("experiments.pretrained.commit", lambda name=name: name)
        assert context.measured("row", lambda: {"number": next(counted)}) == {"number": expected}
        rows = saved_rows(tmp_path / "rows.jsonl", ("key",), [(1,)], lambda _, of=name: {"of": of})
        assert rows == [{"key": 1, "of": name}]
