import torch
from hypothesis import given

from bilens.tensor import BilinearTensor
from tests.tensor.factors import close, dense, normal, random_tensor, shapes

SQUARE_ROOT = (
    3e-7  # a Gram matrix in float64 gives singular values to about sqrt(eps) of the largest
)


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


def test_a_component_of_no_weight_is_zero_not_noise():
    tensor = random_tensor(5, 6, 3, 0)
    doubled = BilinearTensor(tensor.left, tensor.right, tensor.out[[0, 0, 1]])
    svd = doubled.svd()
    assert svd.values[2] <= 1e-7 * svd.values[0]
    assert svd.components[2].dense().abs().max() == 0


def test_the_constant_coordinate_goes_along():
    tensor = random_tensor(5, 6, 3, 0).with_bias(normal(6))
    x = normal(4, 5, seed=1)
    assert close(tensor.svd()(x), tensor(x), SQUARE_ROOT)
