"""Curves of accuracy and bars of logits."""

from collections.abc import Mapping, Sequence
from html import escape

import plotly.graph_objects as go
import torch
from jaxtyping import Float
from torch import Tensor

from bilens.checks import checked
from bilens.errors import BilensError
from bilens.read import BondDirection, TruncationCurve
from bilens.read.figures.style import BLUE, GREY, RED, dress
from bilens.reading import signed

TICKS = (1, 2, 3, 5, 10, 20, 50, 100, 200, 500, 1000)


def accuracy_curve(
    counts: Sequence[int], accuracies: Sequence[float], full: float, *, label: str, beside: str
) -> go.Figure:
    """Draw a line through the accuracies, and a dotted line for the accuracy of the full model."""
    figure = go.Figure()
    figure.add_scatter(
        x=list(counts),
        y=[100 * accuracy for accuracy in accuracies],
        mode="lines+markers",
        line={"color": BLUE, "width": 2},
    )
    figure.add_hline(
        y=100 * full,
        line={"dash": "dot", "color": GREY, "width": 1.5},
        opacity=1,
        annotation_text=f"{label}: {full:.2%}",
        annotation_position=beside,
    )
    figure.update_yaxes(title="test accuracy (%)")
    return figure.update_layout(showlegend=False)


def mark_kept(figure: go.Figure, k: int, lost: float, accuracy: float) -> go.Figure:
    """Put a mark on such a curve at k."""
    return figure.add_scatter(
        x=[k],
        y=[100 * accuracy],
        mode="markers",
        marker={"size": 13, "color": RED, "symbol": "diamond"},
        hovertemplate=f"{k} kept: {accuracy:.2%}, {100 * lost:z.2f} points lost<extra></extra>",
    )


@checked
def truncation_figure(curve: TruncationCurve) -> go.Figure:
    """Plot the test accuracy of the model cut to the first k eigenvectors of each class."""
    counts = range(1, len(curve.accuracy) + 1)
    figure = accuracy_curve(
        counts, curve.accuracy, curve.full, label="all of them", beside="bottom right"
    )
    figure.update_traces(
        marker={"size": 4}, hovertemplate="%{x} eigenvectors: %{y:.2f} %<extra></extra>"
    )
    figure.update_xaxes(
        title="eigenvectors kept for each class",
        type="log",
        tickvals=[k for k in TICKS if k <= len(curve.accuracy)],
        ticks="outside",
    )
    alt = "Test accuracy against the eigenvectors kept for each class"
    return dress(figure, height=340, alt=alt)


@checked
def kept_figure(curve: TruncationCurve, k: int) -> go.Figure:
    """Draw the curve of `truncation_figure` with a mark at k eigenvectors of each class.

    Raises:
        BilensError: the curve has no such k.
    """
    return mark_kept(truncation_figure(curve), k, curve.drop(k), curve.accuracy[k - 1])


@checked
def path_figure(by_paths: Sequence[tuple[int, float]], full: float) -> go.Figure:
    """Plot the test accuracy of the tree pruned to its best k paths, against k."""
    if not by_paths:
        raise BilensError("by_paths is empty, expected at least one point")
    counts, accuracies = zip(*by_paths, strict=True)
    figure = accuracy_curve(counts, accuracies, full, label="the model", beside="top left")
    figure.update_traces(hovertemplate="%{x} paths: %{y:.2f} %<extra></extra>")
    figure.update_xaxes(title="paths kept over all classes", type="log", dtick=1)
    alt = "Test accuracy against the paths kept over all classes"
    return dress(figure, height=340, alt=alt)


@checked
def logits_figure(
    logits: Float[Tensor, " classes"],
    truncated: Float[Tensor, " classes"],
    class_names: Sequence[str],
    *,
    title: str,
) -> go.Figure:
    """Draw a pair of bars for each class: the logit of the full and of the truncated model."""
    bars = {"kept": (BLUE, truncated), "all": (GREY, logits)}
    return _pairs(bars, class_names, "logit", title)


@checked
def ends_figure(direction: BondDirection, class_names: Sequence[str], *, title: str) -> go.Figure:
    """Draw a pair of bars for each class: the effect of a coordinate on its logit at either end."""
    high, low = (torch.tensor(end.effects) for end in direction.ends)
    bars = {"at its largest": (BLUE, high), "at its smallest": (RED, low)}
    return _pairs(bars, class_names, "added to the logit", title)


def _pairs(
    bars: Mapping[str, tuple[str, Tensor]], class_names: Sequence[str], measure: str, title: str
) -> go.Figure:
    figure = go.Figure()
    names = [escape(name) for name in class_names]
    for label, (color, values) in bars.items():
        figure.add_bar(
            x=names,
            y=values.tolist(),
            name=label,
            marker={"color": color},
            hovertemplate="%{x}: %{y:.3g}<extra>" + label + "</extra>",
        )
    _bars(figure, measure, title)
    legend = {"orientation": "h", "x": 0, "xanchor": "left", "y": 1, "yanchor": "bottom"}
    return figure.update_layout(barmode="group", legend=legend, margin={"t": 60})


@checked
def direction_figure(
    direction: Float[Tensor, " classes"], class_names: Sequence[str], *, title: str
) -> go.Figure:
    """Draw a bar for each class: the weight of its logit in a direction."""
    figure = go.Figure()
    values = direction.tolist()
    figure.add_bar(
        x=[escape(name) for name in class_names],
        y=values,
        marker={"color": [BLUE if value > 0 else RED for value in values]},
        hovertemplate="%{x}: %{y:.3g}<extra></extra>",
    )
    return _bars(figure, "weight", title)


@checked
def summands_figure(names: Sequence[str], values: Sequence[float], *, title: str) -> go.Figure:
    """Draw a bar for each summand from the top down, and below them their sum."""
    figure = go.Figure()
    labels = [*(escape(name) for name in names), "<b>sum</b>"]
    numbers = [*values, sum(values)]
    colors = [*(BLUE if value > 0 else RED for value in values), GREY]
    figure.add_bar(
        x=numbers,
        y=labels,
        orientation="h",
        marker={"color": colors},
        text=[signed(value, ".2f") for value in numbers],
        textposition="outside",
        cliponaxis=False,
        hovertemplate="%{y}: %{x:.4g}<extra></extra>",
    )
    figure.update_yaxes(type="category", autorange="reversed")
    lowest, highest = min(0.0, *numbers), max(0.0, *numbers)
    # Numbers are outside of their bars, and need room there on a phone, too.
    room = 0.3 * (highest - lowest)
    ends = [lowest - (room if lowest < 0 else 0), highest + room]
    figure.update_xaxes(title="logit", zeroline=True, range=ends)
    return dress(figure, height=100 + 24 * len(labels), title=escape(title))


def _bars(figure: go.Figure, measure: str, title: str) -> go.Figure:
    # Names of classes may be numbers, which are not places on an axis.
    figure.update_xaxes(type="category", title="class")
    figure.update_yaxes(title=measure, zeroline=True)
    return dress(figure, height=260, title=escape(title))
