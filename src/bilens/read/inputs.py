"""Which inputs an eigenvector reacts to most."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float, Int
from torch import Tensor

from bilens.checks import check_count, check_finite, full_precision
from bilens.settings import Count
from bilens.tensor import LazyTree, Paths, Spectrum

__all__ = ["ClassPaths", "class_paths", "top_inputs"]

BLOCK = 1024
"""Samples in memory together."""


@full_precision
def top_inputs(
    spectrum: Spectrum, x: Float[Tensor, "samples n_in"], k: int = 3
) -> Int[Tensor, "*batch eigenvectors k"]:
    """Indices of the k inputs of largest |activation| for every eigenvector, the strongest first.

    Samples pass in blocks and only the best so far are kept, so any number of them fits.

    Raises:
        BilensError: there are fewer than k samples, or one is not finite.
    """
    check_count("k", k, len(x), "the number of samples in x")
    check_finite(x=x)
    best = spectrum.values.new_empty(0, *spectrum.values.shape)
    where = torch.empty(best.shape, dtype=torch.long, device=best.device)
    for start in range(0, len(x), BLOCK):
        strength = spectrum.overlaps(x[start : start + BLOCK]).abs()
        numbers = torch.arange(start, start + len(strength), device=best.device)
        numbers = numbers.reshape(-1, *[1] * (strength.ndim - 1)).expand_as(strength)
        best, where = torch.cat([best, strength]), torch.cat([where, numbers])
        best, kept = best.topk(min(k, len(best)), dim=0)
        where = where.gather(0, kept)
    return where.movedim(0, -1)


@dataclass(frozen=True, eq=False)
class ClassPaths:
    """Some paths of one class, each last eigenvector turned to resemble its inputs.

    `inputs` holds, for every eigenvector by its numbers from the output down, the inputs of largest
    overlap with it, |v . h|, the largest first.
    """

    paths: Paths
    inputs: Mapping[tuple[int, ...], Float[Tensor, "k n_in"]]


@torch.no_grad()
@full_precision
def class_paths(
    tree: LazyTree, paths: Paths, x: Float[Tensor, "samples n_in"], k: Count = 3
) -> ClassPaths:
    """Look for the inputs that the eigenvectors of some paths react to most.

    The paths are of a single class. Every node on the way is decomposed, if the tree has not done
    it yet.
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
        sides = torch.sign(x[best] @ vectors[row, : x.shape[1]].to(x))
        vectors[row] *= 1 if sides.sum() >= 0 else -1
    return ClassPaths(replace(paths, vectors=vectors), inputs)
