"""Annealing: beta follows its schedule, also when resumed, and the model ends bilinear."""

import json
from dataclasses import replace

import datasets
import pytest
import torch
from transformers import LlamaForCausalLM

from bilens.convert import open_model
from bilens.convert.gates import find_swish
from bilens.data import Corpus
from bilens.errors import BilensError, CheckpointError
from bilens.train import trainer as module
from bilens.train.linearise import anneal
from bilens.train.settings import SCHEDULES, AnnealTraining
from tests.families import EACH_GATED, VOCAB, tiny
from tests.models import check_same_model, toy_tokenizer
from tests.train.runs import check_same_weights, column, ctrl_c, lines, run_of, weights

TRAINING = AnnealTraining(
    tokens=8 * 4 * 8,
    length=8,
    batch_size=4,
    learning_rate=1e-3,
    log_every=1,
    save_every=2,
    evaluate_every=4,
)


def corpus():
    rows = torch.randint(3, VOCAB, (40, 8), generator=torch.Generator().manual_seed(0)).tolist()
    parts = [datasets.Dataset.from_dict({"input_ids": part}) for part in (rows, rows[:8])]
    train, validation = (part.with_format("torch") for part in parts)
    return Corpus("toys", toy_tokenizer(), train, validation)


def fresh(name="llama"):
    return tiny(name, dtype=torch.float32).requires_grad_()


def run_anneal(run, training=TRAINING, model=None, **how):
    model = fresh() if model is None else model
    return model, anneal(model, corpus(), training, run, use_cpu=True, **how)


def betas(history):
    return column(history, "beta", beside="loss")


annealed = run_of(run_anneal)


@pytest.mark.parametrize("name", EACH_GATED)
def test_beta_falls_over_the_training_and_is_saved_with_the_model(name, tmp_path):
    start = 1.702 if name.startswith("gemma") else 1.0
    model, history = run_anneal(tmp_path, model=fresh(name))
    assert betas(history) == pytest.approx([start * (1 - k / 8) for k in range(1, 9)])
    assert column(history, "beta", beside="eval_loss") == pytest.approx([start / 2, 0])
    assert find_swish(model.config) == 0
    check_same_model(open_model(tmp_path), model)
    assert lines(tmp_path) == history


COSINE = [1, 0.8535533906, 0.5, 0.1464466094]


@pytest.mark.parametrize(("name", "expected"), [("cosine", [*COSINE, 0]), ("held", [1] * 5)])
def test_the_other_schedules(name, expected):
    remaining = [SCHEDULES[name](progress) for progress in (0, 0.25, 0.5, 0.75, 1)]
    assert remaining == pytest.approx(expected)


def test_zero_is_bilinear_in_the_first_step(tmp_path, monkeypatch):
    seen, collate = [], module.collate
    monkeypatch.setattr(module, "collate", lambda rows: seen.append(rows) or collate(rows))
    _, history = run_anneal(tmp_path, replace(TRAINING, schedule="zero", tokens=64))
    assert betas(history) == [0, 0]
    plain = fresh()
    for layer in plain.model.layers:
        layer.mlp.act_fn = torch.nn.Identity()
        layer.mlp.gate_proj.weight.data /= 2
    assert history[0]["loss"] == pytest.approx(plain(**collate(seen[0])).loss.item(), abs=1e-4)


def test_a_schedule_of_ones_own_and_training_after_the_fall(tmp_path):
    training = replace(TRAINING, annealing=0.5)
    _, history = run_anneal(tmp_path, training, schedule=lambda progress: (1 - progress) ** 2)
    assert betas(history) == pytest.approx([9 / 16, 1 / 4, 1 / 16, 0, 0, 0, 0, 0])


def test_a_stopped_annealing_goes_on_as_if_it_never_stopped(tmp_path, annealed):
    with ctrl_c(module, "collate", 5):
        run_anneal(tmp_path)
    assert not (tmp_path / "model.safetensors").exists()
    _, parts = run_anneal(tmp_path, resume=True)
    assert betas(parts) == betas(annealed[2])
    check_same_weights(tmp_path, annealed[0])


def test_a_checkpoint_knows_its_beta_and_plain_transformers_refuses_it(annealed):
    checkpoint = annealed[0] / "checkpoints" / "checkpoint-6"
    settings = json.loads((checkpoint / "config.json").read_text())
    assert settings["hidden_act"].startswith("swish on its way to a line: bilens.load opens")
    assert settings["bilens_swish"] == {"was": "silu", "beta": 0.25}
    assert open_model(checkpoint).model.layers[0].mlp.act_fn.beta == 0.25
    with pytest.raises(KeyError, match="bilens.load opens this model"):
        LlamaForCausalLM.from_pretrained(checkpoint)


def test_further_training_stays_bilinear(tmp_path, annealed):
    _, history = run_anneal(tmp_path, replace(TRAINING, tokens=64), open_model(annealed[0]))
    assert betas(history) == [0, 0]


def test_texts_of_several_lengths_are_padded_without_loss():
    short, long = torch.tensor([5, 6]), torch.tensor([7, 8, 9])
    made = module.collate([{"input_ids": short}, {"input_ids": long}])
    assert made["labels"].tolist() == [[5, 6, -100], [7, 8, 9]]
    assert made["input_ids"].tolist() == [[5, 6, 0], [7, 8, 9]]


def test_checkpointing_and_accumulation_change_no_step(tmp_path, annealed):
    run_anneal(tmp_path, replace(TRAINING, checkpointing=True, accumulate=2))
    torch.testing.assert_close(weights(tmp_path), weights(annealed[0]), rtol=1e-3, atol=1e-4)


def test_a_finished_annealing_is_bilinear_when_it_is_opened_again(annealed):
    run, model, history = annealed
    again, same = run_anneal(run, resume=True)
    assert same == history
    assert find_swish(again.config) == 0
    check_same_model(again, model)


def test_a_corpus_that_does_not_fit_is_refused(tmp_path):
    model = fresh()
    model.config.vocab_size = 5
    with pytest.raises(BilensError, match="tokenizer of toys has 30 tokens; the model has vocab_s"):
        run_anneal(tmp_path, model=model)


def test_nan_weights_are_named_before_any_training(tmp_path):
    model = fresh()
    model.model.norm.weight.data[3] = torch.nan
    with pytest.raises(CheckpointError, match="model.norm.weight holds NaN or infinite values"):
        run_anneal(tmp_path, model=model)
    assert list(tmp_path.iterdir()) == []


LINEAR = {"warmup": 0.25, "decay": "linear"}, [0, 1, 2 / 3, 1 / 3]


@pytest.mark.parametrize(
    ("how", "expected"), [({}, [1] * 4), LINEAR, ({"decay": "cosine"}, COSINE)]
)
def test_the_learning_rate(how, expected, tmp_path):
    _, history = run_anneal(tmp_path, replace(TRAINING, tokens=4 * 32, **how))
    rates = column(history, "learning_rate", beside="loss")
    assert rates == pytest.approx([1e-3 * rate for rate in expected])


def test_the_defaults_are_those_of_the_paper():
    training = AnnealTraining()
    assert (training.learning_rate, training.batch_size, training.length) == (3e-6, 8, 512)
    assert (training.weight_decay, training.decay) == (0, "none")
    assert training.steps == 105_000_000 // 4096
