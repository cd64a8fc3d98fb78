"""The eigenvector paths of a deep model as a drawn tree, pictures at the leaves."""

import plotly.graph_objects as go

from bilens.errors import BilensError
from bilens.report.canvas import Canvas
from bilens.report.picture import as_image, diverging
from bilens.report.style import BLUE, GREY, RED
from bilens.tensor import Paths

__all__ = ["tree_figure"]

STEP, GAP, THICKEST = 2.6, 0.42, 7.0
MOST = 24
Name = tuple[int, ...]


def tree_figure(paths: Paths, shape: tuple[int, int], *, title: str) -> go.Figure:
    """Draw paths from the direction on the left to first-layer eigenvectors on the right.

    An edge is as thick as its |eigenvalue| is large among those of its layer, blue where it is
    positive and red where it is negative. Under a leaf stands its effective eigenvalue.

    Args:
        paths: of a single direction, few enough to look at.
        shape: height and width of an input as an image.
        title: above the figure.

    Raises:
        BilensError: the paths are of several directions, or more than can be drawn.

    Source:
        Pearce et al. 2024, figures 1C and 6.
    """
    if len(set(paths.roots.tolist())) != 1 or len(paths) > MOST:
        raise BilensError(
            f"tree_figure() draws up to {MOST} paths of one direction; these are {len(paths)} of "
            f"{len(set(paths.roots.tolist()))}. Choose some with paths.truncate() or paths.of()."
        )
    aspect, depth = shape[0] / shape[1], paths.depth
    rows = sorted(range(len(paths)), key=lambda row: paths.indices[row].tolist())
    rise = aspect + GAP
    canvas = Canvas(STEP * depth + 1.05, rise * len(rows), unit=88, title=title)
    height: dict[Name, list[float]] = {}
    eigenvalue: dict[Name, float] = {}
    for place_, row in enumerate(rows):
        names = tuple(paths.indices[row].tolist())
        middle = rise * place_ + aspect / 2
        for length in range(depth + 1):
            height.setdefault(names[:length], []).append(middle)
            if length:
                eigenvalue[names[:length]] = float(paths.eigenvalues[row, length - 1])
        left = STEP * depth
        picture = diverging(as_image(paths.vectors[row], shape))
        canvas.picture(picture, x=left, y=rise * place_, width=1, height=aspect)
        text = f"{float(paths.effective[row]):+.3g}"
        canvas.label(text, x=left + 0.5, y=rise * place_ + aspect, color=GREY)
    for name, value in eigenvalue.items():
        color, x = BLUE if value > 0 else RED, STEP * (len(name) - 1)
        start, end = (sum(ys) / len(ys) for ys in (height[name[:-1]], height[name]))
        width = _thickness(name, eigenvalue)
        canvas.line((x, start), (x + STEP, end), color=color, width=width)
        y = (start + end) / 2
        canvas.label(f"{value:+.2g}", x=x + STEP / 2, y=y, color=color, on_line=True)
    return canvas.figure()


def _thickness(name: Name, eigenvalue: dict[Name, float]) -> float:
    largest = max(abs(v) for other, v in eigenvalue.items() if len(other) == len(name))
    return 1 + (THICKEST - 1) * abs(eigenvalue[name]) / largest if largest else 1.0
