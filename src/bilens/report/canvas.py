"""A figure of pictures and labels on invisible axes, one unit a picture's width."""

import plotly.graph_objects as go

from bilens.report.style import INK, dress

__all__ = ["canvas", "label"]


def canvas(width: float, height: float, *, unit: int, title: str = "") -> go.Figure:
    """An empty figure of `width` by `height` units, y growing downwards, squares staying square.

    Args:
        width: in units.
        height: in units.
        unit: how many pixels high a unit is at full size.
        title: above the figure.
    """
    figure = go.Figure()
    hidden = {"visible": False, "fixedrange": True}
    figure.update_xaxes(range=[0, width], constrain="domain", **hidden)
    figure.update_yaxes(range=[height, 0], scaleanchor="x", constrain="domain", **hidden)
    # Without a trace plotly draws no axes, and without axes no pictures.
    figure.add_scatter(x=[0], y=[0], mode="markers", marker={"opacity": 0}, hoverinfo="skip")
    dress(figure, height=round(unit * height) + (48 if title else 16), title=title)
    # The page keeps these proportions when it is narrow.
    meta = {"aspect": height / width}
    figure.update_layout(margin={"l": 4, "r": 4, "b": 4}, showlegend=False, meta=meta)
    return figure


def label(
    figure: go.Figure, text: str, *, x: float, y: float, size: int = 11, color: str = INK
) -> None:
    """Write `text`, already safe for HTML, centred on x with its top at y."""
    figure.add_annotation(
        text=text,
        x=x,
        y=y,
        xref="x",
        yref="y",
        xanchor="center",
        yanchor="top",
        showarrow=False,
        font={"size": size, "color": color},
    )
