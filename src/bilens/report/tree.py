"""The eigenvector paths of a deep model as a drawn tree, pictures at the leaves."""

from collections.abc import Mapping
from html import escape

import plotly.graph_objects as go
from jaxtyping import Float
from torch import Tensor

from bilens.checks import checked
from bilens.errors import BilensError
from bilens.reading import signed
from bilens.report.canvas import THUMB, Canvas
from bilens.report.style import BLUE, GREY, RED
from bilens.tensor import Paths

__all__ = ["tree_figure"]

STEP, GAP, THICKEST = 2.4, 0.42, 7.0
ROOT, MOST = 0.5, 24
Name = tuple[int, ...]


@checked
def tree_figure(
    paths: Paths,
    shape: tuple[int, int],
    *,
    title: str,
    root: str = "",
    inputs: Mapping[Name, Float[Tensor, "k n_in"]] | None = None,
) -> go.Figure:
    """Draw paths from the direction on the left to first-layer eigenvectors on the right.

    An edge is as thick as its |eigenvalue| is large among those of its layer, blue where it is
    positive and red where it is negative. Under a leaf stands its effective eigenvalue.

    `root` is what the direction is called, `inputs` up to three images to show beside each
    eigenvector, as `class_paths` finds them.

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
    inputs = inputs or {}
    aspect, depth = shape[0] / shape[1], paths.depth
    thumb = THUMB if inputs else 0.0
    rows = sorted(range(len(paths)), key=lambda row: paths.indices[row].tolist())
    rise, leaf = aspect + GAP, ROOT + STEP * depth
    canvas = Canvas(leaf + 1.05 + thumb, rise * len(rows), unit=88, title=title)
    heights: dict[Name, list[float]] = {}
    eigenvalue: dict[Name, float] = {}
    for place, row in enumerate(rows):
        name = tuple(paths.indices[row].tolist())
        for length in range(depth + 1):
            heights.setdefault(name[:length], []).append(rise * place + aspect / 2)
            if length:
                eigenvalue[name[:length]] = float(paths.eigenvalues[row, length - 1])
        canvas.eigenvector(paths.vectors[row], shape, x=leaf, y=rise * place)
        text = signed(paths.effective[row].item())
        canvas.label(text, x=leaf + 0.5, y=rise * place + aspect, color=GREY)
    middle = {name: sum(ys) / len(ys) for name, ys in heights.items()}
    for name, value in eigenvalue.items():
        color, x = BLUE if value > 0 else RED, ROOT + STEP * (len(name) - 1)
        # Images stand between the edge that comes in and those that go out.
        begin = x + (thumb if len(name) > 1 else 0)
        start, end = (begin, middle[name[:-1]]), (x + STEP, middle[name])
        canvas.line(start, end, color=color, width=_thickness(name, eigenvalue))
        at = ((start[0] + end[0]) / 2, (start[1] + end[1]) / 2)
        canvas.label(signed(value, ".2g"), x=at[0], y=at[1], color=color, on_line=True)
    for name, images in inputs.items():
        left = ROOT + STEP * len(name) + (1.03 if len(name) == depth else 0)
        canvas.thumbnails(images, shape, x=left, y=middle[name] - aspect / 2)
    if root:
        canvas.label(f"<b>{escape(root)}</b>", x=ROOT / 2, y=middle[()], size=14, on_line=True)
    return canvas.figure()


def _thickness(name: Name, eigenvalue: dict[Name, float]) -> float:
    largest = max(abs(v) for other, v in eigenvalue.items() if len(other) == len(name))
    return 1 + (THICKEST - 1) * abs(eigenvalue[name]) / largest if largest else 1.0
