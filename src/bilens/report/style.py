"""How every figure looks: colours that mean the same everywhere, and one template."""

import plotly.graph_objects as go

__all__ = ["BLUE", "DIVERGING", "GREY", "INK", "RED", "dress"]

BLUE, RED, GREY, INK = "#2166ac", "#b2182b", "#8a8f98", "#1f2328"
DIVERGING = ("#67001f", RED, "#f4a582", "#f7f7f7", "#92c5de", BLUE, "#053061")
"""Negative is red, zero is white, positive is blue, as in Pearce et al. 2024, figure 2."""

FONT = "Inter, 'Helvetica Neue', Arial, sans-serif"


def dress(figure: go.Figure, *, height: int, title: str = "") -> go.Figure:
    """Give a figure the common fonts, margins and white ground."""
    figure.update_layout(
        template="simple_white",
        title={"text": title, "font": {"size": 15}, "x": 0, "xref": "paper"},
        font={"family": FONT, "size": 12, "color": INK},
        margin={"l": 50, "r": 12, "t": 40 if title else 12, "b": 44},
        height=height,
        autosize=True,
        paper_bgcolor="white",
        plot_bgcolor="white",
        dragmode=False,
    )
    return figure
