"""Eigenvector paths as a graph of networkx."""

from typing import TYPE_CHECKING

from bilens.lazy_imports import lazy_import
from bilens.tensor.exact import exact
from bilens.tensor.paths import Paths

if TYPE_CHECKING:
    import networkx  # type: ignore[import-untyped]
else:
    networkx = lazy_import("networkx")

__all__ = ["tree_to_networkx"]


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

    Source:
        Pearce et al. 2024, section 4.2 and figure 1C.
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
