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
from tests.train.runs import check_same_weights, press_ctrl_c, times, weights

TRAINING = LanguageTraining(
    epochs=2, batch_size=8, learning_rate=1e-2, save_every=4, log_every=1, warmup=0.2
)


def train(run, training=TRAINING, config=None, corpus=None, **how):
    config, corpus = config or small_config(), corpus or small_corpus()
    return train_language(config, corpus, training, run, use_cpu=True, **how)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Return a read-only run of all defaults: its folder, model and history."""
    run = tmp_path_factory.mktemp("trained")
    return run, *train(run)


def test_a_run_holds_the_model_its_tokenizer_and_its_metrics(trained):
    run, model, history = trained
    losses = [record["loss"] for record in history if "loss" in record]
    assert len(losses) == 10
    assert history[-1]["eval_loss"] < losses[-1] < losses[0]
    lines = (run / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line) for line in lines] == history
    assert json.loads((run / "training.json").read_text())["data"] == "grammar"
    assert isinstance(AutoTokenizer.from_pretrained(run), PreTrainedTokenizerFast)
    assert model.config.bos_token_id == small_corpus().tokenizer.bos_token_id
    assert torch.equal(weights(run)["embed.weight"], model.W_E)
    assert [path.name for path in run.glob(".*")] == [".lock"]


def test_the_schedule_falls_linearly_after_the_warmup(trained):
    rates = [record["learning_rate"] for record in trained[2] if "loss" in record]
    expected = [0, 0.5, 1, *(1 - i / 8 for i in range(1, 8))]
    assert rates == pytest.approx([1e-2 * rate for rate in expected])


def test_the_command_offers_every_preset():
    assert get_args(PresetName) == tuple(PRESETS)


def test_muon_trains_by_the_same_schedule(tmp_path):
    model, history = train(tmp_path, replace(TRAINING, optimizer="muon"))
    losses = [record["loss"] for record in history if "loss" in record]
    assert losses[-1] < losses[0]
    # The first step has no learning rate yet, so one step more changes nothing.
    start, _ = train(tmp_path / "one", replace(TRAINING, optimizer="muon", epochs=0.2, warmup=0.9))
    torch.manual_seed(TRAINING.seed)
    fresh = LanguageModel(start.config)
    pairs = zip(start.parameters(), fresh.parameters(), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)
    assert not torch.equal(model.W_E, fresh.W_E)


def test_validations_come_when_asked_for(tmp_path):
    _, history = train(tmp_path, replace(TRAINING, evaluate_every=4, evaluate_texts=3))
    assert [record["step"] for record in history if "eval_loss" in record] == [4, 8, 10]
    model, corpus = bilens.load(tmp_path).model, small_corpus()
    ids = corpus.validation[:3]["input_ids"]
    last = [record["eval_loss"] for record in history if "eval_loss" in record][-1]
    assert float(model(ids, labels=ids).loss) == pytest.approx(last, rel=1e-5)


def test_a_training_ends_at_its_target(tmp_path):
    _, full = train(tmp_path / "whole", replace(TRAINING, evaluate_every=2))
    losses = [record["eval_loss"] for record in full if "eval_loss" in record]
    training = replace(TRAINING, evaluate_every=2, target_loss=losses[2])
    _, history = train(tmp_path / "part", training)
    assert [r["eval_loss"] for r in history if "eval_loss" in r] == losses[:3]
    assert (tmp_path / "part" / "model.safetensors").is_file()


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
    result = {record["step"]: record["seconds"] for record in history if "eval_loss" in record}
    assert list(result) == [2, 4, 6, 8, 10]
    # The next batch is fetched before a step: one batch ahead, and once more after the stop.
    assert all(0 <= seconds - step <= 2 for step, seconds in result.items())


def test_the_order_of_texts_depends_on_the_seed_alone(tmp_path, monkeypatch):
    orders, collate = [], trainer.collate

    def note(rows):
        orders[-1].append(torch.stack([row["input_ids"] for row in rows]))
        return collate(rows)

    monkeypatch.setattr(trainer, "collate", note)
    training = replace(TRAINING, epochs=1)
    other = small_config(mlp="swiglu", attention="bilinear", n_layers=3)
    for number, (seed, config) in enumerate(((0, None), (0, other), (1, None))):
        orders.append([])
        train(tmp_path / str(number), replace(training, seed=seed), config)
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
    with pytest.raises(CheckpointError, match="holds training.json .* already.*--resume"):
        train(run)


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


@pytest.mark.parametrize(
    ("epochs", "steps"), nightly([(0.3, 2), (0.2, 1), (1.5, 8)], [(0.3, 2), (1.5, 8)])
)
def test_a_part_of_a_pass_has_no_step_too_many(tmp_path, epochs, steps):
    training = replace(TRAINING, epochs=epochs, save_every=1)
    _, history = train(tmp_path, training)
    assert max(record["step"] for record in history) == steps
    assert history[-1]["step"] == steps
    assert "eval_loss" in history[-1]
    _, again = train(tmp_path, training, resume=True)
    assert again == history


def test_a_stopped_training_goes_on_as_if_it_never_stopped(tmp_path, monkeypatch):
    """Also the momentum of Muon, and the sizes that a scalar norm has measured."""
    training, config = replace(TRAINING, optimizer="muon", log_every=3), small_config(norm="scalar")
    full, parts = tmp_path / "full", tmp_path / "parts"
    train(full, training, config)
    with monkeypatch.context() as patch:
        press_ctrl_c(patch, trainer, "collate", 7)
        with pytest.raises(KeyboardInterrupt):
            train(parts, training, config)
    assert not (parts / "model.safetensors").exists()
    train(parts, training, config, resume=True)
    check_same_weights(full, parts)
    expected, records = (
        [{k: v for k, v in record.items() if k != "seconds"} for record in read_metrics(run)]
        for run in (full, parts)
    )
    assert records == expected


def test_accumulated_steps_are_one_step(tmp_path, trained):
    train(tmp_path, replace(TRAINING, accumulate=4))
    torch.testing.assert_close(weights(trained[0]), weights(tmp_path), rtol=1e-3, atol=1e-4)


def test_there_has_to_be_something_to_resume(tmp_path, trained):
    with pytest.raises(CheckpointError, match="Nothing to resume in .* Train without --resume"):
        train(tmp_path, resume=True)
    run = trained[0]
    with pytest.raises(CheckpointError, match="with learning_rate=0.01, not learning_rate=0.1"):
        train(run, replace(TRAINING, learning_rate=0.1), resume=True)
    with pytest.raises(CheckpointError, match=r"with d_hidden=20, not d_hidden=24. Resume with"):
        train(run, config=small_config(d_hidden=24), resume=True)


@pytest.mark.parametrize(
    ("how", "attention"),
    [
        ({}, {}),
        ({"log_every": 100, "epochs": 0.2}, {}),
        ({"log_every": 100, "save_every": 1}, {}),
        ({}, {"attention_scale": 1e30, "attention": "bilinear"}),
    ],
    ids=["logged", "never logged", "saved before it is logged", "at once"],
)
def test_divergence_is_an_error_and_saves_no_model(tmp_path, how, attention):
    training = replace(TRAINING, **{"learning_rate": 1e12, "warmup": 0, "optimizer": "sgd", **how})
    with pytest.raises(BilensError, match=r"(The loss|The weights) became .*; lower learning_rate"):
        train(tmp_path, training, small_config(**attention))
    assert not (tmp_path / "model.safetensors").exists()
    assert not read_training(tmp_path)["finished"]


def test_a_loss_far_above_that_of_a_uniform_guess_stops_the_training(tmp_path):
    """A finite loss of thousands: the training goes nowhere, and said nothing."""
    training = replace(TRAINING, learning_rate=30, warmup=0)
    with pytest.raises(BilensError, match=r"where a uniform guess has [\d.]+, by step \d+; lower"):
        train(tmp_path, training)
    assert not read_training(tmp_path)["finished"]


def test_float16_is_refused_before_anything_is_read(tmp_path):
    training = replace(TRAINING, precision="fp16")
    with pytest.raises(BilensError, match="precision='fp16' with attention=.*expected precision="):
        train_language(small_config(attention="squared"), None, training, tmp_path, use_cpu=True)
    with pytest.raises(BilensError, match="precision='fp16' needs a GPU; expected 'bf16' or 'floa"):
        train(tmp_path, training)
    assert list(tmp_path.iterdir()) == []
