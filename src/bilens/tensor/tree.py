"""Deep models: the tree of eigenvectors from output directions to the input, and its paths."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from jaxtyping import Float, Int
from torch import Tensor

from bilens.analysis import Reading
from bilens.checks import check_count, checked, detached
from bilens.errors import BilensError
from bilens.sections import Columns, Fact
from bilens.tensor.bilinear import BilinearTensor
from bilens.tensor.chain import count_leaves, minimal_chain
from bilens.tensor.factors import fit_input
from bilens.tensor.quadratic import WORKING_BYTES


def effective_eigenvalues(eigenvalues: Float[Tensor, "paths depth"]) -> Float[Tensor, " paths"]:
    """Return lambda_1 prod_{l>1} |lambda_l|^((1/2)^(l-1)) of each row, with layer 1 last.

    Multiplied in float64.

    Source: Pearce et al. 2024, equation 4.
    """
    values = eigenvalues.double()
    powers = 0.5 ** torch.arange(values.shape[1], device=values.device).flip(0)
    return (values[:, -1].sign() * (values.abs() ** powers).prod(-1)).to(eigenvalues)


@checked
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
        facts: list[Fact] = [("paths", len(self)), ("layers", self.depth), ("inputs", self.n_in)]
        if len(self):
            facts.append(("top effective eigenvalue", self.effective[0].item()))
        return facts

    def columns(self) -> Columns:
        """Return a row for each path: its name, direction, effective eigenvalue and eigenvalues."""
        names = [
            " ".join(map(str, [root, *row]))
            for root, row in zip(self.roots.tolist(), self.indices.tolist(), strict=True)
        ]
        columns = {
            "path": names,
            "direction": self.roots.tolist(),
            "effective": self.effective.tolist(),
        }
        layers = [f"layer {i}" for i in range(self.depth, 0, -1)]
        return columns | dict(zip(layers, self.eigenvalues.T.tolist(), strict=True))

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
        batch_size = max(1, WORKING_BYTES // (4 * max(1, len(self)) * self.vectors.element_size()))
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
            values = eigenvalues.new_empty(len(above), last)
            values[parents] = eigenvalues[:, :last]
            names, eigenvalues = above, values
        yield eigenvalues[:, 0], names[:, 0], self.batch_shape.numel()


@detached
def decompile(
    tensors: Sequence[BilinearTensor],
    directions: Float[Tensor, "*batch n_out"],
    k: int | None = None,
    *,
    max_leaves: int = 1_000_000,
) -> Paths:
    """Return the eigenvector paths from output directions down to the input, the strongest first.

    Q_l(v) = sum_i lambda_i v_i v_i' from the last layer to the first, with v = u at the root. Each
    v_i is the direction for the layer before, so that every node has n_in branches. All paths
    evaluated on x equal u . f(x). Branches are counted in the space that a layer reads, such as
    d_model after an embedding. Outside of it every eigenvalue is zero. Ties are broken by number.
    Follows the dtype of the tensors, and is not differentiable.

    Time grows with the tree. With `k` memory does not: leaves are decomposed in blocks, of which
    the k strongest over all directions are kept.

    Args:
        tensors: one for each layer; each reads the outputs of the one before.
        directions: u, one vector or a batch of them in the last axis.
        k: number of paths; by default all.
        max_leaves: the largest tree to make; a larger one raises BilensError.

    Source: Pearce et al. 2024, section 4.2.
    """
    chain, basis = minimal_chain(tensors, directions)
    n_leaves = count_leaves(chain, directions)
    if n_leaves > max_leaves:
        # Python writes out no number of thousands of digits.
        count = f"{n_leaves:,}" if n_leaves < 10**15 else f"10^{math.log10(n_leaves):.0f}"
        raise BilensError(
            f"The tree has {count} leaves, expected at most {max_leaves:,}, which decompile(..., "
            "max_leaves) sets in Python. `bilens bonds` describes such a model without a tree."
        )
    if k is not None:
        check_count("k", k, n_leaves, "the number of paths in the tree")
    roots = directions.to(chain[-1].out).reshape(-1, directions.shape[-1])
    numbers = torch.arange(len(roots), device=roots.device)
    nodes = _Nodes(numbers[:, None], roots.new_empty(len(roots), 0), roots)
    first, *others = chain
    for tensor in reversed(others):
        nodes = nodes.children(tensor)
    # A node has a matrix and its eigenvectors, of n_in x n_in numbers each.
    block = max(1, WORKING_BYTES // (4 * first.n_in**2 * roots.element_size()))
    blocks: list[_Nodes] = []
    for start in range(0, len(nodes.vectors), block):
        blocks.append(nodes.take(slice(start, start + block)).children(first))
        if k is not None:
            strongest = _joined(blocks)
            blocks = [strongest.take(strongest.order()[:k])]
    leaves = _joined(blocks)
    leaves = leaves.take(leaves.order())
    return Paths(
        directions=directions.to(roots),
        roots=leaves.names[:, 0],
        indices=leaves.names[:, 1:],
        eigenvalues=leaves.eigenvalues,
        vectors=leaves.vectors @ basis,
        constant=chain[0].constant,
    )


@dataclass(frozen=True, eq=False)
class _Nodes:
    """Nodes of one layer of a tree.

    Attributes:
        names: number of the direction, then of each eigenvector, the last layer first.
        eigenvalues: eigenvalue of each eigenvector.
        vectors: the last eigenvector, or the direction.
    """

    names: Int[Tensor, "nodes depth+1"]
    eigenvalues: Float[Tensor, "nodes depth"]
    vectors: Float[Tensor, "nodes n"]

    def children(self, tensor: BilinearTensor) -> "_Nodes":
        """Return the eigenvectors of each node's interaction matrix."""
        # All nodes at once, so that their matrices are one batch.
        spectrum = tensor.interaction(self.vectors).eigh()
        numbers = torch.arange(spectrum.k, device=self.names.device).repeat(len(self.names))
        above = self.names.repeat_interleave(spectrum.k, 0)
        values = self.eigenvalues.repeat_interleave(spectrum.k, 0)
        return _Nodes(
            torch.cat([above, numbers[:, None]], 1),
            torch.cat([values, spectrum.values.reshape(-1, 1)], 1),
            spectrum.vectors.flatten(0, 1),
        )

    def order(self) -> Int[Tensor, " nodes"]:
        """Return the rows by |effective eigenvalue|, the largest first."""
        strengths = effective_eigenvalues(self.eigenvalues).abs()
        return strengths.argsort(descending=True, stable=True)

    def take(self, rows: slice | Int[Tensor, " some"]) -> "_Nodes":
        return _Nodes(self.names[rows], self.eigenvalues[rows], self.vectors[rows])


def _joined(blocks: Sequence[_Nodes]) -> _Nodes:
    return _Nodes(
        torch.cat([block.names for block in blocks]),
        torch.cat([block.eigenvalues for block in blocks]),
        torch.cat([block.vectors for block in blocks]),
    )
