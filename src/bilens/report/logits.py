"""Logits, directions in them and the summands of one, as bars."""

from collections.abc import Mapping, Sequence
from html import escape

import plotly.graph_objects as go
import torch
from jaxtyping import Float
from torch import Tensor

from bilens.checks import checked
from bilens.read import BondDirection
from bilens.reading import signed
from bilens.report.style import BLUE, GREY, RED, dress

__all__ = ["direction_figure", "ends_figure", "logits_figure", "summands_figure"]


@checked
def logits_figure(
    whole: Float[Tensor, " classes"],
    kept: Float[Tensor, " classes"],
    class_names: Sequence[str],
    *,
    title: str,
) -> go.Figure:
    """A pair of bars for each class: the whole model's logit, and that of what is kept of it."""
    bars = {"kept": (BLUE, kept), "all": (GREY, whole)}
    return _pairs(bars, class_names, "logit", title)


@checked
def ends_figure(direction: BondDirection, class_names: Sequence[str], *, title: str) -> go.Figure:
    """A pair of bars for each class: what a coordinate adds to its logit at either end."""
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
    """A bar for each class: how much of its logit a direction has."""
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
    """A bar for each summand from the top down, and below them their sum; names do not repeat."""
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
    # Numbers stand outside of their bars, and need room there on a phone, too.
    room = 0.3 * (highest - lowest)
    ends = [lowest - (room if lowest < 0 else 0), highest + room]
    figure.update_xaxes(title="logit", zeroline=True, range=ends)
    return dress(figure, height=100 + 24 * len(labels), title=escape(title))


def _bars(figure: go.Figure, measure: str, title: str) -> go.Figure:
    # Names of classes may be numbers, which are not places on an axis.
    figure.update_xaxes(type="category", title="class")
    figure.update_yaxes(title=measure, zeroline=True)
    return dress(figure, height=260, title=escape(title))
