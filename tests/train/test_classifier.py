import json
import math
import os
import signal
import threading

import pytest
import torch
from safetensors.torch import load_file

import bilens
from bilens.data import ImageData, load_images
from bilens.errors import BilensError, CheckpointError
from bilens.nn import ClassifierConfig, ImageClassifier
from bilens.train import ClassifierTraining, train_classifier
from bilens.train import classifier as module
from bilens.train.noise import add_noise, noisy


@pytest.fixture(scope="session")
def digits() -> ImageData:
    return load_images("digits")


CONFIG = ClassifierConfig(64, 10, d_model=24, image_shape=(8, 8))
GENTLE = ClassifierTraining(epochs=12, batch_size=50, weight_decay=0.0, input_noise=0.2)
BRIEF = ClassifierTraining(epochs=3, input_noise=0.5, latent_noise=0.1, batch_size=64)


def stop_after(monkeypatch, steps: int) -> None:
    """Press ctrl-C in the middle of the given step."""
    taken = module._Session._step

    def counting(self, x, labels):
        counting.steps += 1
        if counting.steps == steps:
            os.kill(os.getpid(), signal.SIGINT)
        taken(self, x, labels)

    counting.steps = 0
    monkeypatch.setattr(module._Session, "_step", counting)


def same_weights(a: ImageClassifier, b: ImageClassifier) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a.parameters(), b.parameters(), strict=True))


def without_time(history):
    return [{k: v for k, v in record.items() if k != "train_seconds"} for record in history]


def test_it_learns(digits):
    model, history = train_classifier(CONFIG, digits, GENTLE)
    assert history[-1]["test_accuracy"] > 0.9
    assert history[-1]["train_loss"] < history[0]["train_loss"] / 2
    assert model.accuracy(digits.test_images, digits.test_labels) == history[-1]["test_accuracy"]
    assert not model.training


def test_the_seed_decides(digits):
    first, one = train_classifier(CONFIG, digits, BRIEF)
    again, two = train_classifier(CONFIG, digits, BRIEF)
    other, _ = train_classifier(CONFIG, digits, ClassifierTraining(**{**vars(BRIEF), "seed": 1}))
    assert same_weights(first, again)
    assert without_time(one) == without_time(two)
    assert not same_weights(first, other)


def test_a_run_holds_what_is_needed(digits, tmp_path):
    model, history = train_classifier(CONFIG, digits, BRIEF, tmp_path / "run")
    assert same_weights(bilens.load(tmp_path / "run"), model)
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line) for line in lines] == history
    assert json.loads((tmp_path / "run" / "training.json").read_text())["data"] == "digits"
    assert not [p for p in (tmp_path / "run").iterdir() if p.name.startswith(".")]


@pytest.mark.parametrize("steps", [1, 10, 23, 40])
def test_ctrl_c_then_resume_ends_where_an_uninterrupted_run_ends(
    digits, tmp_path, monkeypatch, steps
):
    straight, expected = train_classifier(CONFIG, digits, BRIEF)
    with monkeypatch.context() as patch:
        stop_after(patch, steps)
        with pytest.raises(KeyboardInterrupt):
            train_classifier(CONFIG, digits, BRIEF, tmp_path)
    stopped = bilens.load(tmp_path)
    assert not same_weights(stopped, straight)
    resumed, history = train_classifier(CONFIG, digits, BRIEF, tmp_path, resume=True)
    assert same_weights(resumed, straight)
    assert without_time(history) == without_time(expected)
    assert same_weights(bilens.load(tmp_path), straight)


def test_resume_adds_epochs(digits, tmp_path):
    longer = ClassifierTraining(**{**vars(BRIEF), "epochs": 5})
    straight, _ = train_classifier(CONFIG, digits, longer)
    train_classifier(CONFIG, digits, BRIEF, tmp_path)
    resumed, history = train_classifier(CONFIG, digits, longer, tmp_path, resume=True)
    assert same_weights(resumed, straight)
    assert [record["epoch"] for record in history] == [1, 2, 3, 4, 5]


def test_a_second_ctrl_c_does_not_wait():
    with pytest.raises(KeyboardInterrupt), module.interrupt_between_steps() as interrupt:
        os.kill(os.getpid(), signal.SIGINT)
        assert interrupt.requested
        os.kill(os.getpid(), signal.SIGINT)


def test_training_in_a_thread(digits):
    outcome = []
    brief = ClassifierTraining(epochs=1)
    thread = threading.Thread(
        target=lambda: outcome.append(train_classifier(CONFIG, digits, brief))
    )
    thread.start()
    thread.join()
    assert len(outcome[0][1]) == 1


def test_resume_refuses_other_settings(digits, tmp_path):
    with pytest.raises(CheckpointError, match="nothing to resume.*Train without --resume"):
        train_classifier(CONFIG, digits, BRIEF, tmp_path, resume=True)
    train_classifier(CONFIG, digits, BRIEF, tmp_path)
    other = ClassifierTraining(**{**vars(BRIEF), "weight_decay": 0.1})
    with pytest.raises(CheckpointError, match="weight_decay=0.5, not 0.1"):
        train_classifier(CONFIG, digits, other, tmp_path, resume=True)
    shorter = ClassifierTraining(**{**vars(BRIEF), "epochs": 1})
    with pytest.raises(CheckpointError, match="epochs=3, not 1"):
        train_classifier(CONFIG, digits, shorter, tmp_path, resume=True)
    (tmp_path / "training_state.safetensors").write_bytes(b"nonsense")
    with pytest.raises(CheckpointError, match="damaged"):
        train_classifier(CONFIG, digits, BRIEF, tmp_path, resume=True)


def test_misuse_is_explained(digits):
    with pytest.raises(BilensError, match="64 pixels and 10 classes; the model reads 32"):
        train_classifier(ClassifierConfig(32, 10), digits, BRIEF)
    with pytest.raises(BilensError, match="resume=True needs the run directory"):
        train_classifier(CONFIG, digits, BRIEF, resume=True)
    with pytest.raises(BilensError, match=r"loss became (nan|inf) in epoch 1.*learning rate"):
        wild = ClassifierTraining(epochs=1, learning_rate=1e12)
        train_classifier(CONFIG, digits, wild)
    for name, value in (("epochs", 0), ("learning_rate", 0.0), ("latent_noise", -1.0)):
        with pytest.raises(BilensError, match=f"{name}={value}, expected"):
            ClassifierTraining(**{name: value})
    with pytest.raises(BilensError, match="weight_decay=nan"):
        ClassifierTraining(weight_decay=math.nan)


def test_noise_is_scaled_to_each_vector():
    x = torch.stack([torch.linspace(0, 1, 4000), torch.linspace(0, 10, 4000)])
    noise = add_noise(x, 0.5, torch.Generator().manual_seed(0)) - x
    ratio = noise.std(dim=-1) / x.std(dim=-1)
    assert torch.allclose(ratio, torch.full((2,), 0.5), rtol=0.05)
    assert noise.mean(-1).abs().max() < 0.2


def test_where_the_noise_goes():
    torch.manual_seed(0)
    model = ImageClassifier(ClassifierConfig(16, 3, 8, n_layers=2))
    x = torch.rand(2, 16)
    quiet = model(x)
    seen = []
    for part in (model.embed, *model.layers, model.unembed):
        part.register_forward_hook(lambda part, inputs, output: seen.append(inputs[0]))

    def heard(input_noise, latent_noise):
        seen.clear()
        with noisy(model, input_noise, latent_noise, torch.Generator().manual_seed(0)):
            model(x)
        met = list(seen)
        with torch.no_grad():
            after = [model.embed, *model.layers]
            clean = [x] + [part(z) for part, z in zip(after, met[:3], strict=True)]
        return [not torch.allclose(z, c) for z, c in zip(met, clean, strict=True)]

    assert heard(0.0, 0.0) == [False, False, False, False]
    assert heard(1.0, 0.0) == [True, False, False, False]
    assert heard(0.0, 0.3) == [True, True, True, True]
    assert torch.equal(model(x), quiet)
    with noisy(model.eval(), 1.0, 1.0, torch.Generator()):
        assert torch.equal(model(x), quiet)


def test_the_state_has_no_pickle(digits, tmp_path):
    train_classifier(CONFIG, digits, BRIEF, tmp_path)
    state = load_file(tmp_path / "training_state.safetensors")
    assert {"generator", "loss_sum", "model.embed.weight", "optimizer.0.exp_avg"} <= state.keys()
