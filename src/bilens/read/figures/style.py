"""The look of every figure, and figures as files."""

from collections.abc import Mapping
from functools import cache
from importlib.util import find_spec
from pathlib import Path

from bilens.checks import checked
from bilens.errors import BilensError
from bilens.files import written_whole
from bilens.lazy_imports import go, pio

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
"""Colours on a dark page."""

# In capitals if they are above, since scales stay as they are on a dark page.
DIVERGING = ("#67001f", RED.upper(), "#f4a582", "#f7f7f7", "#92c5de", BLUE.upper(), "#053061")
"""Negative is red, zero is white, positive is blue, as in Pearce et al. 2024, figure 2."""

FONT = "Inter, 'Helvetica Neue', Arial, sans-serif"


def dress(figure: "go.Figure", *, height: int, title: str = "", alt: str = "") -> "go.Figure":
    """Set the common look of a figure in place, or that of plotly's default template.

    The title is safe for HTML; `alt`, by default the title, is for those who do not see the figure.
    """
    # A user's own template is left in charge.
    default = pio.templates.default
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


def house_style(figure: "go.Figure", alt: str) -> "go.Figure":
    """Return a figure, such as that of `Reading.plot`, in the common look if it has none yet."""
    if figure.layout.meta and "alt" in figure.layout.meta:
        return figure
    title = figure.layout.title.text or ""
    figure = dress(go.Figure(figure), height=340, title=title, alt=title or alt)
    # Names of heads such as 0.10 are no numbers.
    figure.update_layout(autotypenumbers="strict")
    if len(figure.data) == 1:
        figure.update_traces(marker_color=BLUE)
        figure.update_traces(line_color=BLUE, selector={"type": "scatter"})
    return figure


@cache
def _template() -> "go.layout.Template":
    """Return the axes of plotly's simple_white; the full template takes long to set."""
    layout = pio.templates["simple_white"].layout.to_plotly_json()
    colours = {"linecolor": INK, "tickcolor": INK, "zerolinecolor": INK}
    axes = {name: {**layout[name], **colours} for name in ("xaxis", "yaxis")}
    return go.layout.Template(
        layout={
            **axes,
            "hovermode": layout["hovermode"],
            "font": {"family": FONT, "size": 12, "color": INK},
            "paper_bgcolor": PAPER,
            "plot_bgcolor": PAPER,
        }
    )


FIGURE_FORMATS = ("png", "svg", "pdf")
DEFAULT_WIDTH = 900


@checked
def save_figure(
    figure: "go.Figure", path: Path, *, width: int | None = None, scale: float = 2
) -> None:
    """Write a figure as PNG, SVG or PDF, by the name's ending.

    The width is in CSS pixels, by default by the figure's proportions; the height is the
    figure's own. `scale` is device pixels for each of these, for PNG.

    Raises:
        BilensError: another ending, or Chrome or Chromium is missing.
    """
    kind = path.suffix.removeprefix(".")
    if kind not in FIGURE_FORMATS:
        raise BilensError(f"path={path} ends in {path.suffix!r}; expected .png, .svg or .pdf")
    if find_spec("kaleido") is None:
        raise BilensError(f"{path} needs kaleido: pip install 'bilens[figures]'")
    width = width or _natural_width(figure)
    try:
        with written_whole(path) as temporary:
            temporary.write_bytes(figure.to_image(kind, width=width, scale=scale))
    except RuntimeError as error:
        raise BilensError(
            f"{path} could not be drawn: {error}. Chrome or Chromium draws pictures: install "
            "one, or run `plotly_get_chrome`. The HTML report needs neither."
        ) from error


@checked
def save_figures(figures: "Mapping[str, go.Figure]", folder: Path, kind: str) -> None:
    """Save each figure under its name in `folder` as png, svg or pdf."""
    for name, figure in figures.items():
        save_figure(figure, folder / f"{name}.{kind}")


def _natural_width(figure: "go.Figure") -> int:
    layout = figure.layout
    if not (layout.meta and "aspect" in layout.meta):
        return DEFAULT_WIDTH
    # Pictures keep their proportions, so the width follows from the height.
    inner = layout.height - layout.margin.t - layout.margin.b
    return int(inner / layout.meta["aspect"] + layout.margin.l + layout.margin.r)
