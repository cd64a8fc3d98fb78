"""Logits of one input, split by the eigenvectors of the last layer."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import torch
from jaxtyping import Float
from torch import Tensor

from bilens.checks import check_finite, full_precision
from bilens.lazy_imports import pd
from bilens.read.shared import check_classes
from bilens.reading import Fact, Reading
from bilens.settings import Count
from bilens.tensor import LazyTree, Spectrum


@dataclass(frozen=True, eq=False)
class BranchExplanation:
    """Contribution of a last-layer eigenvector v to a logit, with the pictures that cause it.

    In a single-layer model v itself is the picture. In a deeper model the strongest branches for
    this input lead from v to an eigenvector w of the second layer. Its overlap with the first
    layer's output h is a sum over pictures, w . h = sum_i lambda_i (v_i . x)^2, with its sign
    chosen so that it is positive.

    Attributes:
        node: numbers of the eigenvectors from v down to w.
        activation: lambda (v . h)^2, the contribution of v to the logit.
        shares: shares of the strongest pictures in the sum over all pictures, which is 1.
        vectors: the pictures, each with a positive overlap with the input.
    """

    node: tuple[int, ...]
    activation: float
    shares: Float[Tensor, " k"]
    vectors: Float[Tensor, "k n_in"]


@dataclass(frozen=True, eq=False)
class LogitExplanation:
    """One logit as a sum over eigenvectors of the last layer: their activations and a remainder.

    Attributes:
        label: number of the class.
        logit: value of the logit.
        branches: the strongest eigenvectors for this input, by |activation|.
        remainder: sum of the activations of all other eigenvectors.
    """

    label: int
    logit: float
    branches: tuple[BranchExplanation, ...]
    remainder: float


@dataclass(frozen=True, eq=False, repr=False)
class Explanation(Reading):
    """One input with all its logits, and the highest logits split into activations.

    Attributes:
        x: the input.
        logits: all logits.
        parts: the highest logits, the highest first.
    """

    x: Float[Tensor, " n_in"]
    logits: Float[Tensor, " classes"]
    parts: tuple[LogitExplanation, ...]

    axes: ClassVar[dict[str, str]] = {"x": "term", "y": "activation", "color": "class"}
    explanation: ClassVar[str] = (
        "Each logit is the sum of the activations of its eigenvectors, which are numbered from the "
        "largest absolute eigenvalue."
    )

    def facts(self) -> list[Fact]:
        """Return the logits that are split."""
        return [(f"logit of class {part.label}", part.logit) for part in self.parts]

    def frame(self) -> "pd.DataFrame":
        """Return a row for each eigenvector of each logit, and for the sum of all others."""
        rows = [
            (str(part.label), term, activation)
            for part in self.parts
            for term, activation in [
                *((".".join(map(str, b.node)), b.activation) for b in part.branches),
                ("all others", part.remainder),
            ]
        ]
        return pd.DataFrame(rows, columns=["class", "term", "activation"])


@full_precision
@torch.no_grad()
def explain(
    spectrum: Spectrum, x: Float[Tensor, " n_in"], n_classes: Count = 3, k: Count = 5
) -> Explanation:
    """Split the highest logits of one input into eigenvector activations.

    Args:
        spectrum: all eigenvectors, batched over the classes.
        x: the input.
        n_classes: number of logits, the highest first, at most all.
        k: number of eigenvectors of each, at most all.

    Raises:
        BilensError: the spectrum is not a batch over classes, x is not finite, or a number is not
            positive.
    """
    check_classes(spectrum)
    signs = torch.where(spectrum.overlaps(x) < 0, -1, 1).to(spectrum.vectors)

    def branch(label: int, number: int, activation: float) -> BranchExplanation:
        vector = signs[label, number] * spectrum.vectors[label, number]
        return BranchExplanation((number,), activation, signs.new_ones(1), vector[None])

    return _explain(x, list(spectrum.activations(x)), n_classes, k, branch)


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
        tree: tree of a model of at least two layers, with one direction for each class.
        x: the input.
        n_classes: number of logits, the highest first.
        branches: number of last-layer eigenvectors for each logit.
        k: number of first-layer eigenvectors for each of these.

    Raises:
        BilensError: x is not finite, or a number is not positive.
    """
    roots = [_activations(tree, (label,), x) for label in range(tree.n_roots)]

    def branch(label: int, number: int, activation: float) -> BranchExplanation:
        # Follow the strongest child for this input down to the second layer.
        node: tuple[int, ...] = (label, number)
        while len(node) < tree.depth:
            node = (*node, int(_activations(tree, node, x).abs().argmax()))
        parts = _activations(tree, node, x)
        total = parts.sum()
        shares = parts / total if total != 0 else torch.zeros_like(parts)
        strongest = parts.abs().topk(min(k, len(parts))).indices
        signs = torch.where(tree.overlaps(node, x[None])[0, strongest] < 0, -1, 1).to(x)
        vectors = signs[:, None] * tree.branches(node).vectors[strongest]
        return BranchExplanation(node[1:], activation, shares[strongest], vectors)

    return _explain(x, roots, n_classes, branches, branch)


def _activations(tree: LazyTree, node: tuple[int, ...], x: Tensor) -> Float[Tensor, " k"]:
    return tree.branches(node).values * tree.overlaps(node, x[None])[0].square()


def _explain(
    x: Tensor,
    activations: list[Float[Tensor, " eigenvectors"]],
    n_classes: int,
    k: int,
    branch: Callable[[int, int, float], BranchExplanation],
) -> Explanation:
    """Explain the highest logits, given each class's activations and a function for one branch."""
    check_finite(x=x)
    logits = torch.stack([values.sum() for values in activations])
    parts = []
    for label in logits.argsort(descending=True)[:n_classes].tolist():
        values = activations[label]
        strongest = values.abs().topk(min(k, len(values))).indices.tolist()
        branches = tuple(branch(label, i, float(values[i])) for i in strongest)
        remainder = float(logits[label] - values[strongest].sum())
        parts.append(LogitExplanation(label, float(logits[label]), branches, remainder))
    return Explanation(x, logits, tuple(parts))
