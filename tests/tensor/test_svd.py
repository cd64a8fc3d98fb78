import pytest
import torch
from hypothesis import given

from bilens.tensor import BilinearTensor, bilinear
from tests.tensor.factors import close, dense, normal, random_tensor, shapes

# A Gram matrix in float64 gives singular values to about sqrt(eps) of the largest.
SQUARE_ROOT = 3e-7


@given(shapes)
def test_values_and_reconstruction(shape):
    tensor = random_tensor(**shape)
    svd = tensor.svd()
    unfolding = dense(tensor).flatten(1)
    expected = torch.linalg.svdvals(unfolding)
    padded = torch.zeros(tensor.n_out, dtype=torch.float64)
    padded[: expected.numel()] = expected
    assert close(svd.values, padded, SQUARE_ROOT)
    rebuilt = torch.einsum("s,so,sij->oij", svd.values, svd.outputs, svd.components.dense())
    assert close(rebuilt, dense(tensor), SQUARE_ROOT)
    assert close(svd.norm, unfolding.norm())
    x = normal(3, tensor.n_in)
    assert close(svd(x), tensor(x), SQUARE_ROOT)


@given(shapes)
def test_both_sides_are_orthonormal(shape):
    svd = random_tensor(**shape).svd()
    eye = torch.eye(len(svd), dtype=torch.float64)
    assert close(svd.outputs @ svd.outputs.T, eye, 1e-10)
    matter = svd.values > 1e-4 * svd.values[0]
    Q = svd.components.dense().flatten(1)[matter]
    assert close(Q @ Q.T, eye[: len(Q), : len(Q)], 1e-6)


@given(shapes)
def test_truncation_is_the_best_of_its_rank(shape):
    tensor = random_tensor(**shape)
    k = (tensor.n_out + 1) // 2
    cut = tensor.svd(k)
    rebuilt = torch.einsum("s,so,sij->oij", cut.values, cut.outputs, cut.components.dense())
    lost = torch.linalg.svdvals(dense(tensor).flatten(1))[k:].norm()
    assert torch.allclose((dense(tensor) - rebuilt).norm(), lost, atol=1e-6 * cut.norm)
    projected = tensor.change_basis(outputs=cut.projector())
    assert close(projected.dense(), rebuilt, SQUARE_ROOT)
    full = tensor.svd().truncate(k)
    assert torch.equal(full.values, cut.values)
    assert len(full) == len(cut) == k


@pytest.mark.parametrize("limit", [0, 2**20])
def test_a_component_of_no_weight_is_zero_not_noise(monkeypatch, limit):
    monkeypatch.setattr(bilinear, "UNFOLDED_BYTES", limit)
    tensor = random_tensor(5, 6, 3, 0)
    # An output twice, more outputs than products of two inputs, and hidden units that are alike.
    doubled = BilinearTensor(tensor.left, tensor.right, tensor.out[[0, 0, 1]])
    small = random_tensor(2, 9, 7, 1)
    alike = BilinearTensor(
        *(f.repeat(3, 1) for f in (tensor.left[:2], tensor.right[:2])), normal(4, 6)
    )
    for deficient, rank in ((doubled, 2), (small, 3), (alike, 2)):
        svd = deficient.svd()
        assert svd.values[rank - 1] > 1e-3 * svd.values[0]
        assert not svd.values[rank:].any()
        assert not svd.components[rank:].dense().any()
        eye = torch.eye(len(svd), dtype=torch.float64)
        assert close(svd.outputs @ svd.outputs.T, eye, 1e-10)


def test_small_components_are_not_rounded_away():
    """A Gram matrix in float64 has none below 1e-8 of the largest."""
    tensor = random_tensor(5, 6, 3, 0)
    basis, _ = torch.linalg.qr(normal(3, 3, seed=3))
    flat = dense(tensor).flatten(1)
    whitened = torch.linalg.svd(flat)[0].T @ tensor.out
    whitened = whitened / torch.linalg.svdvals(flat)[:, None]
    sizes = torch.tensor([1.0, 1e-5, 1e-11], dtype=torch.float64)
    graded = BilinearTensor(tensor.left, tensor.right, basis @ (sizes[:, None] * whitened))
    torch.testing.assert_close(graded.svd().values, sizes, rtol=1e-4, atol=0)


def test_the_constant_coordinate_goes_along():
    tensor = random_tensor(5, 6, 3, 0).with_bias(normal(6))
    x = normal(4, 5, seed=1)
    assert close(tensor.svd()(x), tensor(x), SQUARE_ROOT)
