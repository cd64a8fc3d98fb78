from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from bilens.tensor import Spectrum
from tests.tensor.factors import BATCHES, close, eye, normal, random_tensor, shapes


def two_forms() -> Spectrum:
    return random_tensor(7, 6, 2, 0).interaction(output=[0, 1]).eigh()


@given(shapes, BATCHES)
def test_exact_spectrum(shape, batch):
    tensor = random_tensor(**shape)
    form = tensor.interaction(normal(*batch, tensor.n_out, seed=1))
    spectrum, Q = form.eigh(), form.dense()
    assert spectrum.batch_shape == batch
    assert close(spectrum.dense(), Q)
    assert close(spectrum.vectors @ spectrum.vectors.mT, eye(tensor.n_in).expand_as(Q))
    assert close(spectrum.values.sort(-1).values, torch.linalg.eigvalsh(Q))
    assert (spectrum.values.abs().diff(dim=-1) <= 0).all()
    assert (spectrum.residuals < 1e-12).all()
    x = normal(4, tensor.n_in, seed=2)
    assert close(spectrum(x), form(x))
    expected = spectrum.values * torch.einsum("...ki,si->s...k", spectrum.vectors, x) ** 2
    assert close(spectrum.activations(x), expected)
    k = (tensor.n_in + 1) // 2
    cut = spectrum.truncate(k)
    assert torch.equal(cut.values, spectrum.values[..., :k])
    lost, others = (Q - cut.dense()).flatten(-2).norm(dim=-1), spectrum.values[..., k:]
    assert torch.allclose(lost, others.norm(dim=-1), atol=1e-10 * Q.norm())


@given(shapes, BATCHES, st.data())
def test_selection(shape, batch, data):
    tensor = random_tensor(**shape)
    spectrum = tensor.interaction(normal(*batch, tensor.n_out)).eigh()
    selected = data.draw(st.lists(st.integers(0, spectrum.k - 1), min_size=1, max_size=4))
    several = spectrum.select(selected)
    assert torch.equal(several.values, spectrum.values[..., selected])
    assert torch.equal(several.vectors, spectrum.vectors[..., selected, :])
    assert torch.equal(several.residuals, spectrum.residuals[..., selected])
    rows = torch.rand(*batch, spectrum.k).argsort(-1)
    assert torch.equal(spectrum.select(rows).values, spectrum.values.gather(-1, rows))


@given(shapes, BATCHES)
def test_the_parts_of_either_sign(shape, batch):
    tensor = random_tensor(**shape)
    spectrum = tensor.interaction(normal(*batch, tensor.n_out)).eigh()
    raising, lowering = spectrum.positive(), spectrum.negative()
    assert (raising.values >= 0).all()
    assert (lowering.values <= 0).all()
    assert close(raising.dense() + lowering.dense(), spectrum.dense())
    if not batch:
        assert raising.k == max(1, int((spectrum.values > 0).sum()))
        assert (raising.values.diff() <= 0).all()
        assert (lowering.values.diff() >= 0).all()


@pytest.mark.parametrize("constant", [False, True])
@pytest.mark.parametrize("output", [0, [0, 1]])
def test_a_spectrum_is_saved_and_loaded(tmp_path, constant, output):
    tensor = random_tensor(5, 6, 2, 0)
    tensor = tensor.with_bias() if constant else tensor
    spectrum = tensor.interaction(output=output).eigh(2)
    spectrum.save(tmp_path / "spectrum.safetensors")
    loaded = Spectrum.load(tmp_path / "spectrum.safetensors")
    assert loaded.constant == constant
    for name in ("values", "vectors", "residuals"):
        assert torch.equal(getattr(loaded, name), getattr(spectrum, name))
    assert torch.equal(spectrum.to(torch.float32).values, spectrum.values.float())


def test_ordering_moves_whole_pairs():
    spectrum = two_forms()
    signed = spectrum.ordered_by(spectrum.values)
    assert (signed.values.diff(dim=-1) <= 0).all()
    assert close(signed.dense(), spectrum.dense())
    x = normal(50, 7)
    active = spectrum.ordered_by(spectrum.activations(x).mean(0))
    assert (active.activations(x).mean(0).diff(dim=-1) <= 0).all()


def test_orientation_follows_the_top_inputs():
    spectrum, x = two_forms(), normal(40, 7)
    oriented = spectrum.oriented(x, k=3)
    assert close(oriented.dense(), spectrum.dense())
    for form in range(2):
        for i in range(7):
            best = oriented.activations(x)[:, form, i].abs().topk(3).indices
            assert (x[best] @ oriented.vectors[form, i]).sum() >= 0
    mirrored = replace(spectrum, vectors=-spectrum.vectors)
    assert close(mirrored.oriented(x, k=3).vectors, oriented.vectors)


@given(shapes)
def test_reading_through_an_embedding(shape):
    tensor = random_tensor(**shape)
    W, b, z = normal(tensor.n_in, 5), normal(tensor.n_in, seed=1), normal(3, 5, seed=2)
    spectrum = tensor.interaction(output=0).eigh()
    assert close(spectrum.pullback(W).activations(z), spectrum.activations(z @ W.T))
    biased = tensor.with_bias(left=normal(tensor.rank)).interaction(output=0).eigh()
    assert close(biased.pullback(W, b).activations(z), biased.activations(z @ W.T + b))
    assert close(biased.pullback(W).activations(z), biased.activations(z @ W.T))


def test_effective_rank_counts_equal_eigenvalues():
    values = torch.tensor([[2.0, -2.0, 2.0, -2.0, 0.0, 0.0, 0.0], [0.0] * 7])
    assert replace(two_forms(), values=values).effective_rank().tolist() == [4.0, 0.0]


def test_the_exact_spectrum_has_gradients():
    form = random_tensor(4, 5, 1, 3).interaction(output=0)

    def projected(weights):
        spectrum = replace(form, weights=weights).eigh()
        return spectrum.values, spectrum.truncate(2).dense()

    assert torch.autograd.gradcheck(projected, (form.weights.clone().requires_grad_(),))


@given(shapes, st.integers(1, 4))
def test_outermost_takes_from_both_ends(shape, k):
    tensor = random_tensor(**shape)
    spectrum = tensor.interaction(normal(2, tensor.n_out, seed=1)).eigh()
    selected = spectrum.outermost(k)
    ordered = spectrum.values.sort(-1, descending=True).values
    lowest = min(k, max(0, spectrum.k - k))
    assert close(selected.values, torch.cat([ordered[:, :k], ordered.flip(-1)[:, :lowest]], 1))
    assert close(selected.vectors @ spectrum.dense(), selected.values[..., None] * selected.vectors)
