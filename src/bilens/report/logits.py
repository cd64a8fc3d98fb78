"""Logits as bars: of one input, whole and made of a few eigenvectors; and a direction in them."""

from collections.abc import Sequence
from html import escape

import plotly.graph_objects as go
from jaxtyping import Float
from torch import Tensor

from bilens.report.style import BLUE, GREY, RED, dress

__all__ = ["direction_figure", "logits_figure"]


def logits_figure(
    whole: Float[Tensor, " classes"],
    kept: Float[Tensor, " classes"],
    class_names: Sequence[str],
    *,
    title: str,
) -> go.Figure:
    """A pair of bars for each class: the model's logit, and that of the eigenvectors kept.

    Args:
        whole: the model's logits.
        kept: the logits of a model that is cut short.
        class_names: below the bars.
        title: above the figure.
    """
    figure = go.Figure()
    names = [escape(name) for name in class_names]
    for label, color, values in (("kept", BLUE, kept), ("all", GREY, whole)):
        figure.add_bar(
            x=names,
            y=values.tolist(),
            name=label,
            marker={"color": color},
            hovertemplate="%{x}: %{y:+.3f}<extra>" + label + "</extra>",
        )
    _bars(figure, "logit", title)
    legend = {"orientation": "h", "x": 0, "xanchor": "left", "y": 1, "yanchor": "bottom"}
    return figure.update_layout(barmode="group", legend=legend, margin={"t": 60})


def direction_figure(
    direction: Float[Tensor, " classes"], class_names: Sequence[str], *, title: str
) -> go.Figure:
    """A bar for each class: how much of its logit a direction has.

    Args:
        direction: u, one number for each class.
        class_names: below the bars.
        title: above the figure.
    """
    figure = go.Figure()
    values = direction.tolist()
    figure.add_bar(
        x=[escape(name) for name in class_names],
        y=values,
        marker={"color": [BLUE if value > 0 else RED for value in values]},
        hovertemplate="%{x}: %{y:+.3f}<extra></extra>",
    )
    return _bars(figure, "weight", title)


def _bars(figure: go.Figure, measure: str, title: str) -> go.Figure:
    # Names of classes may be numbers, which are no places on an axis.
    figure.update_xaxes(type="category", fixedrange=True, title="class")
    figure.update_yaxes(title=measure, fixedrange=True, zeroline=True)
    return dress(figure, height=260, title=escape(title))
