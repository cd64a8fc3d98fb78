"""How accurate a model still is with less of it, drawn against how much is kept."""

from collections.abc import Sequence

import plotly.graph_objects as go

from bilens.report.style import BLUE, GREY

__all__ = ["accuracy_curve"]


def accuracy_curve(
    kept: Sequence[int], accuracies: Sequence[float], full: float, *, whole: str, beside: str
) -> go.Figure:
    """A line through the accuracies, and a dotted one for the accuracy of the whole.

    Args:
        kept: how much is kept, for each point.
        accuracies: with it, as shares of the test images.
        full: of the whole model.
        whole: what the whole is called.
        beside: where that stands, as plotly's `annotation_position`.
    """
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
    figure.update_yaxes(title="test accuracy (%)", fixedrange=True)
    return figure.update_layout(showlegend=False)
