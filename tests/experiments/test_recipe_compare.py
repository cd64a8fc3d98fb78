"""Architectures compared: equal conditions, saved results, and the cost of the target."""

import math

import pandas as pd
import pytest
from experiments.compare import Trained, count_parameters, of_equal_size, summary, variants
from experiments.context import RecipeContext
from hypothesis import given, settings
from hypothesis import strategies as st

from bilens.errors import BilensError
from bilens.nn.language import LanguageConfig, LanguageModel
from bilens.nn.settings import LanguageSettings
from bilens.train.settings import PRESETS, LanguageTraining, Preset
from experiments import compare
from tests.experiments.tiny import check_outcome
from tests.models import small_config, small_corpus

pytestmark = pytest.mark.long

TRAINING = LanguageTraining(
    epochs=2, batch_size=8, learning_rate=1e-2, save_every=3, evaluate_every=2, target_loss=4.27
)


def curve(losses, pace=0.5):
    steps = [10.0 * number for number in range(1, len(losses) + 1)]
    took = {"tokens": [8 * n for n in steps], "seconds": [pace * n for n in steps]}
    return pd.DataFrame({"steps": steps, **took, "loss": losses})


@settings(max_examples=6)
@given(st.integers(40, 200), st.integers(1, 3), st.booleans())
def test_equal_size_is_equal_to_half_a_hidden_unit(hidden, layers, bias):
    config = small_config(d_hidden=hidden, n_layers=layers, bias=bias)
    kinds = variants(config, ["swiglu", "bilinear", "relu"], ["softmax", "bilinear"])
    result = of_equal_size(kinds)
    goal = sum(weight.numel() for weight in LanguageModel(kinds[0]).parameters())
    assert count_parameters(result[0]) == goal
    for single in result:
        unit = layers * (3 * 16 + 2 * bias if single.mlp != "relu" else 2 * 16 + bias)
        assert abs(count_parameters(single) - goal) <= unit / 2


def test_equal_size_may_be_out_of_reach():
    with pytest.raises(BilensError, match="with bilinear MLP and bilinear attention"):
        of_equal_size(variants(small_config(d_hidden=2), ["bilinear"], ["softmax", "bilinear"]))


def test_the_large_preset_has_half_a_billion_parameters():
    for attention, millions in {"softmax": 498.1, "bilinear": 545.9, "differential": 545.9}.items():
        config = LanguageConfig(**{**PRESETS["500m"].model.settings(), "attention": attention})
        assert count_parameters(config) / 1e6 == pytest.approx(millions, abs=0.1)


def test_a_crossing_lies_on_the_line_between_two_validations():
    single = curve([5.0, 4.0, 3.0, 3.5, 2.0])
    for target, steps in {3.25: 27.5, 4.0: 20.0, 3.0: 30.0, 6.0: 10.0}.items():
        assert compare.crossing(single, target).tolist() == [steps, 8 * steps, steps / 2]
    assert compare.crossing(single, 1.0).isna().all()


def test_costs_are_means_over_seeds_and_ratios_to_the_first():
    first = Trained("first", 10, 100, [curve([4.0, 3.0, 2.0])] * 2)
    other = Trained("other", 20, 150, [curve([4.0, 3.0, 2.5, 2.0], 1.0), curve([4.0, 2.0], 2.0)])
    one, two = summary([first, other], 2.5).to_dict("records")
    assert (one["steps"], one["tokens"], one["seconds"], one["±"]) == (25, 200, 12.5, 0)
    assert two["steps"] == (30 + 17.5) / 2
    assert two["±"] == pytest.approx(12.5 / 2**0.5)
    assert two["ratio of steps"] == two["steps"] / 25
    assert two["ratio of seconds"] == pytest.approx((30 + 35) / 2 / 12.5)
    assert (two["seconds of a step"], two["best"], two["seeds that missed"]) == (1.5, 2.0, 0)


def test_a_row_has_the_ratios_of_the_same_seeds_around_that_of_the_means():
    first = Trained("swiglu-softmax-8", 10, 100, [curve([4.0, 2.0]), curve([4.0, 3.0, 2.0])])
    other = Trained("swiglu-bilinear-8", 11, 120, [curve([4.0, 3.0, 2.0], 2.0), curve([4.0, 2.0])])
    (row,) = compare.stated_rows([first, other], 2.5)
    # 17.5 and 25 steps against 25 and 17.5.
    assert (row.value, row.low, row.high, row.n) == (1, 17.5 / 25, 25 / 17.5, 2)
    assert row.baselines == {"parameters": 1.1, "operations": 1.2}
    assert (row.source, row.held) == (1.04, True)


def test_a_missed_target_has_no_cost():
    missed = Trained("first", 10, 100, [curve([4.0, 3.0]), curve([4.0, 2.0])])
    one, two = summary([missed, Trained("other", 10, 100, [curve([4.0, 2.0])])], 2.5).to_dict(
        "records"
    )
    assert (one["seeds that missed"], one["best"]) == (1, 2.5)
    assert math.isnan(one["steps"])
    assert two["steps"] == 17.5
    assert math.isnan(two["ratio of steps"])
    (row,) = compare.stated_rows(
        [missed, Trained("swiglu-bilinear-8", 10, 100, missed.curves)], 2.5
    )
    assert (row.value, row.low, row.high, row.held) == (None, None, None, None)
    assert row.baselines == {"parameters": 1, "operations": None}


def test_operations_are_those_of_the_products():
    d, hidden, time, vocab = 16, 20, 8, 30
    sizes = {"d_model": d, "n_heads": 2, "d_hidden": hidden, "n_ctx": time, "vocab_size": vocab}
    config = LanguageConfig(n_layers=2, mlp="swiglu", attention="softmax", **sizes)
    layer = 4 * d * d + 3 * d * hidden
    products = 2 * time * (2 * layer + d * vocab) + 2 * 4 * time * time * d
    assert compare.count_operations(config) == products


def test_finished_trainings_are_used_again(tmp_path, monkeypatch):
    configs = variants(small_config(), ["swiglu", "bilinear"], ["softmax"])
    how = (configs, small_corpus(), TRAINING, tmp_path, (0, 1))
    once = compare.train_all(*how)
    for losses in (part["loss"].tolist() for single in once for part in single.curves):
        assert losses[-1] <= 4.27 < min(losses[:-1])
    monkeypatch.setattr("bilens.train.trainer.ResumableTrainer", None)
    for single, other in zip(once, compare.train_all(*how), strict=True):
        assert all(a.equals(b) for a, b in zip(single.curves, other.curves, strict=True))


def test_the_recipe_has_a_row_for_each_architecture(tmp_path, monkeypatch):
    sizes = LanguageSettings(d_model=16, n_heads=2, d_hidden=20, n_ctx=8)
    monkeypatch.setitem(PRESETS, "grammar", Preset(sizes, TRAINING))

    def choose(self, small, paper):
        return 4.27 if isinstance(small, float) else small  # a target that is easily reached

    monkeypatch.setattr(RecipeContext, "choose", choose)
    monkeypatch.setattr(RecipeContext, "corpus", lambda *_: small_corpus())
    outcome = check_outcome(compare.run(RecipeContext("small", tmp_path)), {"steps", "seconds"})
    rows = outcome.numbers["architectures"]
    names = [row["architecture"] for row in rows]
    assert names[:4] == [f"{mlp}-{a}-20" for mlp in compare.MLPS for a in compare.ATTENTIONS]
    # Bilinear attention has more parameters, and comes again with fewer hidden units; a ReLU
    # without a gate has fewer, and comes with more.
    assert [name.rpartition("-")[0] for name in names[4:]] == [
        "swiglu-bilinear",
        "bilinear-bilinear",
        "relu-softmax",
        "swiglu-differential",
    ]
    assert max(row["parameters"] for row in rows[4:]) - rows[0]["parameters"] <= 3 * 16
    assert [row.value for row in outcome.rows] == [row["ratio of steps"] for row in rows[1:]]
