"""Deep models: the tree of eigenvectors from output directions to the input, whole or opened."""

from collections.abc import Sequence
from dataclasses import replace

import torch
from jaxtyping import Float
from torch import Tensor

from bilens.errors import BilensError
from bilens.tensor.bilinear import BilinearTensor
from bilens.tensor.chain import make_chain
from bilens.tensor.constant import fit_input
from bilens.tensor.exact import exact
from bilens.tensor.paths import Paths, effective_eigenvalues
from bilens.tensor.spectrum import Spectrum

__all__ = ["LEAF_LIMIT", "LazyTree", "decompile"]

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
    each v_i the direction for the layer before: n_in branches at every node. Evaluated on x the
    result equals u . f(x). Branches are counted in the space that a layer reads, such as d_model
    behind an embedding; outside of it every eigenvalue is zero. Follows the dtype of the tensors,
    and is not differentiable.

    Args:
        tensors: one for each layer; each reads what the one before gives.
        directions: u, one vector or a batch of them in the last axis.
        max_leaves: the largest tree to make.

    Raises:
        BilensError: the tree would have more than `max_leaves` leaves, the tensors or directions do
            not fit together, or a number is not finite.

    Source: Pearce et al. 2024, section 4.2.
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


@exact
class LazyTree:
    """The tree that `decompile` makes whole, of which only what is asked for is decomposed.

    A node is known by the number of its direction, then of each eigenvector, as in `Paths`: (6,) is
    the root of direction 6, (6, 0) its strongest eigenvector. Arguments and errors are those of
    `decompile`; no such node, or a leaf, is an error as well.
    """

    def __init__(
        self, tensors: Sequence[BilinearTensor], directions: Float[Tensor, "*batch n_out"]
    ) -> None:
        self._chain = make_chain(tensors, directions)
        self._opened: dict[tuple[int, ...], Spectrum] = {}

    @property
    def depth(self) -> int:
        """Number of layers; a node with that many eigenvectors in its name is a leaf."""
        return self._chain.depth

    @property
    def n_roots(self) -> int:
        """Number of directions."""
        return len(self._chain.directions)

    @torch.no_grad()
    def branches(self, node: Sequence[int]) -> Spectrum:
        """All eigenvectors that a node branches into, the largest |eigenvalue| first.

        Those of the first layer, the leaves, are vectors of the model's inputs; all others are
        directions in what the layer below gives.
        """
        name = tuple(node)
        if not 1 <= len(name) <= self.depth or not 0 <= name[0] < len(self._chain.directions):
            raise BilensError(
                f"node={name}, expected the number of one of {len(self._chain.directions)} "
                f"directions, then of up to {self.depth - 1} eigenvectors"
            )
        spectrum = self._inner(name)
        if len(name) < self.depth:
            return spectrum
        return replace(
            spectrum, vectors=spectrum.vectors @ self._chain.basis, constant=self._chain.constant
        )

    @torch.no_grad()
    def overlaps(
        self, node: Sequence[int], x: Float[Tensor, "samples n_in"]
    ) -> Float[Tensor, "samples k"]:
        """V . h of every branch of a node: its overlap with what the layer below gives for x.

        sum_i lambda_i (v_i . h)^2 over the branches is the logit for a root, and its own v . h for
        every other node.
        """
        spectrum, chain = self.branches(node), self._chain
        h = fit_input(x, chain.basis, chain.constant) @ chain.basis.T
        if len(node) == self.depth:
            return h @ self._inner(tuple(node)).vectors.T
        for tensor in chain.tensors[: self.depth - len(node)]:
            h = tensor(h)
        return h @ spectrum.vectors.T

    def _inner(self, name: tuple[int, ...]) -> Spectrum:
        if name not in self._opened:
            if len(name) == 1:
                vector = self._chain.directions[name[0]]
            else:
                above = self._inner(name[:-1])
                if not 0 <= name[-1] < above.k:
                    raise BilensError(
                        f"node={name} ends in eigenvector {name[-1]}, expected 0 to {above.k - 1}"
                    )
                vector = above.vectors[name[-1]]
            tensor = self._chain.tensors[self.depth - len(name)]
            self._opened[name] = tensor.interaction(vector).eigh()
        return self._opened[name]
