import torch
from hypothesis import given
from hypothesis import strategies as st

from bilens.tensor import FactoredMatrix
from tests.tensor.factors import BATCHES, SEEDS, close, eye, normal, random_matrix

SIZES = {"n_rows": st.integers(1, 8), "n_columns": st.integers(1, 8), "rank": st.integers(1, 6)}
shapes = st.fixed_dictionaries({**SIZES, "batch": BATCHES, "seed": SEEDS})


def dense(matrix: FactoredMatrix) -> torch.Tensor:
    """M[i,j] by its definition, one term after another."""
    return sum((matrix.left[..., :, None, :] * matrix.right.mT[..., None, :, :]).unbind(-1))


@given(shapes)
def test_the_parts_of_a_matrix(shape):
    matrix = random_matrix(**shape)
    M = dense(matrix)
    assert matrix.batch_shape == shape["batch"]
    assert close(matrix.dense(), M)
    assert close(matrix.T.dense(), M.mT)
    x = normal(*shape["batch"], 2, matrix.n_columns)
    assert close(matrix.apply(x), x @ M.mT)
    rows, columns = torch.tensor([[0, matrix.n_rows - 1], [matrix.n_columns - 1, 0]])
    assert close(matrix.rows(rows), M[..., rows, :])
    assert close(matrix.rows(slice(0, 2)), M[..., :2, :])
    assert close(matrix.entries(rows, columns), M[..., rows, columns])
    assert close(matrix.norm(), M.flatten(-2).norm(dim=-1))
    if shape["batch"]:
        assert close(matrix[1].dense(), M[1])
        assert close(matrix[1:].dense(), M[1:])


@given(shapes, st.data())
def test_singular_values_and_vectors(shape, data):
    matrix = random_matrix(**shape)
    M, svd = dense(matrix), matrix.svd()
    most = min(shape["n_rows"], shape["n_columns"], shape["rank"])
    expected = torch.linalg.svdvals(M)
    assert close(svd.values, expected[..., :most])
    assert close(svd.dense(), M)
    for vectors in (svd.left, svd.right):
        assert close(vectors @ vectors.mT, eye(most).expand(*shape["batch"], -1, -1))
    k = data.draw(st.integers(1, most))
    cut = matrix.svd(k)
    lost, scale = torch.linalg.matrix_norm(M - cut.dense()), cut.norm.max()
    assert torch.allclose(lost, expected[..., k:].norm(dim=-1), atol=1e-10 * scale)
    assert torch.allclose(cut.norm**2 - (cut.values**2).sum(-1), lost**2, atol=1e-10 * scale**2)


@given(shapes)
def test_eigenvalues(shape):
    matrix = random_matrix(**{**shape, "n_columns": shape["n_rows"]})
    result, M = matrix.eigenvalues(), dense(matrix)
    assert result.shape[-1] == min(shape["rank"], shape["n_rows"])
    assert bool((result.abs().diff(dim=-1) <= 1e-12).all())
    # Power sums say which eigenvalues there are, whatever their order.
    power = M
    for exponent in range(1, shape["n_rows"] + 1):
        trace = power.diagonal(dim1=-2, dim2=-1).sum(-1).to(result.dtype)
        size = torch.linalg.matrix_norm(M).max() ** exponent
        assert torch.allclose((result**exponent).sum(-1), trace, rtol=0, atol=1e-9 * size)
        power = power @ M


@given(shapes, st.integers(1, 6), st.integers(1, 7), st.sampled_from(["same", "none", "other"]))
def test_products(shape, rank, n_columns, batches):
    a = random_matrix(**shape)
    batch = {"same": shape["batch"], "none": (), "other": (2, 1)}[batches]
    b = random_matrix(a.n_columns, n_columns, rank, batch, 5)
    product = a @ b
    assert close(product.dense(), dense(a) @ dense(b))
    assert product.rank == min(a.rank, rank)
    other = random_matrix(a.n_rows, a.n_columns, rank, batch, 7)
    assert close((a * other).dense(), dense(a) * dense(other))


def test_a_product_of_nothing_has_no_norm():
    a = FactoredMatrix(normal(5, 3), eye(6)[:3])
    assert (a @ FactoredMatrix(eye(6)[:, 3:], normal(3, 4))).norm() < 1e-14


def test_float32_and_bfloat16_are_decomposed_in_float64():
    matrix = random_matrix(30, 20, 4)
    single = FactoredMatrix(matrix.left.float(), matrix.right.float())
    assert single.svd().values.dtype == torch.float32
    assert close(single.svd().values.double(), matrix.svd().values, 1e-6)
    assert single.norm().dtype == torch.float64
    half = FactoredMatrix(matrix.left.bfloat16(), matrix.right.bfloat16())
    assert close(half.svd().values.double(), matrix.svd().values, 2e-2)


def test_gradients():
    left, right = normal(4, 2).requires_grad_(), normal(2, 5, seed=1).requires_grad_()
    several = torch.tensor([1, 3])

    def everything(left, right):
        matrix = FactoredMatrix(left, right)
        square, entries = matrix @ matrix.T, (matrix * matrix).entries(several, several)
        of_square = square.rows(several), square.eigenvalues().real
        return matrix.norm(), matrix.svd().values, matrix.svd(1).dense(), entries, *of_square

    assert torch.autograd.gradcheck(everything, (left, right))
