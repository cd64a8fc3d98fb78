"""Deep models: the strongest eigenvector paths, found without making the tree.

A node of the tree is decomposed only if a path below it can still be among the best. The bound on
these paths comes from the weights. Let lambda_i, w_i be the eigenpairs of Q = Q_l(v), and let
no path that continues from a unit vector w into layer l-1 exceed s (w'Ww)^p, with p = (1/2)^(l-1).
Coming from v it gains |lambda_i|^p, and as Q w_i = lambda_i w_i

    |lambda_i| w_i'W w_i = |w_i'Z w_i| <= |Z|   with  Z = (W Q + Q W) / 2,

so no path below v exceeds s |Z|^p for the spectral norm |Z|. Z is linear in v. It is the
interaction matrix of a weighted tensor with the factors

    [L W; L],  [R; R W],  [D, D] / 2.

Hence |Z|_F^2 = v'Gv for the Gram matrix G of that tensor's outputs. So s (v'Gv)^(p/2) bounds the
paths below v in the same form, one layer up. The recursion starts below the first layer with W = 1,
s = 1.
"""

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from einops import einsum
from jaxtyping import Float, Float64
from torch import Tensor

from bilens.checks import check_count, full_precision
from bilens.lazy_imports import pd
from bilens.reading import Fact, Reading
from bilens.tensor.bilinear import BilinearTensor
from bilens.tensor.chain import Chain, make_chain
from bilens.tensor.tree import Paths

SQUARINGS = 3
"""Number of squarings for a tight bound, each a matrix product. On trained digit models a fourth
saved at most one decomposition in two hundred."""


@dataclass(frozen=True, eq=False, repr=False)
class TopPaths(Reading):
    """The strongest paths of a tree, and the cost of the search.

    Attributes:
        paths: exactly the k of largest |effective eigenvalue|, the largest first.
        expanded: number of nodes whose interaction matrix was decomposed, with the directions.
        total: number of nodes with an interaction matrix; `decompile` decomposes all of them.
    """

    paths: Paths
    expanded: int
    total: int

    axes: ClassVar[dict[str, str]] = Paths.axes

    def facts(self) -> list[Fact]:
        """Return the paths, and the nodes that were decomposed."""
        return [*self.paths.facts(), ("nodes decomposed", f"{self.expanded:,} of {self.total:,}")]

    def frame(self) -> "pd.DataFrame":
        """Return a row for each path; see `Paths.frame`."""
        return self.paths.frame()


@full_precision
@torch.no_grad()
def top_paths(
    tensors: Sequence[BilinearTensor], directions: Float[Tensor, "*batch n_out"], k: int
) -> TopPaths:
    """Return the k paths of largest |effective eigenvalue| over all directions, best first.

    A node is decomposed only if an upper bound on the paths below it exceeds the k-th best path so
    far, the highest bound first. A new node's bound comes from Frobenius norms. At the
    head of the queue it gets a bound near the spectral norm, and may be queued again. Ties are
    broken by number. Nodes, dtype, constants and errors are those of `decompile`.

    Args:
        tensors: one for each layer; each reads the outputs of the one before.
        directions: u, one vector or a batch of them in the last axis, which share one ranking.
        k: number of paths.

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

    An entry of the queue holds the negated bound, the node's name to break ties, True for a tight
    bound, and the node.
    """

    def __init__(self, chain: Chain, k: int) -> None:
        self.chain, self.k = chain, k
        self.bounds = _layer_bounds(chain.tensors)
        self.queue: list[tuple[float, tuple[int, ...], bool, _Node]] = []
        self.leaves: list[_Node] = []
        self.expanded = 0

    def run(self) -> None:
        self._enqueue([_Node((i,), (), 1.0, u) for i, u in enumerate(self.chain.directions)])
        while self.queue and -self.queue[0][0] > self._least():
            negative, name, is_tight, node = heapq.heappop(self.queue)
            if is_tight:
                self._expand(node)
            else:
                # The tight bound costs matrix powers. Most nodes never reach the head of the queue.
                tight = node.strength * self.bounds[self._layer(node)].tight(node.vector)
                # A bound may not exceed the one before it, or the order of the queue would break.
                heapq.heappush(self.queue, (max(negative, -tight), name, True, node))

    def _layer(self, node: _Node) -> int:
        """Return the number of the tensor that decomposes the node's vector, from 0."""
        return self.chain.depth - len(node.name)

    def _least(self) -> float:
        """Return the strength that a path has to exceed to be among the best k."""
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
        # Children of the first layer are leaves: pixels have no spectrum of their own.
        if layer > 0:
            self._enqueue(children)
            return
        leaves = self.leaves + children
        self.leaves = sorted(leaves, key=lambda leaf: (-leaf.strength, leaf.name))[: self.k]

    def _enqueue(self, nodes: list[_Node]) -> None:
        """Queue nodes of the same layer."""
        bound = self.bounds[self._layer(nodes[0])]
        quick = bound.quick(torch.stack([node.vector for node in nodes])).tolist()
        for node, reach in zip(nodes, quick, strict=True):
            if node.strength * reach > self._least():
                heapq.heappush(self.queue, (-node.strength * reach, node.name, False, node))


@dataclass(frozen=True, eq=False)
class _LayerBound:
    """Bounds on |effective eigenvalue| / prod |known eigenvalue|^(its power) below directions v.

    Attributes:
        below: s of the layer below.
        power: p = (1/2)^(l-1).
        norm: Frobenius norm of the weighted tensor, the one whose interaction matrices are Z.
        gram: G / norm^2, of trace 1.
        weighted: that tensor, divided by norm.
    """

    below: float
    power: float
    norm: float
    gram: Float64[Tensor, "n_out n_out"]
    weighted: BilinearTensor

    def quick(self, directions: Float[Tensor, "k n_out"]) -> Float64[Tensor, " k"]:
        """Return the bounds from Frobenius norms, for many directions at once: O(n_out^2) each."""
        v = directions.double()
        squares = einsum(v @ self.gram, v, "k o, k o -> k").clamp_min(0)
        # A Gram matrix in float64 knows squares to its rounding only; they must not come out short.
        squares = squares + _rounding(self.gram) * (v**2).sum(-1)
        return self._scaled(squares.sqrt(), v)

    def tight(self, direction: Float[Tensor, " n_out"]) -> float:
        """Return the bound from the matrix, at a fraction of the cost of its eigenvectors."""
        norm = spectral_norm_bound(self.weighted.interaction(direction).dense())
        return float(self._scaled(norm.double(), direction.double()))

    def _scaled(
        self, norms: Float64[Tensor, "*batch"], v: Float64[Tensor, "*batch n_out"]
    ) -> Float64[Tensor, "*batch"]:
        """Return the bound s (norm |Z|)^p, with room for the rounding of eigenvalues."""
        room = _rounding(self.weighted.out) * torch.linalg.vector_norm(v, dim=-1)
        return self.below * (self.norm * (norms + room)) ** self.power


def _layer_bounds(tensors: Sequence[BilinearTensor]) -> list[_LayerBound]:
    """Return the bounds for each layer of a chain, the first layer first."""
    bounds: list[_LayerBound] = []
    weighted, below, power = tensors[0].to(torch.float64), 1.0, 1.0
    for i, tensor in enumerate(tensors):
        if i > 0:
            # The Gram matrix below bounds how much any direction can still grow further down.
            weighted = _weighted(tensor.to(torch.float64), bounds[-1].gram)
        gram = weighted.output_gram()
        square = float(gram.trace())
        norm = square**0.5
        if norm > 0:
            gram = gram / square
            weighted = BilinearTensor(weighted.left, weighted.right, weighted.out / norm)
        bounds.append(_LayerBound(below, power, norm, gram, weighted.to(tensor.out.dtype)))
        below, power = below * norm**power, power / 2
    return bounds


def spectral_norm_bound(
    matrix: Float[Tensor, "n n"], squarings: int = SQUARINGS
) -> Float[Tensor, ""]:
    """Return an upper bound on the largest |eigenvalue| of a symmetric matrix, from its powers.

    |A|_2 <= |A^p|_F^(1/p) <= m^(1/2p) |A|_2 for p = 2^squarings, if A is of rank m: the Schatten
    norm of order 2p.
    """
    bound = matrix.abs().max()
    if bound == 0:
        return bound
    # Powers of the matrix overflow unless each squaring starts from norm 1.
    matrix, power = matrix / bound, 1.0
    norm: Tensor = torch.linalg.matrix_norm(matrix)
    for _ in range(squarings):
        matrix, bound = matrix / norm, bound * norm**power
        matrix, power = matrix @ matrix, power / 2
        norm = torch.linalg.matrix_norm(matrix)
    return bound * norm**power


def _weighted(tensor: BilinearTensor, W: Float64[Tensor, "n_in n_in"]) -> BilinearTensor:
    """Return the tensor whose interaction matrices are (W Q + Q W) / 2."""
    return BilinearTensor(
        torch.cat([tensor.left @ W, tensor.left]),
        torch.cat([tensor.right, tensor.right @ W]),
        torch.cat([tensor.out, tensor.out], 1) / 2,
    )


def _rounding(matrix: Tensor) -> float:
    """Return the relative rounding error of sums over this matrix."""
    return max(matrix.shape) * torch.finfo(matrix.dtype).eps
