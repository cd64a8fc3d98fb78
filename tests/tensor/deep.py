"""Random chains of layers, and the plain dense definition of their eigenvector trees."""

import torch
from hypothesis import strategies as st
from torch import Tensor

from bilens.tensor import BilinearTensor
from tests.tensor.factors import SEEDS, dense, normal, random_tensor

KINDS = ("plain", "low rank", "bias", "residual", "bias and residual")
FEW = st.integers(1, 3)
chains = st.fixed_dictionaries(
    {"depth": FEW, "kind": st.sampled_from(KINDS), "width": FEW, "seed": SEEDS}
)


def random_chain(
    depth: int, kind: str, width: int = 3, n_in: int = 5, n_out: int = 4, seed: int = 0
) -> list[BilinearTensor]:
    """`depth` layers from `n_in` inputs to `n_out` outputs, put together as a classifier's are."""
    bias, residual = "bias" in kind, "residual" in kind
    rank = 1 if kind == "low rank" else width + 1
    layers = []
    for i in range(depth):
        layer = random_tensor(width, rank, width, seed + i)
        if bias:
            layer = layer.with_bias(*(normal(n, seed=seed + i) for n in (rank, rank, width)))
        layers.append(layer.with_residual() if residual else layer)
    layers[0] = layers[0].change_basis(inputs=normal(width, n_in, seed=seed + 8))
    layers[-1] = layers[-1].change_basis(outputs=normal(n_out, width, seed=seed + 9))
    return layers


def forward(chain: list[BilinearTensor], x: Tensor) -> Tensor:
    for tensor in chain:
        x = tensor(x)
    return x


def dense_chain(chain: list[BilinearTensor]) -> list[Tensor]:
    """Each layer as an array, with an output of 1 if the next layer has a constant."""
    arrays = [dense(tensor) for tensor in chain]
    for i, above in enumerate(chain[1:]):
        if above.constant:
            single = torch.zeros_like(arrays[i][:1])
            single[0, -1, -1] = 1
            arrays[i] = torch.cat([arrays[i], single])
    return arrays


def effective_by_hand(arrays: list[Tensor], u: Tensor) -> list[float]:
    """|effective eigenvalue| of every leaf below u, zeros included, in no order."""
    *below, last = arrays
    values, vectors = torch.linalg.eigh(torch.einsum("o,oij->ij", u, last))
    strengths = values.abs() ** (0.5 ** len(below))
    if not below:
        return strengths.tolist()
    return [
        float(strength) * leaf
        for strength, vector in zip(strengths, vectors.T, strict=True)
        for leaf in effective_by_hand(below, vector)
    ]


def strongest_by_hand(arrays: list[Tensor], directions: Tensor, k: int) -> Tensor:
    every = [value for u in directions for value in effective_by_hand(arrays, u)]
    return torch.tensor(sorted(every, reverse=True)[:k], dtype=torch.float64)
