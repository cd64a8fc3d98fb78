"""The top entries of matrices that pass in blocks, against sorting them whole."""

import math

import torch
from hypothesis import given
from hypothesis import strategies as st

from bilens.tensor import FactoredMatrix
from bilens.tensor.factored import top_entries
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
    other = {**shape, "seed": 5}
    times = [matrix if b == "itself" else random_matrix(**{**other, "batch": b}) for b in others]
    entries = math.prod(map(dense, times), start=dense(matrix)).flatten(-2)
    result = matrix.top_entries(k, times=times, largest=largest, batch_size=batch_size)
    expected = entries.sort(-1, descending=largest).values[..., :k]
    assert close(result.values, expected)
    places = result.rows * shape["n_columns"] + result.columns
    assert close(entries.gather(-1, places), expected)
    assert (places.sort(-1).values.diff(dim=-1) > 0).all()


def test_blocks_of_any_kind():
    M = normal(7, 5)
    result = top_entries(iter([M[:1], M[1:5], M[5:]]), 4)
    assert torch.equal(result.values, M.flatten().sort(descending=True).values[:4])
    assert torch.equal(M[result.rows, result.columns], result.values)


def test_the_whole_matrix_is_never_there(monkeypatch):
    blocks, matrix, rows = [], random_matrix(1000, 2000, 3), FactoredMatrix.rows
    monkeypatch.setattr("bilens.tensor.factored.BLOCK_BYTES", 200_000)

    def noted(self, index):
        blocks.append(rows(self, index))
        return blocks[-1]

    monkeypatch.setattr(FactoredMatrix, "rows", noted)
    assert matrix.top_entries(3, times=[matrix]).values.shape == (3,)
    assert max(block.nbytes for block in blocks) <= 200_000
