"""Why one input of a model of several layers gets the logits it gets."""

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from bilens.tensor import LazyTree

__all__ = ["BranchExplanation", "DeepExplanation", "DeepLogitExplanation", "explain_deep"]


@dataclass(frozen=True, eq=False)
class BranchExplanation:
    """An eigenvector v of the last layer: what it adds to a logit, and the pictures behind that.

    From v one goes down the tree by the strongest branch for this input, to an eigenvector w of the
    second layer, whose overlap with what the first layer gives is a sum over pictures:
    w . h = sum_i lambda_i (v_i . x)^2, turned so that it is positive.

    Attributes:
        node: numbers of the eigenvectors from the output down to w.
        activation: lambda (v . h)^2, what v adds to the logit.
        shares: of the strongest first-layer eigenvectors v_i in w . h, which all together are 1.
        vectors: those eigenvectors, turned to overlap positively with the input.
    """

    node: tuple[int, ...]
    activation: float
    shares: Float[Tensor, " k"]
    vectors: Float[Tensor, "k n_in"]


@dataclass(frozen=True, eq=False)
class DeepLogitExplanation:
    """The last layer's eigenvectors that make one logit; their activations and rest add up to it.

    Attributes:
        class_: the number of the logit.
        logit: its value.
        branches: the strongest eigenvectors for this input, by magnitude of their activations.
        rest: what all other eigenvectors add.
    """

    class_: int
    logit: float
    branches: tuple[BranchExplanation, ...]
    rest: float


@dataclass(frozen=True, eq=False)
class DeepExplanation:
    """One input and its highest logits, each taken apart.

    Attributes:
        x: the input.
        logits: all of them.
        parts: the highest logits, the highest first.
    """

    x: Float[Tensor, " n_in"]
    logits: Float[Tensor, " classes"]
    parts: tuple[DeepLogitExplanation, ...]


@torch.no_grad()
def explain_deep(
    tree: LazyTree,
    x: Float[Tensor, " n_in"],
    n_classes: int = 3,
    branches: int = 3,
    k: int = 2,
) -> DeepExplanation:
    """Split the highest logits of one input into activations of the last layer's eigenvectors.

    Args:
        tree: of a model of at least two layers, one direction for each class.
        x: the input.
        n_classes: how many logits, the highest first.
        branches: how many eigenvectors of the last layer for each.
        k: how many first-layer eigenvectors for each of these.
    """
    roots = [_activations(tree, (class_,), x) for class_ in range(tree.n_roots)]
    logits = torch.stack([activations.sum() for activations in roots])
    parts = []
    for class_ in logits.argsort(descending=True)[:n_classes].tolist():
        activations = roots[class_]
        strongest = activations.abs().topk(min(branches, len(activations))).indices.tolist()
        parts.append(
            DeepLogitExplanation(
                class_=class_,
                logit=float(logits[class_]),
                branches=tuple(
                    _branch(tree, (class_, i), float(activations[i]), x, k) for i in strongest
                ),
                rest=float(logits[class_] - activations[strongest].sum()),
            )
        )
    return DeepExplanation(x, logits, tuple(parts))


def _activations(tree: LazyTree, node: tuple[int, ...], x: Tensor) -> Tensor:
    return tree.branches(node).values * tree.overlaps(node, x[None])[0].square()


def _branch(
    tree: LazyTree, node: tuple[int, ...], activation: float, x: Tensor, k: int
) -> BranchExplanation:
    while len(node) < tree.depth:
        node = (*node, int(_activations(tree, node, x).abs().argmax()))
    parts = _activations(tree, node, x)
    whole = parts.sum()
    shares = parts / whole if whole != 0 else torch.zeros_like(parts)
    strongest = parts.abs().topk(min(k, len(parts))).indices
    overlaps = tree.overlaps(node, x[None])[0, strongest]
    signs = torch.where(overlaps < 0, -1, 1).to(x)
    vectors = signs[:, None] * tree.branches(node).vectors[strongest]
    return BranchExplanation(node[1:], activation, shares[strongest], vectors)
