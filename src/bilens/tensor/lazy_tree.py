"""Deep models: the tree of eigenvectors, opened one node at a time."""

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
from bilens.tensor.spectrum import Spectrum

__all__ = ["LazyTree"]


@exact
class LazyTree:
    """The tree that `decompile` makes whole, of which only what is asked for is decomposed.

    A node is known by the number of its direction, then of each eigenvector, as in `Paths`: (6,) is
    the root of direction 6, (6, 0) its strongest eigenvector. What was opened once is kept.

    Args:
        tensors: one for each layer; each reads what the one before gives.
        directions: u, one vector or a batch of them in the last axis.

    Raises:
        BilensError: the chain is empty or does not fit together, the directions do not fit it, or a
            number is not finite.

    Source:
        Pearce et al. 2024, section 4.2.
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
        directions in what the layer below gives. The first time this costs a decomposition of every
        node on the way that was not opened before.

        Args:
            node: number of the direction, then of each eigenvector.

        Raises:
            BilensError: there is no such node, or it is a leaf.
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

        What a node gives is sum_i lambda_i (v_i . h)^2 over its branches: the logit for a root, and
        its own v . h for every other node.

        Args:
            node: number of the direction, then of each eigenvector.
            x: inputs of the model.

        Raises:
            BilensError: there is no such node, or it is a leaf.
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
                        f"node={name}: its {len(name) - 1}. eigenvector is none of 0 to "
                        f"{above.k - 1}"
                    )
                vector = above.vectors[name[-1]]
            tensor = self._chain.tensors[self.depth - len(name)]
            self._opened[name] = tensor.interaction(vector).eigh()
        return self._opened[name]
