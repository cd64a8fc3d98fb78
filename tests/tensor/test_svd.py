import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from bilens.tensor import BilinearTensor, bilinear
from tests.tensor.factors import close, dense, eye, normal, random_tensor, shapes

# A Gram matrix in float64 gives singular values to about sqrt(eps) of the largest.
SQUARE_ROOT = 3e-7


@given(shapes, st.booleans())
def test_values_and_reconstruction(shape, biased):
    tensor = random_tensor(**shape)
    tensor = tensor.with_bias(normal(tensor.rank)) if biased else tensor
    svd, unfolding = tensor.svd(), dense(tensor).flatten(1)
    expected = torch.linalg.svdvals(unfolding)
    padded = torch.nn.functional.pad(expected, (0, tensor.n_out - len(expected)))
    assert close(svd.values, padded, SQUARE_ROOT)
    rebuilt = torch.einsum("s,so,sij->oij", svd.values, svd.outputs, svd.components.dense())
    assert close(rebuilt, dense(tensor), SQUARE_ROOT)
    assert close(svd.norm, unfolding.norm())
    x = normal(3, shape["n_in"])
    assert close(svd(x), tensor(x), SQUARE_ROOT)
    assert close(svd.outputs @ svd.outputs.T, eye(len(svd)), 1e-10)
    Q = svd.components.dense().flatten(1)[svd.values > 1e-4 * svd.values[0]]
    assert close(Q @ Q.T, eye(len(Q)), 1e-6)


@given(shapes)
def test_truncation_is_the_best_of_its_rank(shape):
    tensor = random_tensor(**shape)
    k = (tensor.n_out + 1) // 2
    cut = tensor.svd(k)
    rebuilt = torch.einsum("s,so,sij->oij", cut.values, cut.outputs, cut.components.dense())
    lost = torch.linalg.svdvals(dense(tensor).flatten(1))[k:].norm()
    assert torch.allclose((dense(tensor) - rebuilt).norm(), lost, atol=1e-6 * cut.norm)
    assert close(tensor.change_basis(outputs=cut.projector()).dense(), rebuilt, SQUARE_ROOT)
    full = tensor.svd().truncate(k)
    assert torch.equal(full.values, cut.values)
    assert len(full) == len(cut) == k


@pytest.mark.parametrize("limit", [0, 2**20])
def test_a_component_of_no_weight_is_zero_not_noise(monkeypatch, limit):
    monkeypatch.setattr(bilinear, "UNFOLDED_BYTES", limit)
    tensor = random_tensor(5, 6, 3, 0)
    # An output twice, more outputs than products of two inputs, and hidden units that are alike.
    doubled = BilinearTensor(tensor.left, tensor.right, tensor.out[[0, 0, 1]])
    rows = [0, 1] * 3
    alike = BilinearTensor(tensor.left[rows], tensor.right[rows], normal(4, 6))
    for deficient, rank in ((doubled, 2), (random_tensor(2, 9, 7, 1), 3), (alike, 2)):
        svd = deficient.svd()
        assert svd.values[rank - 1] > 1e-3 * svd.values[0]
        assert not svd.values[rank:].any()
        assert not svd.components[rank:].dense().any()
        assert close(svd.outputs @ svd.outputs.T, eye(len(svd)), 1e-10)


def test_small_components_are_not_rounded_away():
    """A Gram matrix in float64 has none below 1e-8 of the largest."""
    tensor = random_tensor(5, 6, 3, 0)
    basis, _ = torch.linalg.qr(normal(3, 3, seed=3))
    flat = dense(tensor).flatten(1)
    whitened = torch.linalg.svd(flat)[0].T @ tensor.out / torch.linalg.svdvals(flat)[:, None]
    sizes = torch.tensor([1.0, 1e-5, 1e-11], dtype=torch.float64)
    graded = BilinearTensor(tensor.left, tensor.right, basis @ (sizes[:, None] * whitened))
    torch.testing.assert_close(graded.svd().values, sizes, rtol=1e-4, atol=0)
