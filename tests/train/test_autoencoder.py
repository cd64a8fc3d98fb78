import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import bilens.train.autoencoder as module
from bilens.errors import BilensError
from bilens.nn import AutoencoderConfig, SparseAutoencoder
from bilens.train import (
    AutoencoderTraining,
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
    assert torch.equal(SparseAutoencoder.from_pretrained(tmp_path)(y), model(y))


def test_misuse_is_explained():
    _, rows = planted(100)
    with pytest.raises(BilensError, match="sample gives vectors of 12; d_in is 5"):
        train_autoencoder(AutoencoderConfig(5, 7), row_sampler(rows), BRIEF)
    with pytest.raises(BilensError, match="mean length 0.0; expected a number above 0"):
        train_autoencoder(AutoencoderConfig(12, 7), row_sampler(0 * rows), BRIEF)
    with pytest.raises(BilensError, match="mean length nan"):
        train_autoencoder(AutoencoderConfig(12, 7), row_sampler(rows / 0), BRIEF)
    with pytest.raises(BilensError, match=r"rows has shape \(0, 12\)"):
        row_sampler(rows[:0])
    with pytest.raises(BilensError, match="n_features=0, expected at least 1"):
        AutoencoderConfig(3, 0)
    for name, value in (("steps", 0), ("l1", -1.0), ("power", 0.0)):
        with pytest.raises(BilensError, match=f"{name}={value}, expected"):
            AutoencoderTraining(**{name: value})
