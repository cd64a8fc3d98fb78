"""Accuracy against how much of a model is kept, as in figure 3 of Pearce et al. 2024."""

from collections.abc import Sequence

import plotly.graph_objects as go

from bilens.checks import checked
from bilens.errors import BilensError
from bilens.read import TruncationCurve
from bilens.report.style import BLUE, GREY, RED, dress

__all__ = [
    "accuracy_curve",
    "kept_figure",
    "mark_kept",
    "path_figure",
    "truncation_figure",
    "truncation_table",
]

STOPS = (1, 2, 3, 5, 10, 20, 50, 100)


def accuracy_curve(
    kept: Sequence[int], accuracies: Sequence[float], full: float, *, whole: str, beside: str
) -> go.Figure:
    """A line through the accuracies, and a dotted one for that of the `whole`, with its name."""
    figure = go.Figure()
    figure.add_scatter(
        x=list(kept),
        y=[100 * accuracy for accuracy in accuracies],
        mode="lines+markers",
        line={"color": BLUE, "width": 2},
    )
    figure.add_hline(
        y=100 * full,
        line={"dash": "dot", "color": GREY, "width": 1.5},
        opacity=1,
        annotation_text=f"{whole}: {full:.2%}",
        annotation_position=beside,
    )
    figure.update_yaxes(title="test accuracy (%)")
    return figure.update_layout(showlegend=False)


def mark_kept(figure: go.Figure, k: int, lost: float, accuracy: float) -> go.Figure:
    """Put a mark on such a curve where k are kept."""
    return figure.add_scatter(
        x=[k],
        y=[100 * accuracy],
        mode="markers",
        marker={"size": 13, "color": RED, "symbol": "diamond"},
        hovertemplate=f"{k} kept: {accuracy:.2%}, {100 * lost:z.2f} points lost<extra></extra>",
    )


@checked
def truncation_table(curve: TruncationCurve) -> list[tuple[int, float, float]]:
    """(k, accuracy, drop) for a few telling k, the last being all of them."""
    total = len(curve.accuracy)
    stops = [k for k in STOPS if k < total] + [total]
    return [(k, curve.accuracy[k - 1], curve.drop(k)) for k in stops]


@checked
def truncation_figure(curve: TruncationCurve) -> go.Figure:
    """Test accuracy of the model cut to the first k eigenvectors of each class."""
    kept = range(1, len(curve.accuracy) + 1)
    figure = accuracy_curve(
        kept, curve.accuracy, curve.full, whole="all of them", beside="bottom right"
    )
    figure.update_traces(
        marker={"size": 4}, hovertemplate="%{x} eigenvectors: %{y:.2f} %<extra></extra>"
    )
    figure.update_xaxes(
        title="eigenvectors kept for each class",
        type="log",
        tickvals=[k for k in (*STOPS, 200, 500, 1000) if k <= len(curve.accuracy)],
        ticks="outside",
    )
    alt = "Test accuracy against the eigenvectors kept for each class"
    return dress(figure, height=340, alt=alt)


@checked
def kept_figure(curve: TruncationCurve, k: int) -> go.Figure:
    """The curve of `truncation_figure` with a mark where k eigenvectors of each class are kept.

    Raises:
        BilensError: the curve has no such k.
    """
    return mark_kept(truncation_figure(curve), k, curve.drop(k), curve.accuracy[k - 1])


@checked
def path_figure(by_paths: Sequence[tuple[int, float]], full: float) -> go.Figure:
    """Test accuracy of the tree pruned to its best k paths, against k."""
    if not by_paths:
        raise BilensError("by_paths is empty, expected at least one point")
    kept, accuracies = zip(*by_paths, strict=True)
    figure = accuracy_curve(kept, accuracies, full, whole="the model", beside="top left")
    figure.update_traces(hovertemplate="%{x} paths: %{y:.2f} %<extra></extra>")
    figure.update_xaxes(title="paths kept over all classes", type="log", dtick=1)
    alt = "Test accuracy against the paths kept over all classes"
    return dress(figure, height=340, alt=alt)
