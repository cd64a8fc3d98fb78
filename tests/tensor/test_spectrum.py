import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from bilens.errors import BilensError
from tests.tensor.factors import close, normal, random_tensor, shapes


@given(shapes, st.sampled_from([(), (3,), (2, 2)]))
def test_exact_spectrum(shape, batch):
    tensor = random_tensor(**shape)
    form = tensor.interaction(normal(*batch, tensor.n_out, seed=1))
    spectrum = form.eigh()
    Q = form.dense()
    assert spectrum.batch_shape == batch
    assert close(spectrum.dense(), Q)
    eye = torch.eye(tensor.n_in, dtype=torch.float64).expand_as(Q)
    assert close(spectrum.vectors @ spectrum.vectors.mT, eye)
    assert close(spectrum.values.sort(-1).values, torch.linalg.eigvalsh(Q))
    magnitudes = spectrum.values.abs()
    assert (magnitudes.diff(dim=-1) <= 0).all()
    assert (spectrum.residuals < 1e-12).all()
    x = normal(4, tensor.n_in, seed=2)
    assert close(spectrum(x), form(x))
    assert close(spectrum.activations(x).sum(-1), form(x))
    expected = spectrum.values * torch.einsum("...ki,si->s...k", spectrum.vectors, x) ** 2
    assert close(spectrum.activations(x), expected)


def test_truncation_keeps_the_largest():
    spectrum = random_tensor(7, 6, 2, 0).interaction(output=[0, 1]).eigh()
    cut = spectrum.truncate(3)
    assert torch.equal(cut.values, spectrum.values[:, :3])
    lost = (spectrum.dense() - cut.dense()).flatten(1).norm(dim=1)
    assert close(lost, spectrum.values[:, 3:].norm(dim=1))


def test_ordering_moves_whole_pairs():
    spectrum = random_tensor(7, 6, 2, 0).interaction(output=[0, 1]).eigh()
    signed = spectrum.ordered_by(spectrum.values)
    assert (signed.values.diff(dim=-1) <= 0).all()
    assert close(signed.dense(), spectrum.dense())
    x = normal(50, 7)
    active = spectrum.ordered_by(spectrum.activations(x).mean(0))
    assert (active.activations(x).mean(0).diff(dim=-1) <= 0).all()


def test_orientation_follows_the_top_inputs():
    spectrum = random_tensor(7, 6, 2, 0).interaction(output=[0, 1]).eigh()
    x = normal(40, 7)
    oriented = spectrum.oriented(x, k=3)
    assert close(oriented.dense(), spectrum.dense())
    for form in range(2):
        for i in range(7):
            best = oriented.activations(x)[:, form, i].abs().topk(3).indices
            assert x[best] @ oriented.vectors[form, i] @ torch.ones(3, dtype=torch.float64) >= 0
    mirrored = spectrum.__class__(
        spectrum.values, -spectrum.vectors, spectrum.residuals, spectrum.constant
    ).oriented(x, k=3)
    assert close(mirrored.vectors, oriented.vectors)


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
    spectrum = random_tensor(6, 6, 2, 0).interaction(output=[0, 1]).eigh()
    values = torch.zeros(2, 6, dtype=torch.float64)
    values[0, :4] = torch.tensor([2.0, -2.0, 2.0, -2.0])
    equal = spectrum.__class__(values, spectrum.vectors, spectrum.residuals)
    assert equal.effective_rank().tolist() == [4.0, 0.0]


def test_the_exact_spectrum_has_gradients():
    form = random_tensor(4, 5, 1, 3).interaction(output=0)
    weights = form.weights.clone().requires_grad_()

    def projected(weights):
        spectrum = form.__class__(form.left, form.right, weights).eigh()
        return spectrum.values, spectrum.truncate(2).dense()

    assert torch.autograd.gradcheck(projected, (weights,))


MISUSES = [
    (lambda s: s.truncate(0), "k=0, expected a whole number, 1 to 4"),
    (lambda s: s.truncate(5), "k=5, expected a whole number, 1 to 4"),
    (lambda s: s.ordered_by(normal(3)), r"scores has shape \(3,\); expected \(4,\)"),
    (lambda s: s.oriented(normal(0, 4)), "at least one sample"),
    (lambda s: s.activations(normal(2, 3)), r"x has shape \(2, 3\).*length 4"),
    (lambda s: s.pullback(normal(3, 2)), r"weight has shape \(3, 2\); expected \(4, n_features\)"),
    (lambda s: s.pullback(normal(4, 2), normal(4)), "no constant coordinate"),
    (lambda s: s[0], "no batch to index"),
]


@pytest.mark.parametrize(("misuse", "message"), MISUSES)
@pytest.mark.usefixtures("unchecked")
def test_misuse_is_explained(misuse, message):
    with pytest.raises(BilensError, match=message):
        misuse(random_tensor(4, 5, 3, 0).interaction(output=0).eigh())


def test_a_bad_k_or_damaged_weights_are_explained():
    form = random_tensor(4, 5, 3, 0).interaction(output=0)
    with pytest.raises(BilensError, match="k=5, expected a whole number, 1 to 4"):
        form.eigh(5)
    form.left[2, 1] = float("nan")
    with pytest.raises(BilensError, match="left holds NaN"):
        form.eigh()


@given(shapes, st.integers(1, 4))
def test_outermost_takes_from_both_ends(shape, k):
    tensor = random_tensor(**shape)
    spectrum = tensor.interaction(normal(2, tensor.n_out, seed=1)).eigh()
    chosen = spectrum.outermost(k)
    ordered = spectrum.values.sort(-1, descending=True).values
    lowest = min(k, max(0, spectrum.k - k))
    expected = torch.cat([ordered[:, :k], ordered.flip(-1)[:, :lowest]], 1)
    assert close(chosen.values, expected)
    Q = tensor.interaction(normal(2, tensor.n_out, seed=1)).dense()
    assert close(chosen.vectors @ Q, chosen.values[..., None] * chosen.vectors)


def test_outermost_needs_a_number():
    with pytest.raises(BilensError, match="k=0, expected a whole number, at least 1"):
        random_tensor(7, 6, 2, 0).interaction(output=0).eigh().outermost(0)
