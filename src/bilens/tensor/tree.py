"""Deep models: the tree of eigenvectors from output directions to the input, and its paths.

The strongest paths are found without making the tree. A node of the tree is decomposed only if a
path below it can still be among the best. The bound on
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
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from einops import einsum
from jaxtyping import Float, Float64, Int
from torch import Tensor

from bilens.analysis import Reading
from bilens.checks import check_count, full_precision
from bilens.errors import BilensError
from bilens.lazy_imports import networkx, pd
from bilens.sections import Fact
from bilens.tensor.bilinear import BilinearTensor
from bilens.tensor.chain import Chain, make_chain
from bilens.tensor.factors import fit_input
from bilens.tensor.quadratic import WORKING_BYTES, Spectrum


def effective_eigenvalues(eigenvalues: Float[Tensor, "paths depth"]) -> Float[Tensor, " paths"]:
    """Return lambda_1 prod_{l>1} |lambda_l|^((1/2)^(l-1)) of each row, with layer 1 last.

    Multiplied in float64.

    Source: Pearce et al. 2024, equation 4.
    """
    values = eigenvalues.double()
    powers = 0.5 ** torch.arange(values.shape[1], device=values.device).flip(0)
    return (values[:, -1].sign() * (values.abs() ** powers).prod(-1)).to(eigenvalues)


@full_precision
@dataclass(frozen=True, eq=False, repr=False)
class Paths(Reading):
    """Leaves of an eigenvector tree, the largest |effective eigenvalue| first.

    An eigenvector v of a layer is the direction in which the layer before is decomposed:

        v . h_l = sum_i lambda_i (v_i . h_{l-1})^2,  and at the input  v . h_0 = v . x

    Axes: `paths`, and `depth`, which counts layers from the output to the input. A path is
    identified by its numbers: 0 is the eigenvector of largest |lambda| of its node. All
    eigenvectors are of unit length. Their signs are arbitrary and cancel in the squares.

    Attributes:
        directions: u, the output directions at the roots of the trees.
        roots: number of the direction of each path, counted through the batch.
        indices: the number of each eigenvector among those of its node.
        eigenvalues: lambda of each eigenvector.
        vectors: the eigenvector of the first layer at the end of each path.
        constant: the last input coordinate is the constant 1.

    Source: Pearce et al. 2024, section 4.2 and figure 1. Their layer l is entry depth - l here.
    """

    directions: Float[Tensor, "*batch n_out"]
    roots: Int[Tensor, " paths"]
    indices: Int[Tensor, "paths depth"]
    eigenvalues: Float[Tensor, "paths depth"]
    vectors: Float[Tensor, "paths n_in"]
    constant: bool = False

    axes: ClassVar[dict[str, str]] = {"x": "path", "y": "effective"}

    def facts(self) -> list[Fact]:
        """Return number, depth and the largest effective eigenvalue."""
        facts: list[Fact] = [("paths", len(self)), ("layers", self.depth), ("inputs", self.n_in)]
        if len(self):
            facts.append(("top effective eigenvalue", self.effective[0].item()))
        return facts

    def frame(self) -> "pd.DataFrame":
        """Return a row for each path: its name, direction, effective eigenvalue and eigenvalues."""
        names = [
            " ".join(map(str, [root, *row]))
            for root, row in zip(self.roots.tolist(), self.indices.tolist(), strict=True)
        ]
        values = self.eigenvalues.cpu()
        above = {f"layer {self.depth - i}": values[:, i] for i in range(self.depth)}
        columns = {"path": names, "direction": self.roots.cpu(), "effective": self.effective.cpu()}
        return pd.DataFrame({**columns, **above})

    def __len__(self) -> int:
        """Return the number of paths."""
        return self.roots.shape[0]

    @property
    def depth(self) -> int:
        """Number of layers."""
        return self.indices.shape[1]

    @property
    def n_in(self) -> int:
        """Number of inputs, the constant among them."""
        return self.vectors.shape[1]

    @property
    def batch_shape(self) -> torch.Size:
        """Shape of the batch of directions; empty for a single one."""
        return self.directions.shape[:-1]

    @property
    def effective(self) -> Float[Tensor, " paths"]:
        """Effective eigenvalue of each path; its sign is that of the first layer's eigenvalue.

        The roots magnify rounding: an eigenvalue of the third layer that should be 0 and is 1e-7
        of the largest, as in float32, weighs 2 %. Weak paths of deep models need float64.

        Source: Pearce et al. 2024, equation 4.
        """
        return effective_eigenvalues(self.eigenvalues)

    def truncate(self, k: int) -> "Paths":
        """Return the first k paths, a pruned tree."""
        check_count("k", k, len(self), "the number of paths")
        return self._take(torch.arange(k, device=self.roots.device))

    def of(self, root: int) -> "Paths":
        """Return the paths of one direction, counted through the batch; possibly none."""
        return self._take(torch.nonzero(self.roots == root).flatten())

    def __call__(self, x: Float[Tensor, "*samples n_in"]) -> Float[Tensor, "..."]:
        """Evaluate u . f(x) through these paths only: `samples`, then the batch of directions.

        With all paths of a tree this is the model's output. Samples are processed in blocks, so
        that memory is bounded for any number of them.
        """
        x = fit_input(x, self.vectors, self.constant)
        batch_size = max(1, WORKING_BYTES // (4 * len(self) * self.vectors.element_size()))
        levels = list(self._levels())
        blocks = []
        for block in torch.split(x.reshape(-1, self.n_in), batch_size):
            # From the leaves up: a node's value is the sum over its branches of lambda times a
            # square.
            values = self.vectors @ block.T
            for eigenvalues, parents, n_parents in levels:
                summands = eigenvalues[:, None] * values**2
                values = values.new_zeros(n_parents, len(block)).index_add_(0, parents, summands)
            blocks.append(values.T)
        return torch.cat(blocks).reshape([*x.shape[:-1], *self.batch_shape])

    def _take(self, rows: Int[Tensor, " some"]) -> "Paths":
        return replace(
            self,
            roots=self.roots[rows],
            indices=self.indices[rows],
            eigenvalues=self.eigenvalues[rows],
            vectors=self.vectors[rows],
        )

    def _levels(self) -> Iterator[tuple[Float[Tensor, " nodes"], Int[Tensor, " nodes"], int]]:
        """Yield for each layer, from the first, its nodes' eigenvalues, parents and parent count.

        Nodes are the distinct beginnings of the paths.
        """
        names, eigenvalues = torch.cat([self.roots[:, None], self.indices], 1), self.eigenvalues
        for last in range(self.depth - 1, 0, -1):
            above, parents = torch.unique(names[:, :-1], dim=0, return_inverse=True)
            yield eigenvalues[:, last], parents, len(above)
            # All nodes below a parent share the eigenvalues above it.
            shared = eigenvalues.new_empty(len(above), last)
            shared[parents] = eigenvalues[:, :last]
            names, eigenvalues = above, shared
        yield eigenvalues[:, 0], names[:, 0], self.batch_shape.numel()


@full_precision
def tree_to_networkx(paths: Paths) -> "networkx.DiGraph":
    """Return the tree of the paths, as in figure 1C of the paper; edges point to the input.

    A node's name is the tuple of its direction's number and its eigenvectors' numbers, the last
    layer first. (6,) is the root of direction 6, (6, 0) its strongest eigenvector. Attributes:

        direction: number of the direction, counted through the batch;
        layer: number of the layer of the eigenvector, from 1; depth + 1 for a root;
        eigenvalue: of all but roots; also on the edge that leads to the node;
        effective: effective eigenvalue of a leaf;
        path: row of a leaf in `paths`.

    Nodes and edges are in the order of the paths. A direction without a path has no node.

    Source: Pearce et al. 2024, section 4.2 and figure 1C.
    """
    graph = networkx.DiGraph()
    rows = zip(
        paths.roots.tolist(),
        paths.indices.tolist(),
        paths.eigenvalues.tolist(),
        paths.effective.tolist(),
        strict=True,
    )
    for row, (root, indices, eigenvalues, effective) in enumerate(rows):
        name: tuple[int, ...] = (root,)
        graph.add_node(name, direction=root, layer=paths.depth + 1)
        for below, (index, eigenvalue) in enumerate(zip(indices, eigenvalues, strict=True)):
            above, name = name, (*name, index)
            graph.add_node(name, direction=root, layer=paths.depth - below, eigenvalue=eigenvalue)
            graph.add_edge(above, name, eigenvalue=eigenvalue)
        graph.add_node(name, effective=effective, path=row)
    return graph


LEAF_LIMIT = 100_000
"""Default limit of the number of leaves of `decompile`."""


@full_precision
@torch.no_grad()
def decompile(
    tensors: Sequence[BilinearTensor],
    directions: Float[Tensor, "*batch n_out"],
    *,
    max_leaves: int = LEAF_LIMIT,
) -> Paths:
    """Return all eigenvector paths from output directions down to the input, exactly.

    Q_l(v) = sum_i lambda_i v_i v_i' from the last layer to the first, with v = u at the root. Each
    v_i is the direction for the layer before, so that every node has n_in branches. Evaluated on x
    the result equals u . f(x). Branches are counted in the space that a layer reads, such as
    d_model after an embedding. Outside of it every eigenvalue is zero. Follows the dtype of the
    tensors, and is not differentiable.

    Args:
        tensors: one for each layer; each reads the outputs of the one before.
        directions: u, one vector or a batch of them in the last axis.
        max_leaves: the largest tree to make; a larger one raises BilensError.

    Source: Pearce et al. 2024, section 4.2.
    """
    chain = make_chain(tensors, directions)
    if chain.n_leaves > max_leaves:
        raise BilensError(
            f"The tree has {chain.n_leaves:,} leaves; the limit is max_leaves="
            f"{max_leaves:,}. Ask for the strongest ones with top_paths(), or raise max_leaves."
        )
    vectors = chain.directions
    names = torch.arange(len(vectors), device=vectors.device)[:, None]
    eigenvalues = vectors.new_empty(len(vectors), 0)
    for tensor in reversed(chain.tensors):
        # All nodes of a layer at once, so that their matrices are one batch.
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


@full_precision
class LazyTree:
    """The tree of `decompile`, decomposed only at the nodes that are requested.

    A node is identified by the number of its direction, then of each eigenvector, as in `Paths`:
    (6,) is the root of direction 6, (6, 0) its strongest eigenvector. Arguments and errors are
    those of `decompile`. A node that does not exist, or a leaf, is an error as well.
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
        """Return all eigenvectors below a node, the largest |eigenvalue| first.

        Eigenvectors of the first layer, the leaves, are vectors of the model's inputs. All higher
        ones are directions in the outputs of the layer below.
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
        """Return the overlap v . h of every branch of a node with the output h of the layer below.

        sum_i lambda_i (v_i . h)^2 over the branches is the logit for a root, and the node's v . h
        otherwise.
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
                # A node is opened through the one above, whose eigenvector is its direction.
                vector = above.vectors[name[-1]]
            tensor = self._chain.tensors[self.depth - len(name)]
            self._opened[name] = tensor.interaction(vector).eigh()
        return self._opened[name]


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
