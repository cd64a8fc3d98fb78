"""Recipes of parts in their weights and of directions of heads, on small models."""

import pytest
import torch
from experiments.context import RecipeContext
from experiments.head_directions import head_snapshots
from experiments.part_weights import Share, opened, principal, summary

from bilens.flows import Question
from bilens.flows.split import flows
from experiments import part_weights
from tests.experiments.tiny import check_rows
from tests.models import random_text, view_of


@pytest.fixture(scope="module")
def view():
    return view_of(n_layers=2, norm="rms", n_ctx=24)


@pytest.mark.parametrize("two", [True, False])
def test_all_directions_of_a_part_leave_nothing_of_its_effect(view, two, monkeypatch):
    ids = random_text(28 * 24).view(28, 24)
    basis = principal(view, ids[-20:])
    for count, whole in ((16, {"eigenvectors", "principal components"}), (1, set())):
        monkeypatch.setattr(part_weights, "K", count)
        shares = list(opened(view, ids[:8], None, basis, 2, two))
        assert {share.question for share in shares} == {0, 1}
        for share in shares:
            assert abs(share.effect) > 1e-3
            none = {name for name, left in share.left.items() if abs(left) < 1e-9}
            assert none == whole


def test_the_recipe_states_the_share_of_each_model(view, tmp_path, monkeypatch):
    ids = random_text(76 * 24).view(76, 24)
    monkeypatch.setattr(part_weights, "_models", lambda _: [("a model", view, ids, None)])
    monkeypatch.setattr(RecipeContext, "choose", lambda *_: 2)
    outcome = check_rows(part_weights.run(RecipeContext("small", tmp_path)))
    for row, stated in zip(outcome.numbers["rows"], outcome.rows, strict=True):
        assert stated.value == row["eigenvectors"]
        assert stated.baselines["neurons"] == row["neurons"]


def test_too_much_counts_as_much_as_too_little():
    effects = ((1, 0.5), (-2, -0.5), (1, 0.0))
    numbers = summary([Share(i, x, {"eigenvectors": y}) for i, (x, y) in enumerate(effects)])
    assert numbers["eigenvectors"] == pytest.approx(1 - 1 / 4)
    assert numbers["eigenvectors, low"] <= 0.75 <= numbers["eigenvectors, high"]


def test_changes_and_adjoints_of_heads_are_their_flow(view):
    question = Question("t1 t2 t3 t4", "t5", ("t6",), "t1 t7 t3 t4")
    with torch.no_grad():
        values, of_layers = head_snapshots(view, question)
    (through,) = flows(view, [question])
    heads = through.heads.double() / abs(through.value)
    for snapshots, expected in ((values, heads.flatten(0, 1)), (of_layers, heads.sum(1))):
        found = (snapshots.changes * snapshots.adjoints).sum(-1)
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-7)
