"""Every coordinate of a cut model as a row of pictures, and every layer as its matrices."""

from collections.abc import Sequence
from html import escape

import plotly.graph_objects as go

from bilens.checks import check_index, checked
from bilens.read import BondReading, End
from bilens.report.canvas import Canvas
from bilens.report.picture import diverging
from bilens.report.style import BLUE, GREY, RED

__all__ = ["directions_figure", "matrices_figure"]

GAP, NAMES, NAMED = 0.16, 1.7, 3
TILE, COLUMNS = 1.3, 7
LEAST = 0.25
"""Of the largest effect of a direction: smaller ones are not named."""


@checked
def directions_figure(reading: BondReading, bond: int, shape: tuple[int, int]) -> go.Figure:
    """The coordinates of a bond, one row each: what it stands for, and both of its ends.

    The bond of the input has the number 0.
    """
    kept = reading.kept
    check_index("bond", bond, len(kept.cut.ranks))
    rows = [kept.direction(bond, number) for number in range(kept.cut.ranks[bond])]
    aspect = shape[0] / shape[1]
    rise = aspect + GAP
    shown = 1 + (bond > 0)
    start = 1.1 + shown * 1.08
    images = len(rows[0].ends[0].images)
    side = images * 1.04 + NAMES
    title = (
        "Coordinates of the pixels"
        if bond == 0
        else f"Coordinates between layers {bond} and {bond + 1}"
    )
    canvas = Canvas(start + 2 * side, rise * len(rows), unit=56, title=title)
    for place, direction in enumerate(rows):
        y = rise * place
        middle = y + aspect / 2
        name = f"<b>{bond}.{direction.number + 1}</b><br>{direction.share:.1%}"
        canvas.label(name, x=0.5, y=middle, color=GREY, on_line=True)
        for number, vector in enumerate(kept.pixels(bond, direction.number)):
            canvas.eigenvector(vector, shape, x=1.05 + 1.08 * number, y=y)
        for number, end in enumerate(direction.ends):
            left = start + side * number
            for i, index in enumerate(end.images):
                canvas.image(reading.data.test_images[index], shape, x=left + 1.04 * i, y=y)
            text = _moved(end, reading.data.class_names)
            canvas.label(text, x=left + side - NAMES / 2 - 0.1, y=middle, on_line=True)
    return canvas.figure()


@checked
def matrices_figure(reading: BondReading, layer: int) -> go.Figure:
    """The interaction matrices of a layer of the cut model, one for each coordinate it makes."""
    check_index("layer", layer, len(reading.cut.cores))
    core = reading.cut.cores[layer]
    matrices = core.dense()
    limit = float(matrices.abs().max())
    is_last = layer == len(reading.cut.cores) - 1
    names = (
        [escape(name) for name in reading.data.class_names]
        if is_last
        else [f"{layer + 1}.{k + 1}" for k in range(core.n_out)]
    )
    n_rows = -(-len(names) // COLUMNS)
    title = f"Layer {layer + 1}: {core.n_out} matrices of {core.n_in} x {core.n_in}"
    canvas = Canvas(TILE * COLUMNS, TILE * n_rows, unit=96, title=title)
    for place, (name, matrix) in enumerate(zip(names, matrices, strict=True)):
        row, column = divmod(place, COLUMNS)
        x, y = TILE * column + (TILE - 1) / 2, TILE * row
        # Square roots: the few large entries would leave the others white.
        shown = (matrix.sign() * (matrix.abs() / limit).sqrt()).numpy()
        canvas.picture(diverging(shown, 1.0), x=x, y=y, width=1, height=1)
        canvas.label(name, x=x + 0.5, y=y + 1.01, color=GREY)
    return canvas.figure()


def _moved(end: End, names: Sequence[str]) -> str:
    """The classes that an end raises and lowers most; safe for HTML."""
    largest = max(abs(effect) for effect in end.effects)
    lines = []
    for mark, sign, color in (("▲", 1, BLUE), ("▼", -1, RED)):
        by_size = sorted(
            (i for i, e in enumerate(end.effects) if sign * e > LEAST * largest),
            key=lambda i: -sign * end.effects[i],
        )
        if by_size:
            text = escape(", ".join(names[i] for i in by_size[:NAMED]))
            lines.append(f'<span style="color:{color}">{mark} {text}</span>')
    return "<br>".join(lines)
