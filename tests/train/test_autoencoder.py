import json
import os
import signal
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import bilens
import bilens.train.autoencoder as module
from bilens.errors import BilensError, CheckpointError
from bilens.nn import AutoencoderConfig, SparseAutoencoder
from bilens.train import (
    TRAINING_NAME,
    AutoencoderTraining,
    is_finished,
    pair_sampler,
    row_sampler,
    similarity_penalty,
    train_autoencoder,
)
from tests.tensor.factors import close, dense, normal, random_tensor


def planted(samples: int = 4000, seed: int = 0):
    """Sparse positive mixtures of known directions."""
    generator = torch.Generator().manual_seed(seed)
    truth = torch.linalg.qr(torch.randn(12, 12, generator=generator)).Q[:, :8]
    strength = torch.rand(samples, 8, generator=generator) + 0.5
    on = torch.rand(samples, 8, generator=generator) < 0.15
    return truth, (strength * on) @ truth.T


BRIEF = AutoencoderTraining(steps=1200, batch_size=128, l1=0.05, learning_rate=3e-3)


def test_planted_features_are_found():
    truth, rows = planted()
    model = train_autoencoder(AutoencoderConfig(12, 24), row_sampler(rows), BRIEF)
    best = (truth.T @ model.features).max(dim=1).values
    assert (best > 0.95).all()
    error = (model(rows) - rows).pow(2).sum() / rows.pow(2).sum()
    assert error < 0.1
    assert torch.allclose(model.features.norm(dim=0), torch.ones(24), atol=1e-5)


def test_scale_does_not_matter():
    _, rows = planted()
    brief = AutoencoderTraining(steps=50)
    small = train_autoencoder(AutoencoderConfig(12, 20), row_sampler(rows), brief)
    large = train_autoencoder(AutoencoderConfig(12, 20), row_sampler(1000 * rows), brief)
    assert torch.allclose(1000 * small(rows), large(1000 * rows), rtol=1e-2, atol=1e-1)


def test_the_equations():
    torch.manual_seed(0)
    model = SparseAutoencoder(AutoencoderConfig(5, 7))
    with torch.no_grad():
        model.encoder_bias.normal_()
        model.decoder_bias.normal_()
    y = torch.randn(3, 5)
    f = ((y - model.decoder_bias) @ model.encoder.T + model.encoder_bias).clamp_min(0)
    assert torch.allclose(model.encode(y), f)
    assert torch.allclose(model(y), f @ model.features.T + model.decoder_bias)


@given(st.integers(2, 6), st.integers(2, 6), st.sampled_from([2.0, 10.0]))
def test_the_penalty_is_its_definition(d, m, power):
    features = normal(d, m)
    features = features / features.norm(dim=0)
    total = sum(
        abs(float(features[:, a] @ features[:, b])) ** power for a in range(m) for b in range(a)
    )
    expected = torch.tensor(total, dtype=torch.float64) ** (1 / power)
    assert close(similarity_penalty(features, power), expected)


def test_the_penalty_has_gradients():
    features = normal(4, 3).requires_grad_()
    assert torch.autograd.gradcheck(lambda f: similarity_penalty(f, 10.0), (features,))
    orthogonal = torch.eye(3).requires_grad_()
    similarity_penalty(orthogonal, 10.0).backward()
    assert torch.isfinite(orthogonal.grad).all()


def test_pairs_come_from_the_tensor(monkeypatch):
    tensor = random_tensor(5, 6, 4, 0)
    drawn = []
    below = module._below

    def remember(*args):
        drawn.append(below(*args))
        return drawn[-1]

    monkeypatch.setattr(module, "_below", remember)
    batch = pair_sampler(tensor)(20, torch.Generator().manual_seed(0))
    i, j = drawn
    assert close(batch, dense(tensor)[:, i, j].T)


def test_saved_and_loaded(tmp_path):
    model = SparseAutoencoder(AutoencoderConfig(5, 7))
    model.save_pretrained(tmp_path)
    y = torch.randn(3, 5)
    assert torch.allclose(SparseAutoencoder.from_pretrained(tmp_path)(y), model(y))


CONFIG = AutoencoderConfig(12, 20)
SHORT = AutoencoderTraining(steps=30, batch_size=16, learning_rate=1e-2)


def same_weights(a: SparseAutoencoder, b: SparseAutoencoder) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a.parameters(), b.parameters(), strict=True))


def stop_after(monkeypatch, steps: int) -> None:
    """Press ctrl-C in the middle of the given step."""
    taken = module._AutoencoderSession.take_step

    def counting(self):
        if self.place["step"] + 1 == steps:
            os.kill(os.getpid(), signal.SIGINT)
        taken(self)

    monkeypatch.setattr(module._AutoencoderSession, "take_step", counting)


@pytest.mark.parametrize("steps", [1, 17])
def test_ctrl_c_then_resume_ends_where_an_uninterrupted_run_ends(tmp_path, monkeypatch, steps):
    sample = row_sampler(100 * planted()[1] + 3)
    straight = train_autoencoder(CONFIG, sample, SHORT)
    with monkeypatch.context() as patch:
        stop_after(patch, steps)
        with pytest.raises(KeyboardInterrupt):
            train_autoencoder(CONFIG, sample, SHORT, tmp_path)
    assert not same_weights(bilens.load(tmp_path), straight)
    for _ in range(2):
        resumed = train_autoencoder(CONFIG, sample, SHORT, tmp_path, resume=True)
        assert same_weights(resumed, straight)
        assert same_weights(bilens.load(tmp_path), straight)


def test_ctrl_c_in_the_last_step_loses_nothing(tmp_path, monkeypatch):
    sample = row_sampler(planted()[1])
    stop_after(monkeypatch, 30)
    model = train_autoencoder(CONFIG, sample, SHORT, tmp_path)
    assert is_finished(tmp_path)
    assert same_weights(bilens.load(tmp_path), model)


def test_resume_adds_steps(tmp_path):
    sample = row_sampler(planted()[1])
    longer = replace(SHORT, steps=50)
    train_autoencoder(CONFIG, sample, SHORT, tmp_path)
    resumed = train_autoencoder(CONFIG, sample, longer, tmp_path, resume=True)
    assert same_weights(resumed, train_autoencoder(CONFIG, sample, longer))


def test_a_run_is_written_while_it_trains(tmp_path, monkeypatch):
    sample = row_sampler(planted()[1])
    monkeypatch.setattr(module, "SAVE_EVERY", 20)
    taken = module._AutoencoderSession.take_step

    def failing(self):
        if self.place["step"] == 25:
            raise OSError("the power is off")
        taken(self)

    with monkeypatch.context() as patch:
        patch.setattr(module._AutoencoderSession, "take_step", failing)
        with pytest.raises(OSError, match="power"):
            train_autoencoder(CONFIG, sample, SHORT, tmp_path)
    at_20 = train_autoencoder(CONFIG, sample, replace(SHORT, steps=20))
    assert same_weights(bilens.load(tmp_path), at_20)
    resumed = train_autoencoder(CONFIG, sample, SHORT, tmp_path, resume=True)
    assert same_weights(resumed, train_autoencoder(CONFIG, sample, SHORT))
    settings = json.loads((tmp_path / TRAINING_NAME).read_text())
    assert settings["l1"] == SHORT.l1
    assert settings["model"] == {"d_in": 12, "n_features": 20}


def test_resume_refuses_what_does_not_fit(tmp_path):
    rows = planted()[1]
    sample = row_sampler(rows)

    def resume(training=SHORT, sample=sample, config=CONFIG):
        train_autoencoder(config, sample, training, tmp_path, resume=True)

    with pytest.raises(CheckpointError, match="Nothing to resume.*Train without --resume"):
        resume()
    train_autoencoder(CONFIG, sample, SHORT, tmp_path)
    with pytest.raises(CheckpointError, match="l1=0.1, not l1=0.2.*only steps may grow"):
        resume(replace(SHORT, l1=0.2))
    with pytest.raises(CheckpointError, match="steps=30, not steps=29"):
        resume(replace(SHORT, steps=29))
    with pytest.raises(CheckpointError, match="n_features=20, not n_features=21"):
        resume(config=AutoencoderConfig(12, 21))
    with pytest.raises(
        CheckpointError, match="sample returns vectors of mean length.*same vectors"
    ):
        resume(sample=row_sampler(2 * rows))
    with pytest.raises(BilensError, match="resume=True needs the run directory"):
        train_autoencoder(CONFIG, sample, SHORT, resume=True)


def test_a_training_that_diverged_is_not_written(tmp_path):
    sample = row_sampler(planted()[1])
    wild = replace(SHORT, learning_rate=1e12)
    with pytest.raises(BilensError, match=r"infinite or NaN by step 30; lower learning_rate"):
        train_autoencoder(CONFIG, sample, wild, tmp_path)
    assert not (tmp_path / "checkpoints").exists()
    assert not (tmp_path / "model.safetensors").exists()


def test_misuse_is_explained():
    _, rows = planted(100)
    with pytest.raises(BilensError, match="sample returns vectors of 12 elements, expected d_in=5"):
        train_autoencoder(AutoencoderConfig(5, 7), row_sampler(rows), BRIEF)
    with pytest.raises(BilensError, match="mean length 0.0; expected a number above 0"):
        train_autoencoder(AutoencoderConfig(12, 7), row_sampler(0 * rows), BRIEF)
    with pytest.raises(BilensError, match="mean length nan"):
        train_autoencoder(AutoencoderConfig(12, 7), row_sampler(rows / 0), BRIEF)
    with pytest.raises(BilensError, match=r"rows has shape \(0, 12\)"):
        row_sampler(rows[:0])
    for kind, name, value in (
        (AutoencoderConfig, "n_features", 0),
        (AutoencoderTraining, "steps", 0),
        (AutoencoderTraining, "l1", -1.0),
        (AutoencoderTraining, "power", 0.0),
        (AutoencoderTraining, "learning_rate", float("inf")),
        (AutoencoderTraining, "seed", 2**64),
    ):
        others = {"d_in": 3, "n_features": 4} if kind is AutoencoderConfig else {}
        with pytest.raises(BilensError, match=f"{name}={value}, expected"):
            kind(**{**others, name: value})


def test_rows_of_another_precision_are_those_of_the_weights():
    rows = torch.randn(50, 8)
    training = AutoencoderTraining(steps=3, batch_size=4)
    models = [
        train_autoencoder(AutoencoderConfig(8, 16), row_sampler(x), training)
        for x in (rows, rows.double())
    ]
    for a, b in zip(*(model.parameters() for model in models), strict=True):
        torch.testing.assert_close(a, b)
    assert models[0](rows.double()).dtype == torch.float32
