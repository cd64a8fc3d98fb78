"""What adds up to a number, as bars."""

from collections.abc import Sequence
from html import escape

import plotly.graph_objects as go

from bilens.report.style import BLUE, GREY, RED, dress

__all__ = ["summands_figure"]

ROW = 24


def summands_figure(names: Sequence[str], values: Sequence[float], *, title: str) -> go.Figure:
    """A bar for each summand from the top down, and below them their sum.

    Args:
        names: of the summands, each another.
        values: of the summands.
        title: above the figure.
    """
    figure = go.Figure()
    labels = [*(escape(name) for name in names), "<b>sum</b>"]
    numbers = [*values, sum(values)]
    colors = [*(BLUE if value > 0 else RED for value in values), GREY]
    figure.add_bar(
        x=numbers,
        y=labels,
        orientation="h",
        marker={"color": colors},
        text=[f"{value:+.2f}" for value in numbers],
        textposition="outside",
        cliponaxis=False,
        hovertemplate="%{y}: %{x:+.4f}<extra></extra>",
    )
    figure.update_yaxes(type="category", autorange="reversed", fixedrange=True)
    lowest, highest = min(0.0, *numbers), max(0.0, *numbers)
    # Numbers stand outside of their bars, and need room there on a phone, too.
    room = 0.3 * (highest - lowest)
    ends = [lowest - (room if lowest < 0 else 0), highest + room]
    figure.update_xaxes(title="logit", fixedrange=True, zeroline=True, range=ends)
    return dress(figure, height=100 + ROW * len(labels), title=escape(title))
