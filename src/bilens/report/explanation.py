"""One input, its three highest logits, and the eigenvectors that make each."""

from collections.abc import Sequence
from html import escape

import plotly.graph_objects as go

from bilens.read import Explanation
from bilens.report.canvas import Canvas
from bilens.report.picture import as_image, diverging, grey
from bilens.report.style import BLUE, GREY, RED

__all__ = ["explanation_figure"]

GAP, LABEL, VERDICT = 0.12, 0.34, 1.6


def explanation_figure(
    explanation: Explanation,
    shape: tuple[int, int],
    class_names: Sequence[str],
    *,
    title: str,
) -> go.Figure:
    """Three rows, one for each of the highest logits: its strongest eigenvectors for this input.

    Under each picture stands what the eigenvector adds to the logit; the last column gives what
    all others add, so that a row sums to its logit.
    """
    k = max(len(part.activations) for part in explanation.parts)
    aspect = shape[0] / shape[1]
    step, rise = 1 + GAP, aspect + LABEL
    width = step * (k + 1) + VERDICT
    canvas = Canvas(width, rise * len(explanation.parts), unit=92, title=title)
    middle = rise * (len(explanation.parts) - 1) / 2
    picture = grey(as_image(explanation.x, shape))
    canvas.picture(picture, x=0, y=middle, width=1, height=aspect)
    canvas.label("input", x=0.5, y=middle + aspect + 0.02, color=GREY)
    for row, part in enumerate(explanation.parts):
        top = row * rise
        for column, (activation, vector) in enumerate(
            zip(part.activations.tolist(), part.vectors, strict=True), start=1
        ):
            left = step * column + 0.1
            picture = diverging(as_image(vector, shape))
            canvas.picture(picture, x=left, y=top, width=1, height=aspect)
            color = BLUE if activation > 0 else RED
            canvas.label(f"{activation:+.2f}", x=left + 0.5, y=top + aspect + 0.01, color=color)
        name = escape(class_names[part.class_])
        end = step * (k + 1) + VERDICT / 2
        canvas.label(f"<b>{name}</b>", x=end, y=top, size=13)
        canvas.label(f"logit {part.logit:+.2f}", x=end, y=top + 0.34 * aspect)
        canvas.label(f"rest {part.rest:+.2f}", x=end, y=top + 0.64 * aspect, color=GREY)
    canvas.scale()
    return canvas.figure()
