"""Figures as files."""

from pathlib import Path

import plotly.graph_objects as go

from bilens.checks import checked
from bilens.errors import BilensError
from bilens.files import written_whole

__all__ = ["FIGURE_FORMATS", "save_figure"]

FIGURE_FORMATS = ("png", "svg", "pdf")
DEFAULT_WIDTH = 900


@checked
def save_figure(
    figure: go.Figure, path: Path, *, width: int | None = None, scale: float = 2
) -> None:
    """Write a figure as PNG, SVG or PDF, by the name's ending.

    The width is in CSS pixels, by default what the figure's proportions ask for; the height is the
    figure's own. `scale` is device pixels for each of these, for PNG.

    Raises:
        BilensError: another ending, or there is no Chrome or Chromium to draw it with.
    """
    kind = path.suffix.removeprefix(".")
    if kind not in FIGURE_FORMATS:
        raise BilensError(f"path={path} ends in {path.suffix!r}; expected .png, .svg or .pdf")
    width = width or _natural_width(figure)
    try:
        with written_whole(path) as temporary:
            temporary.write_bytes(figure.to_image(kind, width=width, scale=scale))
    except RuntimeError as error:
        raise BilensError(
            f"{path} could not be drawn: {error}. Chrome or Chromium draws pictures: install "
            "one, or run `plotly_get_chrome`. The HTML report needs neither."
        ) from error


def _natural_width(figure: go.Figure) -> int:
    layout = figure.layout
    if not (layout.meta and "aspect" in layout.meta):
        return DEFAULT_WIDTH
    inner = layout.height - layout.margin.t - layout.margin.b
    return int(inner / layout.meta["aspect"] + layout.margin.l + layout.margin.r)
