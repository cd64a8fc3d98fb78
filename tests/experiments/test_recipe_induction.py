"""The recipe of induction: texts whose words come again, and curves that end where enough do."""

from pathlib import Path

import pytest
import torch
from experiments.context import RecipeContext

from experiments import induction
from tests.experiments.tiny import check_outcome

pytestmark = pytest.mark.long


def test_words_come_again_after_a_period():
    ids, again = induction.draw(200, torch.Generator().manual_seed(0))
    starts = again.float().argmax(1)
    assert {*starts.tolist()} == {*range(induction.SHORTEST, induction.LONGEST + 1)}
    for row, start in zip(ids, starts.tolist(), strict=True):
        assert torch.equal(row[start:], row[:-start])


def test_a_curve_ends_where_enough_is_found(monkeypatch):
    monkeypatch.setattr(induction, "MOST", 60)
    assert len(induction.learned("rotary", 0)) == 3
    monkeypatch.setattr(induction, "SHARE", 0.0)
    assert len(induction.learned("rotary", 0)) == 1


def test_the_recipe_runs(monkeypatch):
    monkeypatch.setattr(induction, "MOST", 20)
    outcome = check_outcome(induction.run(RecipeContext("small", Path("nowhere"))), {"repeated"})
    assert [row.value for row in outcome.rows] == pytest.approx([20] * 3)
