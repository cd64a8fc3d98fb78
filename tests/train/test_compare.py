"""Architectures compared: equal conditions, saved results, and the cost of the target."""

import json
import math
import signal
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bilens.errors import BilensError, CheckpointError
from bilens.nn.language import LanguageConfig, LanguageModel
from bilens.train import is_finished, trainer
from bilens.train.language import (
    Comparison,
    compare_architectures,
    count_parameters,
    of_equal_size,
    variants,
)
from bilens.train.settings import PRESETS, LanguageTraining
from tests.language import small_config, small_corpus

TRAINING = LanguageTraining(
    epochs=2, batch_size=8, learning_rate=1e-2, save_every=3, evaluate_every=2, target_loss=4.27
)
BOTH = (["swiglu", "bilinear"], ["softmax"])


def compare(run, training=TRAINING, configs=None, seeds=(0,), **how):
    configs = variants(small_config(), *BOTH) if configs is None else configs
    corpus = small_corpus()
    return compare_architectures(configs, corpus, training, run, seeds=seeds, use_cpu=True, **how)


def curve(losses, seed=0, mlp="bilinear", pace=0.5):
    steps = 10.0 * np.arange(1, len(losses) + 1)
    about = {"mlp": mlp, "attention": "softmax", "d_hidden": 20, "parameters": 1000, "seed": seed}
    took = {"steps": steps, "tokens": 8 * steps, "seconds": pace * steps, "loss": losses}
    return pd.DataFrame({**about, **took})


def comparison(target, *curves):
    return Comparison("data", target, pd.concat(curves, ignore_index=True))


@pytest.fixture(scope="module")
def compared(tmp_path_factory):
    """Both architectures with two seeds: the folder, the results, and the arguments of `done`."""
    folder, told = tmp_path_factory.mktemp("compared"), []
    return folder, compare(folder, seeds=(0, 1), done=told.append), told


def test_each_goes_with_each():
    config = small_config(qk_norm=True, n_ctx=9)
    result = variants(config, ["swiglu", "bilinear"], ["softmax", "bilinear"])
    assert [(single.mlp, single.attention) for single in result] == [
        ("swiglu", "softmax"),
        ("swiglu", "bilinear"),
        ("bilinear", "softmax"),
        ("bilinear", "bilinear"),
    ]
    assert all(single.qk_norm and single.n_ctx == 9 for single in result)
    with pytest.raises(BilensError, match="mlp='swish', expected one of bilinear, swiglu"):
        variants(config, ["swish"], ["softmax"])


@settings(max_examples=12)
@given(
    st.sampled_from(["bilinear", "swiglu", "relu2"]),
    st.sampled_from(["softmax", "squared", "bilinear", "differential"]),
    st.booleans(),
    st.booleans(),
)
def test_parameters_are_counted_without_a_model(mlp, attention, bias, tied):
    parts = {"mlp": mlp, "attention": attention, "bias": bias, "tie_word_embeddings": tied}
    config = small_config(n_layers=2, norm="rms", **parts)
    full = sum(weight.numel() for weight in LanguageModel(config).parameters())
    assert count_parameters(config) == full


@settings(max_examples=6)
@given(st.integers(40, 200), st.integers(1, 3), st.booleans())
def test_equal_size_is_equal_to_half_a_hidden_unit(hidden, layers, bias):
    config = small_config(d_hidden=hidden, n_layers=layers, bias=bias)
    result = of_equal_size(
        variants(config, ["swiglu", "bilinear", "relu"], ["softmax", "bilinear"])
    )
    goal = count_parameters(result[0])
    assert result[0].d_hidden == result[2].d_hidden == hidden
    for single in result:
        unit = layers * (3 * 16 + 2 * bias if single.mlp != "relu" else 2 * 16 + bias)
        assert abs(count_parameters(single) - goal) <= unit / 2


def test_equal_size_may_be_out_of_reach():
    config = small_config(d_hidden=2)
    with pytest.raises(BilensError, match="equal_parameters: with bilinear MLP and bilinear atten"):
        of_equal_size(variants(config, ["bilinear"], ["softmax", "bilinear"]))


@pytest.mark.parametrize(
    ("attention", "millions"), [("softmax", 498.1), ("bilinear", 545.9), ("differential", 545.9)]
)
def test_the_large_preset_has_half_a_billion_parameters(attention, millions):
    config = LanguageConfig(**{**PRESETS["500m"].model.settings(), "attention": attention})
    assert count_parameters(config) / 1e6 == pytest.approx(millions, abs=0.1)
    assert (config.n_layers, config.n_heads, config.d_model, config.n_ctx) == (18, 9, 1152, 1024)


def test_a_crossing_lies_on_the_line_between_two_validations():
    single = curve([5.0, 4.0, 3.0, 3.5, 2.0])
    for target, expected in (
        (3.25, [27.5, 220.0, 13.75]),
        (4.0, [20.0, 160.0, 10.0]),
        (3.0, [30.0, 240.0, 15.0]),
        (6.0, [10.0, 80.0, 5.0]),
    ):
        result = comparison(target, single).crossings()
        assert result.loc[0, ["steps", "tokens", "seconds"]].tolist() == expected
    assert comparison(1.0, single).crossings()["steps"].isna().all()


def test_costs_are_means_over_seeds_and_ratios_to_the_first():
    first = [curve([4.0, 3.0, 2.0], seed, "swiglu") for seed in (0, 1)]
    other = [curve([4.0, 3.0, 2.5, 2.0], 0, pace=1.0), curve([4.0, 2.0], 1, pace=2.0)]
    single, two = comparison(2.5, *first, *other).summary().itertuples()
    assert (single.mlp, single.reached, single.seeds) == ("swiglu", 2, 2)
    assert (single.steps, single.tokens, single.seconds) == (25, 200, 12.5)
    assert (single.deviation, single.steps_ratio, single.seconds_ratio) == (0, 1, 1)
    assert two.steps == (30 + 17.5) / 2
    assert two.deviation == pytest.approx(12.5 / 2**0.5)
    assert two.steps_ratio == two.steps / 25
    assert two.seconds_ratio == pytest.approx((30 + 35) / 2 / 12.5)
    assert (two.seconds_per_step, two.best) == (1.5, 2.0)


def test_a_missed_target_has_no_cost():
    curves = (curve([4.0, 3.0], 0, "swiglu"), curve([4.0, 2.0], 1, "swiglu"), curve([4.0, 2.0]))
    single, two = comparison(2.5, *curves).summary().itertuples()
    assert (single.reached, single.seeds, single.best) == (1, 2, 2.5)
    assert math.isnan(single.steps)
    assert (two.steps, two.reached) == (17.5, 1)
    assert math.isnan(two.steps_ratio)
    assert math.isnan(two.seconds_ratio)


def test_the_mean_ends_where_the_first_seed_ends():
    both = curve([4.0, 3.0, 2.0], 0), curve([5.0, 4.0], 1), curve([2.0], 0, "relu")
    mean = comparison(2.5, *both).mean_curves()
    assert mean["mlp"].tolist() == ["bilinear", "relu", "bilinear"]
    assert mean["steps"].tolist() == [10, 10, 20]
    assert mean["loss"].tolist() == [4.5, 2.0, 3.5]


def test_architectures_are_trained_as_far_as_the_target(compared):
    run, result, told = compared
    assert pd.concat(told, ignore_index=True).equals(result.validations)
    assert [(single["mlp"].iloc[0], single["seed"].iloc[0]) for single in told] == [
        ("swiglu", 0),
        ("bilinear", 0),
        ("swiglu", 1),
        ("bilinear", 1),
    ]
    assert (result.data, result.target) == ("grammar", 4.27)
    for single in told:
        losses, steps = single["loss"].tolist(), single["steps"].tolist()
        assert losses[-1] <= 4.27 < min(losses[:-1])
        assert steps == [2 * n for n in range(1, len(losses) + 1)]
        assert single["tokens"].tolist() == [8 * 8 * n for n in steps]
        assert set(single["parameters"]) == {count_parameters(small_config())}
        folder = run / f"{single['mlp'].iloc[0]}-softmax-seed{single['seed'].iloc[0]}"
        assert (folder / "model.safetensors").is_file()
        assert not (folder / "checkpoints").exists()
    assert (result.summary()["seconds"] > 0).all()


def test_what_is_finished_is_not_trained_again(compared, monkeypatch):
    run, once, _ = compared
    monkeypatch.setattr("bilens.train.trainer.ResumableTrainer", None)
    assert compare(run, seeds=(0, 1)).validations.equals(once.validations)


def test_a_stopped_comparison_goes_on(tmp_path, monkeypatch):
    full = compare(tmp_path / "whole", replace(TRAINING, target_loss=0.1))
    calls, collate = [], trainer.collate

    def press(rows):
        calls.append(0)
        if len(calls) == 10 + 5 * 2 + 5:  # in the second training, among its validations
            signal.raise_signal(signal.SIGINT)
        return collate(rows)

    with monkeypatch.context() as patch:
        patch.setattr(trainer, "collate", press)
        with pytest.raises(KeyboardInterrupt):
            compare(tmp_path / "parts", replace(TRAINING, target_loss=0.1))
    assert is_finished(tmp_path / "parts" / "swiglu-softmax-seed0")
    assert not is_finished(tmp_path / "parts" / "bilinear-softmax-seed0")
    parts = compare(tmp_path / "parts", replace(TRAINING, target_loss=0.1))
    timeless = [single.validations.drop(columns="seconds") for single in (full, parts)]
    assert timeless[0].equals(timeless[1])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"training": replace(TRAINING, target_loss=None)},
            "target_loss=None, expected the validation",
        ),
        ({"configs": []}, r"configs=\[\], expected at least one and none of them twice"),
        ({"seeds": (0, 0)}, r"seeds=\[0, 0\], expected at least one and none of them twice"),
        ({"configs": 2 * [small_config()]}, "configs=.'bilinear-softmax', 'bilinear-softmax'., ex"),
    ],
)
def test_nothing_to_compare_is_an_error(tmp_path, change, message):
    with pytest.raises(BilensError, match=message):
        compare(tmp_path, **change)


def test_other_settings_need_another_folder(compared):
    run, _, _ = compared
    with pytest.raises(
        CheckpointError,
        match="swiglu-softmax-seed0 was trained with batch_size=8, not batch_size=4",
    ):
        compare(run, replace(TRAINING, batch_size=4))
    lines = (run / "swiglu-softmax-seed0" / "metrics.jsonl").read_text().splitlines()
    assert all("seconds" in json.loads(line) for line in lines)
