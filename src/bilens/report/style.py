"""How every figure looks: colours that mean the same everywhere, and one template."""

from functools import cache
from typing import Any

import plotly.graph_objects as go
import plotly.io

__all__ = ["BLUE", "DIVERGING", "GREY", "INK", "RED", "dress"]

BLUE, RED, GREY, INK = "#2166ac", "#b2182b", "#8a8f98", "#1f2328"
DIVERGING = ("#67001f", RED, "#f4a582", "#f7f7f7", "#92c5de", BLUE, "#053061")
"""Negative is red, zero is white, positive is blue, as in Pearce et al. 2024, figure 2."""

FONT = "Inter, 'Helvetica Neue', Arial, sans-serif"


def dress(figure: go.Figure, *, height: int, title: str = "") -> go.Figure:
    """Give a figure the common fonts, margins and white ground."""
    figure.update_layout(
        template={"layout": _axes()},
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


@cache
def _axes() -> dict[str, Any]:
    """The axes of plotly's simple_white. All of that template takes longer to set than a figure."""
    whole = plotly.io.templates["simple_white"].layout.to_plotly_json()
    return {name: whole[name] for name in ("xaxis", "yaxis", "hovermode") if name in whole}
