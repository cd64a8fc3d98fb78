"""Figures that several recipes draw: lines with a band, and pictures in rows."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import matplotlib as mpl
from jaxtyping import Float
from matplotlib.figure import Figure
from torch import Tensor

from bilens.pages import Canvas, add_legend, log_axis, new_figure, styled
from experiments.results import interval

BLUE, RED, GREY, INK = "#2166ac", "#b2182b", "#6e747c", "#1f2328"

NAME, STEP, LABEL = 1.3, 1.1, 0.3


@dataclass(frozen=True)
class Line:
    """A mean over initialisations, with the two ends of its band."""

    name: str
    x: Sequence[float]
    middle: Sequence[float]
    low: Sequence[float]
    high: Sequence[float]


def confidence_line(name: str, x: Sequence[float], samples: Sequence[Sequence[float]]) -> Line:
    """Return a line with the 95 % interval of its mean; samples holds one row for each seed."""
    points = [interval(values) for values in zip(*samples, strict=True)]
    low, middle, high = ([p.get(key, p["mean"]) for p in points] for key in ("low", "mean", "high"))
    return Line(name, x, middle, low, high)


def spread_line(name: str, x: Sequence[float], samples: Sequence[Sequence[float]]) -> Line:
    """Return a line with one standard deviation to either side; samples as in `confidence_line`."""
    points = [interval(values) for values in zip(*samples, strict=True)]
    low, high = ([p["mean"] + sign * p.get("std", 0.0) for p in points] for sign in (-1, 1))
    return Line(name, x, [p["mean"] for p in points], low, high)


@styled
def line_figure(
    lines: Sequence[Line], *, title: str, x_title: str, y_title: str, floor: float | None = None
) -> Figure:
    """Draw lines with their bands, in colours from dark to bright.

    With a floor the vertical axis is logarithmic, and smaller values are moved to it.
    """

    def shown(values: Sequence[float]) -> list[float]:
        return list(values) if floor is None else [max(value, floor) for value in values]

    figure, axes = new_figure(height=380, title=title)
    colors = mpl.colormaps["viridis"]
    for number, line in enumerate(lines):
        color = colors(0.85 * number / max(1, len(lines) - 1))
        axes.fill_between(line.x, shown(line.low), shown(line.high), color=color, alpha=0.18, lw=0)
        axes.plot(line.x, shown(line.middle), "o-", color=color, markersize=3, label=line.name)
    axes.set_xlabel(x_title)
    axes.set_ylabel(y_title)
    if floor is not None:
        top = max(value for line in lines for value in (floor, *line.high))
        axes.set_yscale("log")
        log_axis(axes.yaxis)
        axes.set_ylim(floor, 2 * top)
    add_legend(axes)
    return figure


def picture_figure(
    rows: Mapping[str, Sequence[tuple[Float[Tensor, " n"], str]]],
    shape: tuple[int, int],
    *,
    title: str,
) -> Figure:
    """Draw rows of vectors as pictures, each row with its name and each picture with its text."""
    aspect = shape[0] / shape[1]
    columns = max(len(pictures) for pictures in rows.values())
    width, height = NAME + STEP * columns, (aspect + LABEL) * len(rows)
    canvas = Canvas(width, height, unit=100, title=title)
    for row, (name, pictures) in enumerate(rows.items()):
        top = row * (aspect + LABEL)
        canvas.label(name, x=NAME / 2, y=top + aspect / 2 - 0.08)
        for column, (vector, text) in enumerate(pictures):
            left = NAME + STEP * column
            canvas.eigenvector(vector, shape, x=left, y=top)
            canvas.label(text, x=left + 0.5, y=top + aspect + 0.03)
    return canvas.figure()
