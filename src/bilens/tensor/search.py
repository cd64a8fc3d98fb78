"""Deep models: the strongest eigenvector paths, found without making the tree."""

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from jaxtyping import Float
from torch import Tensor

from bilens.checks import check_count
from bilens.lazy_imports import pd
from bilens.notebook import Shown
from bilens.tensor.bilinear import BilinearTensor
from bilens.tensor.bound import layer_bounds
from bilens.tensor.chain import Chain, make_chain
from bilens.tensor.exact import exact
from bilens.tensor.paths import Paths

__all__ = ["TopPaths", "top_paths"]


@dataclass(frozen=True, eq=False, repr=False)
class TopPaths(Shown):
    """The strongest paths of a tree, and what finding them took.

    Attributes:
        paths: exactly the k of largest |effective eigenvalue|, the largest first.
        expanded: nodes whose interaction matrix was decomposed, the directions among them.
        total: nodes that have one, all of which `decompile` decomposes.
    """

    paths: Paths
    expanded: int
    total: int

    axes: ClassVar[dict[str, str]] = Paths.axes

    def facts(self) -> str:
        """The paths, and what they took."""
        return f"{self.paths.facts()}, {self.expanded:,} of {self.total:,} nodes decomposed"

    def frame(self) -> "pd.DataFrame":
        """A row for each path; see `Paths.frame`."""
        return self.paths.frame()


@exact
@torch.no_grad()
def top_paths(
    tensors: Sequence[BilinearTensor], directions: Float[Tensor, "*batch n_out"], k: int
) -> TopPaths:
    """The k paths of largest |effective eigenvalue| over all directions, by best-first search.

    A node of the tree is decomposed only while an upper bound on what is below it exceeds the k-th
    best path found so far, the highest bound first. A new node's bound comes from Frobenius norms;
    at the head of the queue it gets one near to the spectral norm, and may go back. Equal strengths
    are told apart by their numbers. Nodes, dtype, constants and errors are those of `decompile`.

    Args:
        tensors: one for each layer; each reads what the one before gives.
        directions: u, one vector or a batch of them in the last axis, which share one ranking.
        k: how many paths.

    Source: Pearce et al. 2024, section 4.2 and equation 4.
    """
    chain = make_chain(tensors, directions)
    check_count("k", k, chain.n_leaves, "the number of paths in the tree")
    search = _Search(chain, k)
    search.run()
    leaves = search.leaves
    names = torch.tensor([leaf.name for leaf in leaves], device=chain.directions.device)
    eigenvalues = torch.tensor([leaf.values for leaf in leaves], dtype=torch.float64, device="cpu")
    return TopPaths(
        paths=Paths(
            directions=directions.to(chain.directions),
            roots=names[:, 0],
            indices=names[:, 1:],
            eigenvalues=eigenvalues.to(chain.directions),
            vectors=torch.stack([leaf.vector for leaf in leaves]) @ chain.basis,
            constant=chain.constant,
        ),
        expanded=search.expanded,
        total=chain.n_inner,
    )


@dataclass(frozen=True, eq=False, slots=True)
class _Node:
    """A direction or an eigenvector, and the path that leads to it.

    Attributes:
        name: number of the direction, then of each eigenvector.
        values: eigenvalue of each eigenvector.
        strength: prod |eigenvalue|^((1/2)^(l-1)).
        vector: the direction in which the next layer is decomposed.
    """

    name: tuple[int, ...]
    values: tuple[float, ...]
    strength: float
    vector: Tensor


class _Search:
    """A queue of nodes by upper bound, the highest first, and the best k leaves so far.

    An entry of the queue holds the bound, negated; the node's name, which settles ties; whether
    the bound is the tight one; and the node.
    """

    def __init__(self, chain: Chain, k: int) -> None:
        self.chain, self.k = chain, k
        self.bounds = layer_bounds(chain.tensors)
        self.queue: list[tuple[float, tuple[int, ...], bool, _Node]] = []
        self.leaves: list[_Node] = []
        self.expanded = 0

    def run(self) -> None:
        self._wait([_Node((i,), (), 1.0, u) for i, u in enumerate(self.chain.directions)])
        while self.queue and -self.queue[0][0] > self._least():
            negative, name, is_tight, node = heapq.heappop(self.queue)
            if is_tight:
                self._expand(node)
            else:
                tight = node.strength * self.bounds[self._layer(node)].tight(node.vector)
                heapq.heappush(self.queue, (max(negative, -tight), name, True, node))

    def _layer(self, node: _Node) -> int:
        """Number of the tensor that decomposes the node's vector; the first layer's is 0."""
        return self.chain.depth - len(node.name)

    def _least(self) -> float:
        """What a path has to exceed to be among the best k."""
        return self.leaves[-1].strength if len(self.leaves) == self.k else -1.0

    def _expand(self, node: _Node) -> None:
        layer = self._layer(node)
        spectrum = self.chain.tensors[layer].interaction(node.vector).eigh()
        self.expanded += 1
        children = [
            _Node(
                (*node.name, i),
                (*node.values, value),
                node.strength * abs(value) ** (0.5**layer),
                vector,
            )
            for i, (value, vector) in enumerate(
                zip(spectrum.values.tolist(), spectrum.vectors, strict=True)
            )
        ]
        if layer > 0:
            self._wait(children)
            return
        found = self.leaves + children
        self.leaves = sorted(found, key=lambda leaf: (-leaf.strength, leaf.name))[: self.k]

    def _wait(self, nodes: list[_Node]) -> None:
        """Queue nodes that are in the same layer."""
        bound = self.bounds[self._layer(nodes[0])]
        quick = bound.quick(torch.stack([node.vector for node in nodes])).tolist()
        for node, reach in zip(nodes, quick, strict=True):
            if node.strength * reach > self._least():
                heapq.heappush(self.queue, (-node.strength * reach, node.name, False, node))
