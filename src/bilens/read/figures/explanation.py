"""An input's logits, eigenvector by eigenvector, and features that classes share."""

from collections.abc import Callable, Sequence
from html import escape

import plotly.graph_objects as go
import torch
from torch import Tensor

from bilens.checks import checked
from bilens.data import ImageData
from bilens.read import ClassifierReading, DeepReading, Explanation, SharedFeature, SharedFeatures
from bilens.read.chain import predict
from bilens.read.figures.canvas import Canvas
from bilens.read.figures.style import BLUE, GREY, RED
from bilens.reading import Picture, Section, signed
from bilens.tensor import TensorChain

GAP, BETWEEN, VERDICT, LABEL = 0.06, 0.12, 1.6, 0.34


@checked
def explanation_figure(
    explanation: Explanation, shape: tuple[int, int], class_names: Sequence[str], *, title: str
) -> go.Figure:
    """Draw a row for each of the highest logits: the last layer's eigenvectors for this input.

    Below each is its contribution to the logit; the last column has that of all others, so that
    a row sums to its logit. In a deep model an eigenvector has several pictures, each with
    its share of the eigenvector's input.
    """
    shown = [branch for part in explanation.parts for branch in part.branches]
    deep = any((branch.shares != 1).any() for branch in shown)
    n_branches = max(len(part.branches) for part in explanation.parts)
    k = max(len(branch.shares) for branch in shown)
    aspect, block = shape[0] / shape[1], k * (1 + GAP) - GAP
    step = block + (3 if deep else 1) * BETWEEN
    rise = aspect + (2.4 if deep else 1) * LABEL
    width = 1 + BETWEEN + n_branches * step + VERDICT
    canvas = Canvas(width, rise * len(explanation.parts), unit=90, title=title)
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
        name, end = escape(class_names[part.label]), width - VERDICT / 2
        canvas.label(f"<b>{name}</b>", x=end, y=top, size=13)
        canvas.label(f"logit {signed(part.logit, '.2f')}", x=end, y=top + 0.34 * aspect)
        canvas.label(
            f"rest {signed(part.remainder, '.2f')}", x=end, y=top + 0.64 * aspect, color=GREY
        )
    return canvas.figure()


def explanation_figures(
    reading: ClassifierReading | DeepReading,
    explained: Callable[[Tensor], Explanation],
    shape: tuple[int, int],
) -> dict[str, go.Figure]:
    """Draw the explanations of a clear case, a close call and a mistake, if the model makes any."""
    figures, names, data = {}, reading.data.class_names, reading.data
    for kind, number in _telling_examples(reading.model, data).items():
        label = names[int(data.test_labels[number])]
        title = f"{kind.capitalize()}: test image {number}, labelled {label}"
        explanation = explained(data.test_images[number])
        figures[f"explanation-{kind}"] = explanation_figure(explanation, shape, names, title=title)
    return figures


@torch.no_grad()
def _telling_examples(model: TensorChain, data: ImageData) -> dict[str, int]:
    logits = predict(model, data.test_images).to(data.test_labels.device)
    best = logits.topk(2, dim=-1)
    margin = best.values[:, 0] - best.values[:, 1]
    right = best.indices[:, 0] == data.test_labels
    examples = {"clear": int(torch.where(right, margin, -torch.inf).argmax())}
    if right.any():
        examples["close"] = int(torch.where(right, margin, torch.inf).argmin())
    if (~right).any():
        examples["mistaken"] = int(torch.where(right, -torch.inf, margin).argmax())
    return examples


COLUMNS, STEP, LINE = 4, 1.42, 0.18
SHOWN = 12
LETTERS, LINES = 15, 2
"""Room below a picture: letters of a line, and lines of each sign."""


@checked
def shared_figure(
    shared: SharedFeatures, shape: tuple[int, int], class_names: Sequence[str]
) -> go.Figure:
    """Draw the first few shared features; arrows below name the classes that a feature moves."""
    features = shared.features[:SHOWN]
    aspect = shape[0] / shape[1]
    below = [_below(feature, class_names) for feature in features]
    rise = aspect + LINE * (max(map(len, below)) + 0.5)
    n_rows = -(-len(features) // COLUMNS)
    alt = f"{len(features)} pictures of features, each with the classes that it moves"
    canvas = Canvas(STEP * COLUMNS, rise * n_rows, unit=120, title="", alt=alt)
    for place, (feature, lines) in enumerate(zip(features, below, strict=True)):
        row, column = divmod(place, COLUMNS)
        left, top = STEP * column, rise * row
        canvas.eigenvector(feature.vector, shape, x=left + (STEP - 1) / 2, y=top)
        for number, (text, color, full) in enumerate(lines):
            y = top + aspect + 0.01 + LINE * number
            canvas.label(text, x=left + STEP / 2, y=y, color=color, hover=full)
    return canvas.figure()


def shared_section(shared: SharedFeatures, figure: go.Figure | None, what: str) -> Section:
    """Return the section of `shared_figure`, which may be None.

    Args:
        shared: The features.
        figure: See `shared_figure`.
        what: Name of the vectors that were compared.
    """
    if figure is None:
        text = f"None: no two of the {shared.compared:,} {what} compared are alike."
        return Section("Features shared between classes", text)
    shown = min(SHOWN, len(shared.features))
    text = (
        f"The {shared.compared:,} strongest {what} of all classes, grouped where they are alike up "
        f"to sign, make {shared.groups:,} features. {len(shared.features):,} of them serve more "
        f"than one class and hold {shared.weight:.0%} of the weight. "
        f"{'These are' if shown == len(shared.features) else f'The first {shown} are'} shown, each "
        "with its share of the weight and the classes it takes part in raising (▲) or lowering (▼)."
    )
    return Section("Features shared between classes", text, [[Picture("shared", figure)]])


def _below(feature: SharedFeature, class_names: Sequence[str]) -> list[tuple[str, str, str]]:
    """Lines under a picture: their text, safe for HTML, their colour, and all of it."""
    lines = [(f"{feature.weight:.1%}", GREY, "share of the weight")]
    for raises, sign, color in ((True, "▲", BLUE), (False, "▼", RED)):
        # Each class once, by its heaviest use.
        classes = dict.fromkeys(use.label for use in feature.uses if use.raises == raises)
        names = [escape(class_names[label]) for label in classes]
        text = f"{'raises' if raises else 'lowers'} {', '.join(names)}"
        lines += [(f"{sign} {line}", color, text) for line in _wrapped(names)]
    return lines


def _wrapped(names: Sequence[str]) -> list[str]:
    """Return names in the lines that fit; the last line has the number of the others."""
    lines = [""]
    for number, name in enumerate(names):
        longer = f"{lines[-1]}, {name}" if lines[-1] else name
        if len(longer) <= LETTERS or not lines[-1]:
            lines[-1] = longer
        elif len(lines) < LINES:
            lines.append(name)
        else:
            lines[-1] += f" +{len(names) - number}"
            break
    return lines if names else []
