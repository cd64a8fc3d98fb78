"""Pictures of an input with the eigenvectors that make its logits, and of shared features."""

from collections.abc import Sequence
from functools import partial

import torch

from bilens.checks import checked
from bilens.data import ImageData
from bilens.errors import BilensError
from bilens.figures.canvas import Canvas
from bilens.figures.sheet import BLUE, GREY, RED, Figure
from bilens.images.chain import predict
from bilens.images.explanation import Explanation, SharedFeature, SharedFeatures, explain
from bilens.pages.layout import plot_of, table_plot
from bilens.sections import Picture, Section, signed
from bilens.tensor import Spectrum, TensorChain

SHOWN = 12


@checked
def shared_figure(
    shared: SharedFeatures, shape: tuple[int, int], class_names: Sequence[str]
) -> Figure:
    """Draw the first few shared features; arrows below name the classes that a feature moves."""
    features = shared.features[:SHOWN]
    aspect = shape[0] / shape[1]
    below = [_below(feature, class_names) for feature in features]
    # All pictures have room for the longest text, so that rows are level.
    n_columns, line_height, step_width = 4, 0.18, 1.42
    rise = aspect + line_height * (max(map(len, below)) + 0.5)
    n_rows = -(-len(features) // n_columns)
    alt = f"{len(features)} pictures of features, each with the classes that it moves"
    canvas = Canvas(step_width * n_columns, rise * n_rows, unit=120, title="", alt=alt)
    for place, (feature, lines) in enumerate(zip(features, below, strict=True)):
        row, column = divmod(place, n_columns)
        left, top = step_width * column, rise * row
        canvas.eigenvector(feature.vector, shape, x=left + (step_width - 1) / 2, y=top)
        for i, (text, color) in enumerate(lines):
            y = top + aspect + 0.03 + line_height * i
            canvas.label(text, x=left + step_width / 2, y=y, color=color)
    return canvas.figure()


def shared_section(
    shared: SharedFeatures, shape: tuple[int, int], class_names: Sequence[str], what: str
) -> Section:
    """Return the section of `shared_figure`; `what` names the vectors."""
    if not shared.features:
        text = f"None: no two of the {shared.compared:,} {what} compared are alike."
        return Section("Features shared between classes", text)
    count = min(SHOWN, len(shared.features))
    text = (
        f"The {shared.compared:,} strongest {what} of all classes, grouped where they are alike up "
        f"to sign, make {shared.groups:,} features. {len(shared.features):,} of them serve more "
        f"than one class and hold {shared.weight:.0%} of the weight. "
        f"{'These are' if count == len(shared.features) else f'The first {count} are'} shown, each "
        "with its share of the weight and the classes it takes part in raising (▲) or lowering (▼)."
    )
    picture = Picture("shared", partial(shared_figure, shared, shape, class_names))
    return Section("Features shared between classes", text, [[picture]])


def _below(feature: SharedFeature, class_names: Sequence[str]) -> list[tuple[str, str]]:
    """Return the lines under a picture, with their colours."""
    lines = [(f"{feature.weight:.1%}", GREY)]
    for raises, sign, color in ((True, "▲", BLUE), (False, "▼", RED)):
        names = [class_names[label] for label in feature.labels(raises=raises)]
        lines += [(f"{sign} {line}", color) for line in _wrapped(names)]
    return lines


def _wrapped(names: Sequence[str]) -> list[str]:
    """Return names in the lines that fit; the last line has the number of the others."""
    lines = [""]
    for i, name in enumerate(names):
        longer = f"{lines[-1]}, {name}" if lines[-1] else name
        if len(longer) <= 15 or not lines[-1]:
            lines[-1] = longer
        elif len(lines) < 2:
            lines.append(name)
        else:
            lines[-1] += f" +{len(names) - i}"
            break
    return lines if names else []


@plot_of.register
def explanation_plot(reading: Explanation) -> Figure:
    """Draw an image, and the eigenvectors that move its highest logits most."""
    if reading.shape is None:
        return table_plot(reading)
    return explanation_figure(reading, reading.shape, reading.class_names, title=reading.title)


@checked
def explanation_figure(
    explanation: Explanation, shape: tuple[int, int], class_names: Sequence[str], *, title: str
) -> Figure:
    """Draw a row for each of the highest logits: the strongest eigenvectors for this input.

    Below each is its contribution to the logit; the last column has that of all others, so that
    a row sums to its logit.
    """
    if len(class_names) != len(explanation.logits):
        raise BilensError(
            f"class_names has {len(class_names)} names, expected {len(explanation.logits)}"
        )
    n_columns = max(len(part.numbers) for part in explanation.parts)
    between = 0.12
    aspect, step = shape[0] / shape[1], 1 + between
    # In widths of a picture: room between pictures, and beside a row.
    verdict = 1.6
    rise, width = aspect + 0.34, 1 + between + n_columns * step + verdict
    canvas = Canvas(width, rise * len(explanation.parts), unit=90, title=title)
    # The input is beside the middle row, and each row ends with its logit.
    middle = rise * (len(explanation.parts) - 1) / 2
    canvas.image(explanation.x, shape, x=0, y=middle)
    canvas.label("input", x=0.5, y=middle + aspect + 0.02, color=GREY)
    for row, part in enumerate(explanation.parts):
        top = row * rise
        for column, activation in enumerate(part.activations.tolist()):
            left = 1 + 2 * between + column * step
            canvas.eigenvector(part.vectors[column], shape, x=left, y=top)
            color = BLUE if activation > 0 else RED
            text = signed(activation, ".2f")
            canvas.label(text, x=left + 0.5, y=top + aspect + 0.03, color=color)
        name, end = class_names[part.label], width - verdict / 2
        canvas.label(name, x=end, y=top, size=13, bold=True)
        canvas.label(f"logit {signed(part.logit, '.2f')}", x=end, y=top + 0.34 * aspect)
        remainder = f"rest {signed(part.remainder, '.2f')}"
        canvas.label(remainder, x=end, y=top + 0.64 * aspect, color=GREY)
    return canvas.figure()


def explanation_pictures(model: TensorChain, data: ImageData, spectrum: Spectrum) -> list[Picture]:
    """Return the explanations of a clear case, a close call and a mistake, if there are any."""
    pictures = []
    for kind, i in _telling_examples(model, data).items():
        label = data.class_names[int(data.test_labels[i])]
        title = f"{kind.capitalize()}: test image {i}, labelled {label}"

        def draw(i: int = i, title: str = title) -> Figure:
            explanation = explain(spectrum, data.test_images[i])
            return explanation_figure(explanation, data.shape, data.class_names, title=title)

        pictures.append(Picture(f"explanation-{kind}", draw))
    return pictures


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
