"""The top entries of matrices that pass in blocks, against sorting them whole."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from bilens.tensor import top_entries
from tests.tensor.factors import close, normal, random_matrix
from tests.tensor.test_factored import dense, shapes


@given(
    shapes,
    st.integers(1, 70),
    st.booleans(),
    st.sampled_from([None, 1, 3, 100]),
    st.sampled_from([(), ((),), ((), (3,)), ("itself",)]),
)
def test_against_sorting_the_whole_matrix(shape, k, largest, batch_size, others):
    matrix = random_matrix(**shape)
    times = [
        matrix if batch == "itself" else random_matrix(**{**shape, "batch": batch, "seed": 5})
        for batch in others
    ]
    M = dense(matrix)
    for other in times:
        M = M * dense(other)
    result = matrix.top_entries(k, times=times, largest=largest, batch_size=batch_size)
    expected = M.flatten(-2).sort(-1, descending=largest).values[..., :k]
    assert close(result.values, expected)
    assert close(
        M.flatten(-2).gather(-1, result.rows * shape["n_columns"] + result.columns), expected
    )
    places = (result.rows * shape["n_columns"] + result.columns).sort(-1).values
    assert (places.diff(dim=-1) > 0).all()


def test_blocks_of_any_kind():
    M = normal(7, 5)
    result = top_entries(iter([M[:1], M[1:5], M[5:]]), 4)
    assert torch.equal(result.values, M.flatten().sort(descending=True).values[:4])
    assert torch.equal(M[result.rows, result.columns], result.values)


def test_the_whole_matrix_is_never_there(monkeypatch):
    sizes = []
    matrix = random_matrix(1000, 2000, 3)
    monkeypatch.setattr("bilens.tensor.factored.BLOCK_BYTES", 200_000)
    original = type(matrix).rows

    def rows(self, index):
        block = original(self, index)
        sizes.append(block.nbytes)
        return block

    monkeypatch.setattr(type(matrix), "rows", rows)
    assert matrix.top_entries(3, times=[matrix]).values.shape == (3,)
    assert max(sizes) <= 200_000
