"""Training through the Trainer: its files, resumed runs, and several processes."""

import json
import signal
from dataclasses import replace
from typing import get_args

import pytest
import torch
from transformers import AutoTokenizer, PreTrainedTokenizerFast

import bilens
from bilens.errors import BilensError, CheckpointError
from bilens.nn.language import LanguageModel
from bilens.train import trainer
from bilens.train.language import train_language
from bilens.train.run_directory import read_metrics, read_training
from bilens.train.settings import PRESETS, LanguageTraining, PresetName
from tests.models import check_same_model, small_config, small_corpus
from tests.nightly import nightly
from tests.refusals import refused
from tests.train.runs import (
    check_same_weights,
    column,
    ctrl_c,
    lines,
    run_of,
    timeless,
    times,
    weights,
)

TRAINING = LanguageTraining(
    epochs=2, batch_size=8, learning_rate=1e-2, save_every=4, log_every=1, warmup=0.2
)


def train(run, training=TRAINING, config=None, **how):
    config = config or small_config()
    return train_language(config, small_corpus(), training, run, use_cpu=True, **how)


trained = run_of(train)


def test_a_run_holds_the_model_its_tokenizer_and_its_metrics(trained):
    run, model, history = trained
    losses = column(history, "loss")
    assert len(losses) == 10
    assert history[-1]["eval_loss"] < losses[-1] < losses[0]
    assert lines(run) == history
    assert json.loads((run / "training.json").read_text())["data"] == "grammar"
    assert isinstance(AutoTokenizer.from_pretrained(run), PreTrainedTokenizerFast)
    assert model.config.bos_token_id == small_corpus().tokenizer.bos_token_id
    assert torch.equal(weights(run)["embed.weight"], model.W_E)
    assert [path.name for path in run.glob(".*")] == [".lock"]


def test_the_schedule_falls_linearly_after_the_warmup(trained):
    expected = [1e-2 * rate for rate in (0, 0.5, 1, *(1 - i / 8 for i in range(1, 8)))]
    assert column(trained[2], "learning_rate", beside="loss") == pytest.approx(expected)


def test_the_command_offers_every_preset():
    assert get_args(PresetName) == tuple(PRESETS)


def test_muon_trains_by_the_same_schedule(tmp_path):
    model, history = train(tmp_path, replace(TRAINING, optimizer="muon"))
    losses = column(history, "loss")
    assert losses[-1] < losses[0]
    # The first step has no learning rate yet, so one step more changes nothing.
    start, _ = train(tmp_path / "one", replace(TRAINING, optimizer="muon", epochs=0.2, warmup=0.9))
    torch.manual_seed(TRAINING.seed)
    fresh = LanguageModel(start.config)
    assert all(map(torch.equal, start.parameters(), fresh.parameters()))
    assert not torch.equal(model.W_E, fresh.W_E)


def test_validations_come_when_asked_for(tmp_path):
    _, history = train(tmp_path, replace(TRAINING, evaluate_every=4, evaluate_texts=3))
    assert column(history, "step", beside="eval_loss") == [4, 8, 10]
    ids = small_corpus().validation[:3]["input_ids"]
    loss = float(bilens.load(tmp_path).model(ids, labels=ids).loss)
    assert loss == pytest.approx(column(history, "eval_loss")[-1], rel=1e-5)


def test_a_training_ends_at_its_target(tmp_path):
    _, full = train(tmp_path / "whole", replace(TRAINING, evaluate_every=2))
    losses = column(full, "eval_loss")
    _, history = train(tmp_path / "cut", replace(TRAINING, evaluate_every=2, target_loss=losses[2]))
    assert column(history, "eval_loss") == losses[:3]
    assert (tmp_path / "cut" / "model.safetensors").is_file()


def test_the_clock_leaves_validations_out_and_counts_on(tmp_path, monkeypatch):
    """Let time pass only with batches, a second each, also in validation."""
    training, now, collate = replace(TRAINING, evaluate_every=2), [0], trainer.collate

    def pass_time(rows):
        now[0] += 1
        if now[0] == 8:
            signal.raise_signal(signal.SIGINT)
        return collate(rows)

    monkeypatch.setattr("bilens.train.trainer.time.perf_counter", lambda: now[0])
    monkeypatch.setattr(trainer, "collate", pass_time)
    with pytest.raises(KeyboardInterrupt):
        train(tmp_path, training)
    _, history = train(tmp_path, training, resume=True)
    steps, seconds = (column(history, name, beside="eval_loss") for name in ("step", "seconds"))
    assert steps == [2, 4, 6, 8, 10]
    # The next batch is fetched before a step: one batch ahead, and once more after the stop.
    assert all(0 <= after - step <= 2 for step, after in zip(steps, seconds, strict=True))


def test_the_order_of_texts_depends_on_the_seed_alone(tmp_path, monkeypatch):
    orders, collate = [], trainer.collate

    def note(rows):
        orders[-1].append(torch.stack([row["input_ids"] for row in rows]))
        return collate(rows)

    monkeypatch.setattr(trainer, "collate", note)
    other = small_config(mlp="swiglu", attention="bilinear", n_layers=3)
    for number, (seed, config) in enumerate(((0, None), (0, other), (1, None))):
        orders.append([])
        train(tmp_path / str(number), replace(TRAINING, epochs=1, seed=seed), config)
    assert all(torch.equal(a, b) for a, b in zip(orders[0], orders[1], strict=True))
    assert not torch.equal(orders[0][0], orders[2][0])


def test_a_finished_training_is_not_trained_on(trained, caplog):
    run, model, history = trained
    before = times(run)
    again, same = train(run, resume=True)
    assert f"{run} is finished: nothing is left to train" in caplog.text
    assert same == history
    check_same_model(again, model)
    assert before.items() <= times(run).items()


def test_metrics_are_written_as_they_come(tmp_path, monkeypatch):
    """At each record the file holds it and all before it."""
    seen, collate = [], trainer.collate

    def read(rows):
        if (tmp_path / "metrics.jsonl").exists():
            seen.append(len(read_metrics(tmp_path)))
        return collate(rows)

    monkeypatch.setattr(trainer, "collate", read)
    _, history = train(tmp_path, replace(TRAINING, evaluate_every=100))
    assert len(history) == 11
    assert seen == sorted(seen)
    assert len(set(seen)) >= 8


PARTS = [(0.3, 2), (1.5, 8)]


@pytest.mark.parametrize(("epochs", "steps"), nightly([*PARTS, (0.2, 1)], PARTS))
def test_a_part_of_a_pass_has_no_step_too_many(tmp_path, epochs, steps):
    training = replace(TRAINING, epochs=epochs, save_every=1)
    _, history = train(tmp_path, training)
    assert max(column(history, "step")) == history[-1]["step"] == steps
    assert "eval_loss" in history[-1]
    _, again = train(tmp_path, training, resume=True)
    assert again == history


def test_a_stopped_training_goes_on_as_if_it_never_stopped(tmp_path):
    """Also the momentum of Muon, and the sizes that a scalar norm has measured."""
    training, config = replace(TRAINING, optimizer="muon", log_every=3), small_config(norm="scalar")
    full, parts = tmp_path / "full", tmp_path / "parts"
    train(full, training, config)
    with ctrl_c(trainer, "collate", 7):
        train(parts, training, config)
    assert not (parts / "model.safetensors").exists()
    train(parts, training, config, resume=True)
    check_same_weights(full, parts)
    assert timeless(read_metrics(parts)) == timeless(read_metrics(full))


def test_accumulated_steps_are_one_step(tmp_path, trained):
    train(tmp_path, replace(TRAINING, accumulate=4))
    torch.testing.assert_close(weights(trained[0]), weights(tmp_path), rtol=1e-3, atol=1e-4)


def resumed(*config, **changed):
    return lambda trained: train(trained[0], replace(TRAINING, **changed), *config, resume=True)


RESUMED = {
    "Nothing to resume in .* Train without --resume": lambda tmp_path: train(tmp_path, resume=True),
    "holds training.json .* already.*resume=True": lambda trained: train(trained[0]),
    "with learning_rate=0.01, not learning_rate=0.1": resumed(learning_rate=0.1),
    "with d_hidden=20, not d_hidden=24. Resume with": resumed(small_config(d_hidden=24)),
}
test_there_has_to_be_something_to_resume = refused(RESUMED, CheckpointError)
DIVERGENCES = {
    "logged": ({}, {}),
    "never logged": ({"log_every": 100, "epochs": 0.2}, {}),
    "saved before it is logged": ({"log_every": 100, "save_every": 1}, {}),
    "at once": ({}, {"attention_scale": 1e30, "attention": "bilinear"}),
}


@pytest.mark.parametrize(("how", "attention"), DIVERGENCES.values(), ids=DIVERGENCES)
def test_divergence_is_an_error_and_saves_no_model(tmp_path, how, attention):
    training = replace(TRAINING, **{"learning_rate": 1e12, "warmup": 0, "optimizer": "sgd", **how})
    with pytest.raises(BilensError, match=r"(The loss|The weights) became .*; lower learning_rate"):
        train(tmp_path, training, small_config(**attention))
    assert not (tmp_path / "model.safetensors").exists()
    assert not read_training(tmp_path)["finished"]


def test_a_loss_far_above_that_of_a_uniform_guess_stops_the_training(tmp_path):
    """A finite loss of thousands: the training goes nowhere, and said nothing."""
    with pytest.raises(BilensError, match=r"where a uniform guess has [\d.]+, by step \d+; lower"):
        train(tmp_path, replace(TRAINING, learning_rate=30, warmup=0))
    assert not read_training(tmp_path)["finished"]


def test_float16_is_refused_before_anything_is_read(tmp_path):
    training = replace(TRAINING, precision="fp16")
    with pytest.raises(BilensError, match="precision='fp16' with attention=.*expected precision="):
        train_language(small_config(attention="squared"), None, training, tmp_path, use_cpu=True)
    with pytest.raises(BilensError, match="precision='fp16' needs a GPU; expected 'bf16' or 'floa"):
        train(tmp_path, training)
    assert list(tmp_path.iterdir()) == []
