import json
import os
import re
import signal
from dataclasses import replace

import pytest
import torch

import bilens
from bilens.errors import BilensError, CheckpointError
from bilens.nn import ClassifierConfig, ImageClassifier
from bilens.train import ClassifierTraining, classifier, train_classifier, train_classifiers
from bilens.train.classifier import add_noise, initialised, latent_noise
from bilens.train.run_directory import RunDirectory, interrupt_between_steps
from tests.models import GENTLE, digits
from tests.nightly import nightly
from tests.refusals import refused
from tests.train.runs import column, ctrl_c, lines, run_of, timeless, times

CONFIG = ClassifierConfig(64, 10, d_model=24, image_shape=(8, 8))
BRIEF = ClassifierTraining(epochs=3, input_noise=0.5, latent_noise=0.1, batch_size=64)
STEP = classifier._ClassifierSession, "take_step"


def train(run=None, training=BRIEF, config=CONFIG, **how):
    return train_classifier(config, digits(), training, run, **how)


trained = run_of(train)


def same_weights(a: ImageClassifier, b: ImageClassifier) -> bool:
    ours, theirs = a.state_dict(), b.state_dict()
    return ours.keys() == theirs.keys() and all(map(torch.equal, ours.values(), theirs.values()))


def test_it_learns():
    model, history = train(training=GENTLE)
    assert history[-1]["test_accuracy"] > 0.9
    assert history[-1]["train_loss"] < history[0]["train_loss"] / 2
    accuracy = model.accuracy(digits().test_images, digits().test_labels)
    assert accuracy == history[-1]["test_accuracy"]
    assert not model.training


def test_the_seed_decides(trained):
    _, model, history = trained
    again, same = train()
    other, _ = train(training=replace(BRIEF, seed=1))
    assert same_weights(model, again)
    assert timeless(history) == timeless(same)
    assert not same_weights(model, other)


def test_a_run_holds_what_is_needed(trained):
    run, model, history = trained
    assert same_weights(bilens.load(run), model)
    assert lines(run) == history
    assert json.loads((run / "training.json").read_text())["data"] == "digits"
    files = ["README.md", "config.json", "metrics.jsonl", "model.safetensors", "training.json"]
    assert {path.name for path in run.iterdir()} - {".lock"} == {*files, "checkpoints"}


@pytest.mark.parametrize("steps", nightly([1, 10, 23, 40], [23, 40]))
def test_ctrl_c_then_resume_ends_as_an_uninterrupted_run(trained, tmp_path, steps):
    _, straight, expected = trained
    with ctrl_c(*STEP, steps):
        train(tmp_path)
    assert not same_weights(bilens.load(tmp_path), straight)
    resumed, history = train(tmp_path, resume=True)
    assert same_weights(resumed, straight)
    assert timeless(history) == timeless(expected)
    assert same_weights(bilens.load(tmp_path), straight)


def test_resume_adds_epochs(tmp_path):
    longer = replace(BRIEF, epochs=5)
    straight, _ = train(training=longer)
    train(tmp_path)
    resumed, history = train(tmp_path, longer, resume=True)
    assert same_weights(resumed, straight)
    assert column(history, "epoch") == [1, 2, 3, 4, 5]


def test_a_second_ctrl_c_does_not_wait():
    with pytest.raises(KeyboardInterrupt), interrupt_between_steps() as interrupt:
        os.kill(os.getpid(), signal.SIGINT)
        assert interrupt.is_set()
        os.kill(os.getpid(), signal.SIGINT)


def resumed(*config, **changed):
    return lambda trained: train(trained[0], replace(BRIEF, **changed), *config, resume=True)


RESUMED = {
    "Nothing to resume.*Train without --resume": lambda tmp_path: train(tmp_path, resume=True),
    "with weight_decay=0.5, not weight_decay=0.1": resumed(weight_decay=0.1),
    r"epochs=3, not epochs=1. .* \(only epochs may grow": resumed(epochs=1),
    "bias=False, d_model=24, not bias=True, d_model=25": resumed(
        replace(CONFIG, d_model=25, bias=True)
    ),
}
test_resume_refuses_other_settings = refused(RESUMED, CheckpointError)


def test_a_finished_run_stays_as_it_is(trained, caplog):
    run, model, history = trained
    before = times(run)
    message = "holds training.json and config.json and .* already.*resume=True.*--out"
    with pytest.raises(CheckpointError, match=message):
        train(run)
    again, same = train(run, resume=True)
    assert f"{run} is finished: nothing is left to train" in caplog.text
    assert same_weights(model, again)
    assert same == history
    assert before.items() <= times(run).items()


@pytest.mark.parametrize("rate", [1e6, 1e12])
def test_divergence_is_an_error_and_saves_no_model(tmp_path, rate):
    """At the higher rate the one step of the training has a finite loss still."""
    wild = ClassifierTraining(epochs=1, learning_rate=rate, batch_size=2000 if rate > 1e9 else 64)
    with pytest.raises(BilensError, match=r"loss became infinite or NaN in epoch 1 of seed 0"):
        train(tmp_path, wild)
    assert not (tmp_path / "model.safetensors").exists()
    assert not (tmp_path / "checkpoints").exists()


def test_noise_is_scaled_to_each_vector():
    x = torch.stack([torch.linspace(0, 1, 4000), torch.linspace(0, 10, 4000)])
    noise = add_noise(x, 0.5, torch.Generator().manual_seed(0)) - x
    assert torch.allclose(noise.std(dim=-1) / x.std(dim=-1), torch.full((2,), 0.5), rtol=0.05)
    assert noise.mean(-1).abs().max() < 0.2


def test_where_the_noise_goes():
    torch.manual_seed(0)
    model, x = ImageClassifier(ClassifierConfig(16, 3, 8, n_layers=2)), torch.rand(2, 16)
    clean, seen = model(x), []
    for part in (model.embed, *model.layers, model.unembed):
        part.register_forward_hook(lambda part, inputs, output: seen.append((inputs[0], output)))
    with latent_noise(model, 0.3, torch.Generator().manual_seed(1)):
        model(x)
        plain = [output for _, output in seen[:3]]
        torch.testing.assert_close(model.eval()(x), clean)
    torch.testing.assert_close(model.train()(x), clean)
    generator = torch.Generator().manual_seed(1)
    for given, (met, _) in zip([x, *plain], seen[:4], strict=True):
        torch.testing.assert_close(met, add_noise(given, 0.3, generator))


def test_the_state_has_no_pickle(trained):
    record, state = RunDirectory(trained[0], {}).load_state(torch.device("cpu"))
    assert record["epoch"] == 3
    parts = {"model.embed.weight", "optimizer.embed.weight.exp_avg", "generator.state"}
    assert parts <= state.keys()


DEEP = {"n_layers": 2, "bias": True, "residual": True, "d_hidden": 30}


@pytest.mark.parametrize("parts", [DEEP, {"norm": "rms", "gate": "silu"}])
def test_every_kind_of_model_trains(parts):
    config = replace(CONFIG, d_model=12, **parts)
    _, history = train(training=replace(BRIEF, epochs=2), config=config)
    assert history[1]["train_loss"] < history[0]["train_loss"]


def test_three_layers_do_not_begin_at_zero():
    """Sizes of maps multiply: with torch's own initialisation these logits are 1e-8."""
    for seed in range(3):
        start = initialised(replace(CONFIG, d_model=100, n_layers=3), seed)
        assert 1e-4 < start(digits().train_images).std() < 1


def test_one_layer_begins_as_maps_of_torch():
    start = initialised(CONFIG, seed=0).embed.weight
    assert start.abs().max() <= 64**-0.5
    assert torch.allclose(start.std(), torch.nn.Linear(64, 24).weight.std(), rtol=0.05)


def test_a_model_at_chance_is_reported(caplog):
    shuffled = replace(digits(), test_labels=digits().test_labels.sort().values)
    train_classifier(CONFIG, shuffled, replace(BRIEF, epochs=1))
    assert re.search(
        r"^Test accuracy .* cannot be told from chance with 360 images \(always '\d' has 10.28%\). "
        r"Train for more than these 23 steps \(epochs=1, batch_size=64\), with a slower decay \(0",
        caplog.messages[-1],
    )
    caplog.clear()
    train(training=replace(GENTLE, epochs=4))
    assert "chance" not in caplog.text


def test_the_repr_is_one_line():
    assert repr(ImageClassifier(CONFIG)) == (
        "ImageClassifier(8x8 pixels, 1 layer of width 24, 10 classes, 2,928 parameters, float32 on "
        "cpu)"
    )


@pytest.mark.parametrize(("steps", "norm"), [(1, "none"), (80, "scalar")])
def test_seeds_are_stopped_and_resumed(tmp_path, steps, norm):
    config = replace(CONFIG, norm=norm)
    straight = [train(training=replace(BRIEF, seed=seed), config=config) for seed in (0, 1)]
    with ctrl_c(*STEP, steps):
        train_classifiers(config, digits(), BRIEF, [0, 1], tmp_path)
    resumed = train_classifiers(config, digits(), BRIEF, [0, 1], tmp_path, resume=True)
    for (a, single), (b, other) in zip(straight, resumed, strict=True):
        assert same_weights(a, b)
        assert timeless(single) == timeless(other)
    with pytest.raises(CheckpointError, match="seed-1 holds training.json"):
        train_classifiers(config, digits(), BRIEF, [2, 1], tmp_path)
    assert not (tmp_path / "seed-2").exists()
    with pytest.raises(CheckpointError, match="Nothing to resume in .*none of these seeds"):
        train_classifiers(config, digits(), BRIEF, [8, 9], tmp_path, resume=True)
