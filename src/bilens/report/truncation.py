"""Accuracy against the number of eigenvectors, as in figure 3 of Pearce et al. 2024."""

import plotly.graph_objects as go

from bilens.read import TruncationCurve
from bilens.report.accuracy import accuracy_curve
from bilens.report.style import RED, dress

__all__ = ["kept_figure", "truncation_figure", "truncation_table"]

STOPS = (1, 2, 3, 5, 10, 20, 50, 100)


def truncation_table(curve: TruncationCurve) -> list[tuple[int, float, float]]:
    """(k, accuracy, drop) for a few telling k, the last being all of them."""
    total = len(curve.accuracy)
    stops = [k for k in STOPS if k < total] + [total]
    return [(k, curve.accuracy[k - 1], curve.drop(k)) for k in stops]


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
        fixedrange=True,
    )
    alt = "Test accuracy against the eigenvectors kept for each class"
    return dress(figure, height=340, alt=alt)


def kept_figure(curve: TruncationCurve, k: int) -> go.Figure:
    """The curve of `truncation_figure` with a mark where k eigenvectors of each class are kept.

    Raises:
        BilensError: the curve has no such k.
    """
    lost = 100 * curve.drop(k)
    shown = f"{k} kept: {curve.accuracy[k - 1]:.2%}, {lost:.2f} points lost"
    figure = truncation_figure(curve)
    figure.add_scatter(
        x=[k],
        y=[100 * curve.accuracy[k - 1]],
        mode="markers",
        marker={"size": 13, "color": RED, "symbol": "diamond"},
        hovertemplate=f"{shown}<extra></extra>",
    )
    return figure
