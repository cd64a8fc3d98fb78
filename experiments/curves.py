"""Figures that several recipes draw: lines with a band, and pictures in rows."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from math import log10

import plotly.graph_objects as go
from jaxtyping import Float
from plotly.colors import sample_colorscale
from torch import Tensor

from bilens.pages import Canvas, dress
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


def line_figure(
    lines: Sequence[Line], *, title: str, x_title: str, y_title: str, floor: float | None = None
) -> go.Figure:
    """Draw lines with their bands, in colours from dark to bright.

    With a floor the vertical axis is logarithmic, and smaller values are moved to it.
    """

    def shown(values: Sequence[float]) -> list[float]:
        return list(values) if floor is None else [max(value, floor) for value in values]

    figure = go.Figure()
    places = [0.85 * number / max(1, len(lines) - 1) for number in range(len(lines))]
    for line, color in zip(lines, sample_colorscale("Viridis", places), strict=True):
        figure.add_scatter(
            x=[*line.x, *reversed(line.x)],
            y=shown([*line.high, *reversed(line.low)]),
            mode="lines",
            fill="toself",
            fillcolor=color.replace("rgb", "rgba").replace(")", ", 0.18)"),
            line={"width": 0},
            hoverinfo="skip",
            showlegend=False,
        )
        figure.add_scatter(
            x=list(line.x),
            y=shown(line.middle),
            name=escape(line.name),
            mode="lines+markers",
            line={"color": color, "width": 2},
            marker={"size": 4},
        )
    figure.update_xaxes(title=x_title, fixedrange=True)
    figure.update_yaxes(title=y_title, fixedrange=True)
    if floor is not None:
        top = max(value for line in lines for value in (floor, *line.high))
        figure.update_yaxes(type="log", dtick=1, range=[log10(floor), log10(2 * top)])
    dress(figure, height=400, title=escape(title))
    # Below the lines, so that a narrow page keeps its width for them.
    legend = {"orientation": "h", "x": 0, "xanchor": "left", "y": -0.2, "yanchor": "top"}
    return figure.update_layout(legend=legend)


def picture_figure(
    rows: Mapping[str, Sequence[tuple[Float[Tensor, " n"], str]]],
    shape: tuple[int, int],
    *,
    title: str,
) -> go.Figure:
    """Draw rows of vectors as pictures, each row with its name and each picture with its text."""
    aspect = shape[0] / shape[1]
    columns = max(len(pictures) for pictures in rows.values())
    width, height = NAME + STEP * columns, (aspect + LABEL) * len(rows)
    canvas = Canvas(width, height, unit=100, title=title)
    for row, (name, pictures) in enumerate(rows.items()):
        top = row * (aspect + LABEL)
        canvas.label(escape(name), x=NAME / 2, y=top + aspect / 2 - 0.08)
        for column, (vector, text) in enumerate(pictures):
            left = NAME + STEP * column
            canvas.eigenvector(vector, shape, x=left, y=top)
            canvas.label(escape(text), x=left + 0.5, y=top + aspect + 0.01)
    return canvas.figure()
