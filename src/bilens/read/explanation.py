"""Why one input gets the logits it gets, by the eigenvectors of the last layer."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from bilens.checks import check_finite, full_precision
from bilens.read.classes import check_classes
from bilens.settings import Count
from bilens.tensor import LazyTree, Spectrum

__all__ = ["BranchExplanation", "Explanation", "LogitExplanation", "explain", "explain_deep"]


@dataclass(frozen=True, eq=False)
class BranchExplanation:
    """An eigenvector v of the last layer: what it adds to a logit, and the pictures behind it.

    In a single-layer model v itself is the picture. In a deeper one the strongest branches for this
    input lead from v to an eigenvector w of the second layer, whose overlap with what the first
    layer gives is a sum over pictures, w . h = sum_i lambda_i (v_i . x)^2, turned to be positive.

    Attributes:
        node: numbers of the eigenvectors from v down to w.
        activation: lambda (v . h)^2, what v adds to the logit.
        shares: of the strongest pictures in the sum over all, which is 1.
        vectors: the pictures, turned to overlap positively with the input.
    """

    node: tuple[int, ...]
    activation: float
    shares: Float[Tensor, " k"]
    vectors: Float[Tensor, "k n_in"]


@dataclass(frozen=True, eq=False)
class LogitExplanation:
    """The last layer's eigenvectors that make one logit; their activations and rest add up to it.

    Attributes:
        label: the number of the logit.
        logit: its value.
        branches: the strongest eigenvectors for this input, by |activation|.
        rest: what all other eigenvectors add.
    """

    label: int
    logit: float
    branches: tuple[BranchExplanation, ...]
    rest: float


@dataclass(frozen=True, eq=False)
class Explanation:
    """One input, all its logits, and the highest of them taken apart, the highest first."""

    x: Float[Tensor, " n_in"]
    logits: Float[Tensor, " classes"]
    parts: tuple[LogitExplanation, ...]


@full_precision
@torch.no_grad()
def explain(
    spectrum: Spectrum, x: Float[Tensor, " n_in"], n_classes: Count = 3, k: Count = 5
) -> Explanation:
    """Split the highest logits of one input into eigenvector activations.

    Args:
        spectrum: all eigenvectors, batched over the classes.
        x: the input.
        n_classes: how many logits, the highest first; all of them where there are fewer.
        k: how many eigenvectors of each; all of them where there are fewer.

    Raises:
        BilensError: the spectrum is not a batch over classes, x is not finite, or a number is not
            positive.
    """
    check_classes(spectrum)
    signs = torch.where(spectrum.overlaps(x) < 0, -1, 1).to(spectrum.vectors)

    def branch(label: int, number: int, activation: float) -> BranchExplanation:
        vector = signs[label, number] * spectrum.vectors[label, number]
        return BranchExplanation((number,), activation, signs.new_ones(1), vector[None])

    return _explained(x, list(spectrum.activations(x)), n_classes, k, branch)


@full_precision
@torch.no_grad()
def explain_deep(
    tree: LazyTree,
    x: Float[Tensor, " n_in"],
    n_classes: Count = 3,
    branches: Count = 3,
    k: Count = 2,
) -> Explanation:
    """Split the highest logits of one input of a deep model into the last layer's activations.

    Args:
        tree: of a model of at least two layers, one direction for each class.
        x: the input.
        n_classes: how many logits, the highest first.
        branches: how many eigenvectors of the last layer for each.
        k: how many first-layer eigenvectors for each of these.

    Raises:
        BilensError: x is not finite, or a number is not positive.
    """
    roots = [_activations(tree, (label,), x) for label in range(tree.n_roots)]

    def branch(label: int, number: int, activation: float) -> BranchExplanation:
        node: tuple[int, ...] = (label, number)
        while len(node) < tree.depth:
            node = (*node, int(_activations(tree, node, x).abs().argmax()))
        parts = _activations(tree, node, x)
        whole = parts.sum()
        shares = parts / whole if whole != 0 else torch.zeros_like(parts)
        strongest = parts.abs().topk(min(k, len(parts))).indices
        signs = torch.where(tree.overlaps(node, x[None])[0, strongest] < 0, -1, 1).to(x)
        vectors = signs[:, None] * tree.branches(node).vectors[strongest]
        return BranchExplanation(node[1:], activation, shares[strongest], vectors)

    return _explained(x, roots, n_classes, branches, branch)


def _activations(tree: LazyTree, node: tuple[int, ...], x: Tensor) -> Float[Tensor, " k"]:
    return tree.branches(node).values * tree.overlaps(node, x[None])[0].square()


def _explained(
    x: Tensor,
    activations: list[Tensor],
    n_classes: int,
    k: int,
    branch: Callable[[int, int, float], BranchExplanation],
) -> Explanation:
    """The highest logits, given each class's activations and how one of them is explained."""
    check_finite(x=x)
    logits = torch.stack([some.sum() for some in activations])
    parts = []
    for label in logits.argsort(descending=True)[:n_classes].tolist():
        some = activations[label]
        strongest = some.abs().topk(min(k, len(some))).indices.tolist()
        branches = tuple(branch(label, i, float(some[i])) for i in strongest)
        rest = float(logits[label] - some[strongest].sum())
        parts.append(LogitExplanation(label, float(logits[label]), branches, rest))
    return Explanation(x, logits, tuple(parts))
