"""Random factors, and the plain dense definition they are held to."""

import torch
from hypothesis import strategies as st
from torch import Tensor

from bilens.tensor import BilinearTensor, FactoredMatrix

SEEDS = st.integers(0, 10_000)
BATCHES = st.sampled_from([(), (3,), (2, 3)])
SIZES = {"n_in": st.integers(1, 9), "rank": st.integers(1, 11), "n_out": st.integers(1, 8)}
shapes = st.fixed_dictionaries({**SIZES, "seed": SEEDS})


def random_tensor(n_in: int, rank: int, n_out: int, seed: int) -> BilinearTensor:
    kind = {"generator": torch.Generator().manual_seed(seed), "dtype": torch.float64}
    sizes = (rank, n_in), (rank, n_in), (n_out, rank)
    return BilinearTensor(*(torch.randn(size, **kind) for size in sizes))


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def eye(size: int) -> Tensor:
    return torch.eye(size, dtype=torch.float64)


def random_matrix(n_rows, n_columns, rank, batch=(), seed=0) -> FactoredMatrix:
    left = normal(*batch, n_rows, rank, seed=seed)
    return FactoredMatrix(left, normal(*batch, rank, n_columns, seed=seed + 1))


def dense(tensor: BilinearTensor) -> Tensor:
    """B[o,i,j] by its definition, one entry after another."""
    B = torch.zeros(tensor.n_out, tensor.n_in, tensor.n_in, dtype=tensor.left.dtype)
    for h in range(tensor.rank):
        pair = torch.outer(tensor.left[h], tensor.right[h])
        for o in range(tensor.n_out):
            B[o] += tensor.out[o, h] * (pair + pair.T) / 2
    return B


def close(actual: Tensor, expected: Tensor, tolerance: float = 1e-10) -> bool:
    """Equal to a relative tolerance, measured against the largest entry."""
    assert actual.shape == expected.shape
    scale = expected.abs().max().clamp_min(1e-300)
    return bool((actual - expected).abs().max() <= tolerance * scale)
