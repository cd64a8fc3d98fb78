"""How every figure looks: colours that mean the same everywhere, and one template."""

from functools import cache

import plotly.graph_objects as go
import plotly.io

__all__ = ["BLUE", "DARK", "DIVERGING", "GREY", "INK", "LINE", "PAPER", "RED", "dress"]

BLUE, RED, GREY = "#2166ac", "#b2182b", "#6e747c"
INK, PAPER, LINE = "#1f2328", "#ffffff", "#d0d4da"
DARK = {
    BLUE: "#7ab8f5",
    RED: "#f4978e",
    GREY: "#9aa1aa",
    INK: "#e4e7eb",
    PAPER: "#16181d",
    LINE: "#3d434b",
}
"""What each colour becomes on a dark page."""

# In capitals where they stand above, since scales stay as they are on a dark page.
DIVERGING = ("#67001f", RED.upper(), "#f4a582", "#f7f7f7", "#92c5de", BLUE.upper(), "#053061")
"""Negative is red, zero is white, positive is blue, as in Pearce et al. 2024, figure 2."""

FONT = "Inter, 'Helvetica Neue', Arial, sans-serif"


def dress(figure: go.Figure, *, height: int, title: str = "", alt: str = "") -> go.Figure:
    """Give a figure, in place, the common look, or that of plotly's default template.

    The title is safe for HTML; `alt`, by default the title, is for those who do not see the figure.
    """
    default = plotly.io.templates.default
    figure.update_layout(
        template=_template() if default in (None, "plotly") else default,
        title={"text": title, "font": {"size": 15}, "x": 0, "xref": "paper"},
        margin={"l": 50, "r": 12, "t": 40 if title else 12, "b": 44},
        height=height,
        autosize=True,
        dragmode=False,
        meta={"alt": alt or title},
    )
    figure.update_xaxes(fixedrange=True)
    figure.update_yaxes(fixedrange=True)
    return figure


@cache
def _template() -> go.layout.Template:
    """The axes of plotly's simple_white. All of that template takes longer to set than a figure."""
    whole = plotly.io.templates["simple_white"].layout.to_plotly_json()
    colours = {"linecolor": INK, "tickcolor": INK, "zerolinecolor": INK}
    axes = {name: {**whole[name], **colours} for name in ("xaxis", "yaxis")}
    return go.layout.Template(
        layout={
            **axes,
            "hovermode": whole["hovermode"],
            "font": {"family": FONT, "size": 12, "color": INK},
            "paper_bgcolor": PAPER,
            "plot_bgcolor": PAPER,
        }
    )
