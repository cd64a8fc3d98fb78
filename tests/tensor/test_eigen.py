"""Eigenpairs of forms whose eigenvalues are known: decaying, repeated, zero, tiny and huge."""

import pytest
import torch
from torch import Tensor

from bilens.tensor import QuadraticForm, quadratic
from tests.tensor.factors import eye, normal

N, K = 60, 6
ENDING = [3, -2, 1, 0.5, 0.2, 0.1, 0.05]
SPECTRA = {
    "decaying": torch.tensor([0.8, -0.9]).double().pow(torch.arange(40).double()[:, None]).T,
    "double": torch.tensor([5, 5, -4, -4, 3, 3] + [0.5] * 40).double()[None],
    "identity": torch.ones(1, N).double(),
    "rank one": torch.tensor([[3.0], [-2.0]]).double(),
    "zero": torch.zeros(2, 4).double(),
    "tiny": 1e-30 * torch.tensor([ENDING]).double(),
    "huge": 1e30 * torch.tensor([ENDING]).double(),
    "plus and minus": torch.tensor([4, -4, 2, -2, 1, -1] + [0.3] * 40).double()[None],
}


def form_with(values: Tensor) -> QuadraticForm:
    """Return a batch of forms with the given eigenvalues, in a random basis."""
    left = torch.linalg.qr(normal(N, N)).Q[:, : values.shape[-1]].T.contiguous()
    return QuadraticForm(left, left, values)


@pytest.mark.parametrize("name", SPECTRA)
def test_the_first_k_are_those_of_largest_magnitude(name):
    values = torch.nn.functional.pad(SPECTRA[name], (0, N - SPECTRA[name].shape[1]))
    form = form_with(SPECTRA[name])
    result = form.eigh(K)
    scale = values.abs().max().clamp_min(1e-300)
    expected = values.abs().sort(-1, descending=True).values[:, :K]
    assert (result.values.abs() - expected).abs().max() <= 1e-12 * scale
    assert (result.vectors @ result.vectors.mT - eye(K)).abs().max() < 1e-12
    error = form.apply(result.vectors) - result.values[..., None] * result.vectors
    assert error.abs().max() <= 1e-12 * scale
    assert (result.residuals <= 1e-12).all()


def test_forms_are_done_in_turns_when_memory_is_short(monkeypatch):
    form = QuadraticForm(normal(70, N), normal(70, N, seed=1), normal(3, 70, seed=2))
    together = form.eigh(K)
    monkeypatch.setattr(quadratic, "WORKING_BYTES", 1)
    assert torch.allclose(form.eigh(K).values, together.values, rtol=1e-12)
