"""Paths of eigenvectors from output directions to the input, and the model that they make."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from jaxtyping import Float, Int
from torch import Tensor

from bilens.checks import check_count
from bilens.lazy_imports import networkx, pd
from bilens.notebook import Shown, signed
from bilens.tensor.constant import fit_input
from bilens.tensor.eigen import WORKING_BYTES
from bilens.tensor.exact import exact

__all__ = ["Paths", "effective_eigenvalues", "tree_to_networkx"]


def effective_eigenvalues(
    eigenvalues: Float[Tensor, "paths depth"],
) -> Float[Tensor, " paths"]:
    """lambda_1 prod_{l>1} |lambda_l|^((1/2)^(l-1)) of each row; layer 1 stands last.

    Multiplied in float64.

    Source: Pearce et al. 2024, equation 4.
    """
    values = eigenvalues.double()
    powers = 0.5 ** torch.arange(values.shape[1], device=values.device).flip(0)
    return (values[:, -1].sign() * (values.abs() ** powers).prod(-1)).to(eigenvalues)


@exact
@dataclass(frozen=True, eq=False, repr=False)
class Paths(Shown):
    """Some or all leaves of an eigenvector tree, the largest |effective eigenvalue| first.

    An eigenvector v of a layer is the direction in which the layer before is decomposed:

        v . h_l = sum_i lambda_i (v_i . h_{l-1})^2,  and at the input  v . h_0 = v . x

    Axes: `paths`, and `depth`, which counts layers from the output to the input. A path is known
    by its numbers: 0 is the eigenvector of largest |lambda| of its node. All eigenvectors are of
    unit length; their signs are arbitrary and cancel in the squares.

    Attributes:
        directions: u, the output directions at the roots of the trees.
        roots: which direction each path comes from, counted through the batch.
        indices: the number of each eigenvector among those of its node.
        eigenvalues: lambda of each eigenvector.
        vectors: the eigenvector of the first layer that each path ends at.
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

    def facts(self) -> str:
        """How many, how deep, and the top effective eigenvalue."""
        top = ""
        if len(self):
            top = f", top effective eigenvalue {signed(self.effective[0].item(), '.4g')}"
        return f"{len(self)} paths through {self.depth} layers of {self.n_in} inputs{top}"

    def frame(self) -> "pd.DataFrame":
        """A row for each path: its name, direction, effective eigenvalue and eigenvalues."""
        names = [
            " ".join(map(str, [root, *row]))
            for root, row in zip(self.roots.tolist(), self.indices.tolist(), strict=True)
        ]
        values = self.eigenvalues.cpu()
        above = {f"layer {self.depth - i}": values[:, i] for i in range(self.depth)}
        columns = {"path": names, "direction": self.roots.cpu(), "effective": self.effective.cpu()}
        return pd.DataFrame({**columns, **above})

    def __len__(self) -> int:
        """Number of paths."""
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
        """The first k paths, a pruned tree."""
        check_count("k", k, len(self), "the number of paths")
        return self._take(torch.arange(k, device=self.roots.device))

    def of(self, root: int) -> "Paths":
        """The paths of one direction, counted through the batch; there may be none."""
        return self._take(torch.nonzero(self.roots == root).flatten())

    def __call__(self, x: Float[Tensor, "*samples n_in"]) -> Float[Tensor, "..."]:
        """Evaluate u . f(x) through these paths alone: `samples`, then the batch of directions.

        With all paths of a tree this is what the model computes. Samples are done in blocks, so
        that memory is bounded whatever their number.
        """
        x = fit_input(x, self.vectors, self.constant)
        batch_size = max(1, WORKING_BYTES // (4 * len(self) * self.vectors.element_size()))
        levels = list(self._levels())
        blocks = []
        for some in torch.split(x.reshape(-1, self.n_in), batch_size):
            values = self.vectors @ some.T
            for eigenvalues, parents, n_parents in levels:
                summands = eigenvalues[:, None] * values**2
                values = values.new_zeros(n_parents, len(some)).index_add_(0, parents, summands)
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
        """For each layer, the first one first: eigenvalues of its nodes, and which node is above.

        Nodes are the distinct beginnings of the paths.
        """
        names, eigenvalues = torch.cat([self.roots[:, None], self.indices], 1), self.eigenvalues
        for last in range(self.depth - 1, 0, -1):
            above, parents = torch.unique(names[:, :-1], dim=0, return_inverse=True)
            yield eigenvalues[:, last], parents, len(above)
            # All nodes below one parent hold the same eigenvalues above themselves.
            shared = eigenvalues.new_empty(len(above), last)
            shared[parents] = eigenvalues[:, :last]
            names, eigenvalues = above, shared
        yield eigenvalues[:, 0], names[:, 0], self.batch_shape.numel()


@exact
def tree_to_networkx(paths: Paths) -> "networkx.DiGraph":
    """The tree that the paths make, as in figure 1C of the paper; edges go towards the input.

    A node's name is the tuple of its direction's number and of its eigenvectors' numbers from the
    last layer on: (6,) is the root of direction 6, (6, 0) its strongest eigenvector. Nodes carry

        direction: number of the direction, counted through the batch;
        layer: whose eigenvector it is, 1 for the first layer, depth + 1 for a root;
        eigenvalue: of all but roots; also on the edge that leads to the node;
        effective: effective eigenvalue of a leaf;
        path: row of a leaf in `paths`, where its vector is.

    Nodes and edges stand in the order of the paths. A direction without a path has no node.

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
