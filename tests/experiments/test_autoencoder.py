import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from bilens.errors import BilensError
from experiments import autoencoder as recipe
from tests.tensor.factors import close, dense, normal, random_tensor

pytestmark = pytest.mark.long


def planted(samples: int = 4000, seed: int = 0):
    """Sparse positive mixtures of known directions."""
    generator = torch.Generator().manual_seed(seed)
    truth = torch.linalg.qr(torch.randn(12, 12, generator=generator)).Q[:, :8]
    strength = torch.rand(samples, 8, generator=generator) + 0.5
    on = torch.rand(samples, 8, generator=generator) < 0.15
    return truth, (strength * on) @ truth.T


def test_planted_features_are_found():
    truth, rows = planted()
    brief = recipe.AutoencoderTraining(steps=1200, batch_size=128, l1=0.05, learning_rate=3e-3)
    model = recipe.train_autoencoder(recipe.row_sampler(rows), 24, brief)
    assert ((truth.T @ model.features).max(dim=1).values > 0.95).all()
    assert (model.decode(model.encode(rows)) - rows).pow(2).sum() / rows.pow(2).sum() < 0.1
    assert torch.allclose(model.features.norm(dim=0), torch.ones(24), atol=1e-5)


@pytest.mark.parametrize("stop", [3, 10, 17, 29])
def test_a_training_that_is_killed_resumes_to_the_same_end(stop, tmp_path, monkeypatch):
    monkeypatch.setattr(recipe, "SAVED", 5)
    sample, brief = recipe.row_sampler(planted()[1]), recipe.AutoencoderTraining(steps=30)
    whole = recipe.train_autoencoder(sample, 20, brief)
    drawn = []

    def killed(n, generator):
        drawn.append(n)
        if len(drawn) > stop:
            raise SystemExit(143)  # SIGTERM
        return sample(n, generator)

    with pytest.raises(SystemExit):
        recipe.train_autoencoder(killed, 20, brief, tmp_path / "kept")
    left = 30 - (stop - 1) // 5 * 5
    drawn.clear()
    monkeypatch.setattr(recipe, "SAVED", 1000)
    counted = lambda n, generator: drawn.append(n) or sample(n, generator)  # noqa: E731
    resumed = recipe.train_autoencoder(counted, 20, brief, tmp_path / "kept")
    assert len(drawn) == 1 + left
    for name, weight in whole.state_dict().items():
        assert torch.equal(weight, resumed.state_dict()[name])


def test_scale_does_not_matter():
    _, rows = planted()
    brief = recipe.AutoencoderTraining(steps=50)
    small = recipe.train_autoencoder(recipe.row_sampler(rows), 20, brief)
    large = recipe.train_autoencoder(recipe.row_sampler(1000 * rows.double()), 20, brief)
    assert torch.allclose(1000 * small.encode(rows), large.encode(1000 * rows), rtol=0.01, atol=0.1)


def test_the_equations():
    model = recipe.SparseAutoencoder(5, 7).requires_grad_(False)
    model.encoder_bias.normal_()
    model.decoder_bias.normal_()
    y = torch.randn(3, 5)
    f = ((y - model.decoder_bias) @ model.encoder.T + model.encoder_bias).clamp_min(0)
    assert torch.allclose(model.encode(y), f)
    assert torch.allclose(model.decode(f), f @ model.features.T + model.decoder_bias)


@given(st.integers(2, 6), st.integers(2, 6), st.sampled_from([2.0, 10.0]))
def test_the_penalty_is_its_definition(d, m, power):
    features = normal(d, m)
    features = features / features.norm(dim=0)
    powers = (features.T @ features).abs() ** power
    expected = sum(powers[a, b] for a in range(m) for b in range(a)) ** (1 / power)
    assert close(recipe.similarity_penalty(features, power), expected)


def test_the_penalty_has_gradients():
    features = normal(4, 3).requires_grad_()
    assert torch.autograd.gradcheck(lambda f: recipe.similarity_penalty(f, 10.0), (features,))
    orthogonal = torch.eye(3).requires_grad_()
    recipe.similarity_penalty(orthogonal, 10.0).backward()
    assert torch.isfinite(orthogonal.grad).all()


def test_pairs_come_from_the_tensor():
    tensor = random_tensor(5, 6, 4, 0)
    batch = recipe.pair_sampler(tensor)(20, torch.Generator().manual_seed(0))
    assert (torch.cdist(batch, dense(tensor).flatten(1).T).min(1).values < 1e-9).all()


def test_a_training_that_diverged_is_an_error():
    wild = recipe.AutoencoderTraining(steps=30, batch_size=16, learning_rate=1e12)
    with pytest.raises(BilensError, match=r"infinite or NaN; lower learning_rate"):
        recipe.train_autoencoder(recipe.row_sampler(planted()[1]), 20, wild)


def test_sparsity_counts():
    activations = torch.tensor([[1.0, 0.0, 2.0, 0.0], [0.0, 0.0, 3.0, 0.0]])
    y = torch.tensor([[3.0, 4.0], [0.0, 5.0]])
    report = recipe.sparsity(activations, y, y + torch.tensor([1.0, 0.0]))
    assert report == pytest.approx({"l0": 1.5, "relative_error": 2 / 50, "active": 2, "dead": 2})
