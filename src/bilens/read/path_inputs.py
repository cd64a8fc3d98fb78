"""The strongest paths of a class, with the images that each of their eigenvectors reacts to."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float
from torch import Tensor

from bilens.tensor import LazyTree, Paths

__all__ = ["ClassPaths", "class_paths"]


@dataclass(frozen=True, eq=False)
class ClassPaths:
    """Some paths of one class.

    Attributes:
        paths: of the class alone; each last eigenvector is turned to resemble its inputs.
        inputs: for every eigenvector on them, known by its numbers from the output down, the
            inputs of largest overlap with it, |v . h|, the largest first.
    """

    paths: Paths
    inputs: Mapping[tuple[int, ...], Float[Tensor, "k n_in"]]


@torch.no_grad()
def class_paths(
    tree: LazyTree, paths: Paths, x: Float[Tensor, "samples n_in"], k: int = 3
) -> ClassPaths:
    """Look for the inputs that the eigenvectors of some paths react to most.

    Every node on the way is decomposed, if the tree has not done it yet.

    Args:
        tree: of the model that the paths are of.
        paths: of a single class, few enough to look at.
        x: inputs to choose from.
        k: inputs of each eigenvector.
    """
    vectors, inputs = paths.vectors.clone(), {}
    overlaps = {}
    for row, (root, indices) in enumerate(
        zip(paths.roots.tolist(), paths.indices.tolist(), strict=True)
    ):
        for length in range(paths.depth):
            node, name = (root, *indices[:length]), tuple(indices[: length + 1])
            if node not in overlaps:
                overlaps[node] = tree.overlaps(node, x)
            found = overlaps[node][:, indices[length]]
            best = found.abs().topk(min(k, len(x))).indices
            inputs[name] = x[best]
        # Of the eigenvector in the tree; the one in the paths may be its opposite.
        sides = torch.sign(x[best] @ vectors[row, : x.shape[1]])
        vectors[row] *= 1 if sides.sum() >= 0 else -1
    return ClassPaths(replace(paths, vectors=vectors), inputs)
