"""One input of a deep model, its three highest logits, and the eigenvectors that make each."""

from collections.abc import Sequence
from html import escape

import plotly.graph_objects as go

from bilens.read import DeepExplanation
from bilens.report.canvas import Canvas
from bilens.report.picture import as_image, diverging, grey
from bilens.report.style import BLUE, GREY, RED

__all__ = ["deep_explanation_figure"]

GAP, BETWEEN, VERDICT = 0.06, 0.34, 1.6
LABEL, SUM = 0.32, 0.46


def deep_explanation_figure(
    explanation: DeepExplanation,
    shape: tuple[int, int],
    class_names: Sequence[str],
    *,
    title: str,
) -> go.Figure:
    """A row for each of the highest logits: the last layer's eigenvectors, as pictures below them.

    Pictures that stand together belong to one eigenvector of the last layer. Under each stands its
    share in what that eigenvector finds in the input, and under them what the eigenvector adds to
    the logit; the last column gives what all others add, so that a row sums to its logit.

    Args:
        explanation: of one input.
        shape: height and width of an input as an image.
        class_names: what the classes are called.
        title: above the figure.
    """
    branches = max(len(part.branches) for part in explanation.parts)
    k = max(len(branch.shares) for part in explanation.parts for branch in part.branches)
    aspect, block = shape[0] / shape[1], k * (1 + GAP) - GAP
    rise = aspect + LABEL + SUM
    width = 1 + branches * (block + BETWEEN) + VERDICT
    canvas = Canvas(width, rise * len(explanation.parts), unit=88, title=title)
    middle = rise * (len(explanation.parts) - 1) / 2
    canvas.picture(grey(as_image(explanation.x, shape)), x=0, y=middle, width=1, height=aspect)
    canvas.label("input", x=0.5, y=middle + aspect + 0.02, color=GREY)
    for row, part in enumerate(explanation.parts):
        top = row * rise
        for number, branch in enumerate(part.branches):
            left = 1 + BETWEEN + number * (block + BETWEEN)
            for place, (share, vector) in enumerate(
                zip(branch.shares.tolist(), branch.vectors, strict=True)
            ):
                x = left + place * (1 + GAP)
                picture = diverging(as_image(vector, shape))
                canvas.picture(picture, x=x, y=top, width=1, height=aspect)
                canvas.label(f"{share:+.0%}", x=x + 0.5, y=top + aspect + 0.01, color=GREY)
            color = BLUE if branch.activation > 0 else RED
            text = f"<b>{branch.activation:+.2f}</b>"
            canvas.label(text, x=left + block / 2, y=top + aspect + LABEL, color=color)
        name, end = escape(class_names[part.class_]), width - VERDICT / 2
        canvas.label(f"<b>{name}</b>", x=end, y=top, size=13)
        canvas.label(f"logit {part.logit:+.2f}", x=end, y=top + 0.34 * aspect)
        canvas.label(f"rest {part.rest:+.2f}", x=end, y=top + 0.64 * aspect, color=GREY)
    canvas.scale()
    return canvas.figure()
