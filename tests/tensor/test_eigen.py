"""The iterated solver against whole decompositions, on spectra that are easy, hard and hostile."""

import pytest
import torch
from benchmarks.launches import count
from torch import Tensor

from bilens.tensor import QuadraticForm, lanczos, quadratic
from tests.tensor.factors import eye, normal

N, K = 600, 6


def form_with(values: Tensor, seed: int = 0) -> QuadraticForm:
    """Return a batch of forms with the given eigenvalues, in a random basis."""
    left = torch.linalg.qr(normal(N, N, seed=seed)).Q[:, : values.shape[-1]].T.contiguous()
    return QuadraticForm(left, left, values)


def random_form(dtype=torch.float64) -> QuadraticForm:
    left, right, weights = normal(700, N), normal(700, N, seed=1), normal(2, 700, seed=2)
    return QuadraticForm(left.to(dtype), right.to(dtype), weights.to(dtype))


ENDING = [3, -2, 1, 0.5, 0.2, 0.1, 0.05]
GAP = torch.cat([torch.linspace(10, 5, K), torch.linspace(1, 0.1, 300)]).double()
SPECTRA = {
    "decaying": torch.tensor([0.8, -0.9]).double().pow(torch.arange(200).double()[:, None]).T,
    "flat": torch.linspace(1, 0.9, 500).double()[None],
    "double": torch.tensor([5, 5, -4, -4, 3, 3] + [0.5] * 90).double()[None],
    "eightfold": torch.tensor([[2.0] * 8 + [-1.0] * 100]).double(),
    "identity": torch.ones(1, N).double(),
    "rank one": torch.tensor([[3.0], [-2.0]]).double(),
    "zero": torch.zeros(2, 4).double(),
    "tiny": 1e-30 * torch.tensor([ENDING]).double(),
    "huge": 1e30 * torch.tensor([ENDING]).double(),
    "plus and minus": torch.tensor([4, -4, 2, -2, 1, -1] + [0.3] * 40).double()[None],
}


@pytest.mark.parametrize("name", SPECTRA)
def test_against_the_whole_decomposition(name):
    form = form_with(SPECTRA[name])
    result, full = form.eigh(K, tolerance=1e-7), form.eigh()
    assert (result.residuals <= 1e-7).all()
    scale = full.values.abs().max().clamp_min(1e-300)
    assert (result.values.abs() - full.values[..., :K].abs()).abs().max() <= 1e-6 * scale
    assert (result.vectors @ result.vectors.mT - eye(K)).abs().max() < 1e-6


def test_projectors_where_there_is_a_gap():
    form = form_with(GAP[None])
    result, exact = form.eigh(K, tolerance=1e-9), form.eigh().truncate(K)
    assert (
        result.vectors.mT @ result.vectors - exact.vectors.mT @ exact.vectors
    ).abs().max() < 1e-7


@pytest.mark.parametrize(("dtype", "rounding"), [(torch.float32, 1e-5), (torch.float64, 1e-12)])
def test_random_factors_and_their_residuals(dtype, rounding):
    form = random_form(dtype)
    result, full = form.eigh(K), form.eigh()
    assert result.values.dtype == dtype
    assert torch.allclose(result.values, full.values[:, :K], rtol=1e-4)
    error = form.dense() @ result.vectors.mT - (result.values[..., None] * result.vectors).mT
    measured = error.norm(dim=-2) / result.values[:, :1].abs()
    assert torch.allclose(measured, result.residuals, atol=rounding)
    assert (result.residuals <= 1e-4).all()


def test_the_iteration_is_used_and_the_fallback_is_not(monkeypatch):
    def forbidden(*args):
        raise AssertionError("decomposed whole")

    monkeypatch.setattr(quadratic, "dense_eigenpairs", forbidden)
    random_form().eigh(K)
    with pytest.raises(AssertionError, match="decomposed whole"):
        random_form().eigh(200)


def test_what_does_not_converge_is_decomposed_whole():
    """A tolerance under the rounding of float32 can not be met; the answer is still the best."""
    form = random_form(torch.float32)
    result, full = form.eigh(K, tolerance=1e-12), form.eigh().truncate(K)
    assert torch.equal(result.values, full.values)


def test_the_seed_decides():
    form = random_form()
    first, again, other = (form.eigh(K, seed=seed).vectors for seed in (3, 3, 4))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


def test_forms_are_done_in_turns_when_memory_is_short(monkeypatch):
    form = random_form()
    together = form.eigh(K)
    monkeypatch.setattr(quadratic, "WORKING_BYTES", 1)
    assert torch.allclose(form.eigh(K).values, together.values, rtol=1e-6)
    assert torch.allclose(form.eigh().values[:, :K], together.values, rtol=1e-6)


def counted_products(monkeypatch) -> list[int]:
    """Return a list that the number of forms in each product is appended to."""
    products, product = [], lanczos.Search._product

    def counting(search, vector, weights):
        products.append(len(vector))
        return product(search, vector, weights)

    monkeypatch.setattr(lanczos.Search, "_product", counting)
    return products


def test_the_host_waits_for_few_results(monkeypatch):
    """Steps of all forms are queued together, and one check follows sixteen of them."""
    monkeypatch.setattr(lanczos, "LEAST_STEPS", lanczos.MOST_STEPS)
    form, products = random_form(), counted_products(monkeypatch)
    launches, waits = count(lambda: form.eigh(K))
    assert waits < len(products) < launches < 60 * len(products)


def test_slow_forms_among_many_are_decomposed_whole(monkeypatch):
    """One form of many equal eigenvalues holds up no other."""
    batch = GAP.repeat(lanczos.MANY, 1)
    batch[3] = torch.linspace(1, 0.99, len(GAP))
    products = counted_products(monkeypatch)
    spectrum = form_with(batch).eigh(K, tolerance=1e-6)
    assert products[0] == lanczos.MANY
    assert len(products) <= N // 4 + 3 * lanczos.MOST_STEPS
    assert (spectrum.miss_chance == 0).nonzero().flatten().tolist() == [3]
    expected = batch.abs().sort(-1, descending=True).values[:, :K]
    assert torch.allclose(spectrum.values.abs(), expected, rtol=1e-6)
