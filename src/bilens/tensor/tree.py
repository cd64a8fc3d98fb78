"""Deep models: the tree of eigenvectors from output directions to the input, whole."""

from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from bilens.errors import BilensError
from bilens.tensor.bilinear import BilinearTensor
from bilens.tensor.chain import make_chain
from bilens.tensor.exact import exact
from bilens.tensor.paths import Paths, effective_eigenvalues

__all__ = ["LEAF_LIMIT", "decompile"]

LEAF_LIMIT = 100_000
"""Leaves that `decompile` may make unless the caller says more."""


@exact
@torch.no_grad()
def decompile(
    tensors: Sequence[BilinearTensor],
    directions: Float[Tensor, "*batch n_out"],
    *,
    max_leaves: int = LEAF_LIMIT,
) -> Paths:
    """All eigenvector paths from output directions down to the input, exactly.

    Q_l(v) = sum_i lambda_i v_i v_i' from the last layer to the first, with v = u at the root and
    each v_i the direction for the layer before: n_in branches at every node, which grow
    exponentially with depth. Evaluated on x the result equals u . f(x).

    Where a tensor has the constant coordinate, the one before gets an output that is always 1.
    Branches are counted in the space that a layer reads, such as d_model for a first layer behind
    an embedding; outside of it every eigenvalue is zero. Follows the dtype of the tensors, and is
    not differentiable.

    Args:
        tensors: one for each layer; each reads what the one before gives.
        directions: u, one vector or a batch of them in the last axis.
        max_leaves: the largest tree to make.

    Raises:
        BilensError: the tree would have more than `max_leaves` leaves, the chain is empty or does
            not fit together, the directions do not fit it, or a number is not finite.

    Source:
        Pearce et al. 2024, section 4.2.
    """
    chain = make_chain(tensors, directions)
    if chain.n_leaves > max_leaves:
        raise BilensError(
            f"The whole tree has {chain.n_leaves:,} leaves; the limit is max_leaves="
            f"{max_leaves:,}. Ask for the strongest ones with top_paths(), or raise max_leaves."
        )
    vectors = chain.directions
    names = torch.arange(len(vectors), device=vectors.device)[:, None]
    eigenvalues = vectors.new_empty(len(vectors), 0)
    for tensor in reversed(chain.tensors):
        spectrum = tensor.interaction(vectors).eigh()
        k = spectrum.k
        numbers = torch.arange(k, device=vectors.device).repeat(len(vectors))
        names = torch.cat([names.repeat_interleave(k, 0), numbers[:, None]], 1)
        eigenvalues = torch.cat(
            [eigenvalues.repeat_interleave(k, 0), spectrum.values.reshape(-1, 1)], 1
        )
        vectors = spectrum.vectors.flatten(0, 1)
    order = effective_eigenvalues(eigenvalues).abs().argsort(descending=True, stable=True)
    return Paths(
        directions=directions.to(vectors),
        roots=names[order, 0],
        indices=names[order, 1:],
        eigenvalues=eigenvalues[order],
        vectors=vectors[order] @ chain.basis,
        constant=chain.constant,
    )
