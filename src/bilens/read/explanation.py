"""Logits of one input, split by the eigenvectors of the last layer."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from jaxtyping import Float
from torch import Tensor

from bilens.checks import check_finite, checked, detached
from bilens.data import ImageData
from bilens.lazy_imports import go, pd
from bilens.read.chain import predict
from bilens.read.figures.canvas import BLUE, GREY, RED, Canvas
from bilens.read.shared import check_classes
from bilens.reading import Fact, Reading, plotly_text, signed
from bilens.settings import Count
from bilens.tensor import LazyTree, Spectrum, TensorChain

GAP, BETWEEN, VERDICT, LABEL = 0.06, 0.12, 1.6, 0.34
"""Room between pictures and rows of a drawing, in widths of a picture."""


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


@detached
def explain(
    spectrum: Spectrum, x: Float[Tensor, " n_in"], n_classes: Count = 3, k: Count = 5
) -> Explanation:
    """Split the highest logits of one input into eigenvector activations.

    Args:
        spectrum: all eigenvectors, batched over the classes.
        x: the input.
        n_classes: number of logits, the highest first, at most all.
        k: number of eigenvectors of each, at most all.
    """
    check_classes(spectrum)
    # The activation squares the overlap, so a vector may be turned towards the input.
    signs = torch.where(spectrum.overlaps(x) < 0, -1, 1).to(spectrum.vectors)

    def branch(label: int, number: int, activation: float) -> BranchExplanation:
        vector = signs[label, number] * spectrum.vectors[label, number]
        return BranchExplanation((number,), activation, signs.new_ones(1), vector[None])

    return _explain(x, list(spectrum.activations(x)), n_classes, k, branch)


@detached
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
    """
    # Roots are decomposed for every class, deeper nodes only along the strongest branches.
    roots = [_activations(tree, (label,), x) for label in range(tree.n_roots)]

    def branch(label: int, number: int, activation: float) -> BranchExplanation:
        # Follow the strongest child for this input down to the second layer.
        node: tuple[int, ...] = (label, number)
        while len(node) < tree.depth:
            node = (*node, int(_activations(tree, node, x).abs().argmax()))
        parts = _activations(tree, node, x)
        total = parts.sum()
        # Shares of either sign: branches of a node may cancel.
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
        # By difference, so that the parts add up to the logit.
        remainder = float(logits[label] - values[strongest].sum())
        parts.append(LogitExplanation(label, float(logits[label]), branches, remainder))
    return Explanation(x, logits, tuple(parts))


@checked
def explanation_figure(
    explanation: Explanation, shape: tuple[int, int], class_names: Sequence[str], *, title: str
) -> "go.Figure":
    """Draw a row for each of the highest logits: the last layer's eigenvectors for this input.

    Below each is its contribution to the logit; the last column has that of all others, so that
    a row sums to its logit. In a deep model an eigenvector has several pictures, each with
    its share of the eigenvector's input.
    """
    shown = [branch for part in explanation.parts for branch in part.branches]
    # Only models of several layers have several pictures for an eigenvector.
    deep = any((branch.shares != 1).any() for branch in shown)
    n_branches = max(len(part.branches) for part in explanation.parts)
    k = max(len(branch.shares) for branch in shown)
    aspect, block = shape[0] / shape[1], k * (1 + GAP) - GAP
    step = block + (3 if deep else 1) * BETWEEN
    rise = aspect + (2.4 if deep else 1) * LABEL
    width = 1 + BETWEEN + n_branches * step + VERDICT
    canvas = Canvas(width, rise * len(explanation.parts), unit=90, title=title)
    # The input is beside the middle row, and each row ends with its logit.
    middle = rise * (len(explanation.parts) - 1) / 2
    canvas.image(explanation.x, shape, x=0, y=middle)
    canvas.label("input", x=0.5, y=middle + aspect + 0.02, color=GREY)
    for row, part in enumerate(explanation.parts):
        top = row * rise
        for number, branch in enumerate(part.branches):
            left = 1 + 2 * BETWEEN + number * step
            for place, vector in enumerate(branch.vectors):
                x = left + place * (1 + GAP)
                canvas.eigenvector(vector, shape, x=x, y=top)
                if deep:
                    share = signed(branch.shares[place].item(), ".0%")
                    canvas.label(share, x=x + 0.5, y=top + aspect + 0.01, color=GREY)
            color = BLUE if branch.activation > 0 else RED
            text = signed(branch.activation, ".2f")
            under = top + aspect + 0.01 + (LABEL if deep else 0)
            canvas.label(
                f"<b>{text}</b>" if deep else text, x=left + block / 2, y=under, color=color
            )
        name, end = plotly_text(class_names[part.label]), width - VERDICT / 2
        canvas.label(f"<b>{name}</b>", x=end, y=top, size=13)
        canvas.label(f"logit {signed(part.logit, '.2f')}", x=end, y=top + 0.34 * aspect)
        canvas.label(
            f"rest {signed(part.remainder, '.2f')}", x=end, y=top + 0.64 * aspect, color=GREY
        )
    return canvas.figure()


def explanation_figures(
    model: TensorChain, data: ImageData, explained: Callable[[Tensor], Explanation]
) -> "dict[str, go.Figure]":
    """Draw the explanations of a clear case, a close call and a mistake, if the model makes any."""
    figures, names, shape = {}, data.class_names, data.shape
    for kind, number in _telling_examples(model, data).items():
        label = names[int(data.test_labels[number])]
        title = f"{kind.capitalize()}: test image {number}, labelled {label}"
        explanation = explained(data.test_images[number])
        figures[f"explanation-{kind}"] = explanation_figure(explanation, shape, names, title=title)
    return figures


@torch.no_grad()
def _telling_examples(model: TensorChain, data: ImageData) -> dict[str, int]:
    logits = predict(model, data.test_images).to(data.test_labels.device)
    best = logits.topk(2, dim=-1)
    # The margin to the second logit, and not the logit, tells how sure the model is.
    margin = best.values[:, 0] - best.values[:, 1]
    right = best.indices[:, 0] == data.test_labels
    # A perfect model makes no mistake, and one that is always wrong has no close call.
    examples = {"clear": int(torch.where(right, margin, -torch.inf).argmax())}
    if right.any():
        examples["close"] = int(torch.where(right, margin, torch.inf).argmin())
    if (~right).any():
        examples["mistaken"] = int(torch.where(right, -torch.inf, margin).argmax())
    return examples
