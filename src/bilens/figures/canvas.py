"""Pictures of vectors and images, a canvas that they are placed on, and trees of eigenvectors."""

import base64
import io
from collections.abc import Iterable
from functools import cache
from textwrap import wrap
from typing import TYPE_CHECKING, Any

import numpy as np
from jaxtyping import Float
from PIL import Image, ImageOps
from torch import Tensor

from bilens.checks import checked
from bilens.errors import BilensError
from bilens.lazy_imports import go, lazy_import, pio
from bilens.sections import plotly_text, signed
from bilens.tensor import Paths

if TYPE_CHECKING:
    from bilens.paper import notebook
else:  # It imports plotly.
    notebook = lazy_import("bilens.paper.notebook")

BLUE, RED, GREY = "#2166ac", "#b2182b", "#6e747c"
INK, PAPER, LINE = "#1f2328", "#ffffff", "#d0d4da"
DARK = {
    BLUE: "#7ab8f5",
    RED: "#f4978e",
    GREY: "#9aa1aa",
    INK: "#e4e7eb",
    PAPER: "#16181d",
    LINE: "#3d434b",
    **{"#1b7837": "#7fbf7b", "#762a83": "#c2a5cf", "#b35806": "#e08214"},
}
"""Colours on a dark page."""

# In capitals if they are above, since scales stay as they are on a dark page.
DIVERGING = ("#67001f", RED.upper(), "#f4a582", "#f7f7f7", "#92c5de", BLUE.upper(), "#053061")
"""Negative is red, zero is white, positive is blue, as in Pearce et al. 2024, figure 2."""


def new_figure(*content: Any) -> "go.Figure":
    """Return a figure that notebooks show, empty or with traces or the content of another."""
    return notebook.NotebookFigure(*content)


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
    figure = dress(new_figure(figure), height=340, title=title, alt=title or alt)
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
    font = "Inter, 'Helvetica Neue', Arial, sans-serif"
    return go.layout.Template(
        layout={
            **axes,
            "hovermode": layout["hovermode"],
            "font": {"family": font, "size": 12, "color": INK},
            "paper_bgcolor": PAPER,
            "plot_bgcolor": PAPER,
        }
    )


ENLARGED = 112
"""Pixels of a picture's shorter side, at least: browsers blur pictures that they enlarge."""


@cache
def _palette() -> Float[np.ndarray, "255 3"]:
    """255 colours, so that zero is exactly the middle one."""
    stops = np.array([[*bytes.fromhex(color[1:])] for color in DIVERGING])
    at = np.linspace(-1, 1, len(stops))
    return np.stack([np.interp(np.linspace(-1, 1, 255), at, channel) for channel in stops.T], 1)


def as_image(vector: Float[Tensor, " n"], shape: tuple[int, int]) -> Float[np.ndarray, "h w"]:
    """Fold a vector into an image; a constant coordinate at its end is left out."""
    height, width = shape
    values = vector.detach().cpu().double().numpy()
    if len(values) == height * width + 1:
        values = values[:-1]
    if len(values) != height * width:
        raise BilensError(f"A vector of {len(values)} elements is not an image of shape {shape}")
    return values.reshape(shape)


def diverging(image: Float[np.ndarray, "h w"], limit: float | None = None) -> str:
    """Return a red-blue picture as a data address; `limit` is full colour."""
    limit = float(np.abs(image).max()) if limit is None else limit
    # A picture of zeros is white, and not divided by zero.
    scaled = np.clip(image / limit, -1, 1) if limit > 0 else np.zeros_like(image)
    return _png(_palette()[np.rint(127 * scaled).astype(int) + 127].astype(np.uint8))


@cache
def colour_bar() -> str:
    """Return the colours of `diverging` from negative to positive, as a data address."""
    return _png(_palette().round().astype(np.uint8)[None].repeat(ENLARGED, 0))


def grey(image: Float[np.ndarray, "h w"]) -> str:
    """Return an input as a picture, ink on paper, as a data address."""
    return _png(np.rint(255 * (1 - np.clip(image, 0, 1))).astype(np.uint8))


def _png(pixels: np.ndarray) -> str:
    # By whole numbers, so that every pixel of the vector is a square of equal size.
    times = max(1, -(-ENLARGED // min(pixels.shape[:2])))
    # A palette instead of three channels keeps pages with hundreds of pictures small.
    small = Image.fromarray(pixels).quantize(255)
    buffer = io.BytesIO()
    ImageOps.scale(small, times, Image.Resampling.NEAREST).save(buffer, "PNG", optimize=True)
    return "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode()


class Canvas:
    """Collects pictures, lines and labels, and makes one figure of them.

    Plotly checks its whole list of pictures again for each that is added; hundreds are added at
    once here.

    x grows to the right, y downwards, and squares stay square; at full size a unit is `unit` pixels
    high. The title is made safe for HTML here. A colour bar of eigenvectors is at the bottom.
    """

    def __init__(
        self, width: float, height: float, *, unit: int, title: str, alt: str = ""
    ) -> None:
        self.width, self.height, self.unit, self.title, self.alt = width, height, unit, title, alt
        self._images: list[dict[str, Any]] = []
        self._shapes: list[dict[str, Any]] = []
        self._labels: list[dict[str, Any]] = []
        # Without a trace plotly draws no axes, and without axes no pictures.
        point = {"x": [0], "y": [0], "mode": "markers", "marker": {"opacity": 0}}
        self._traces = [go.Scatter(**point, hoverinfo="skip")]
        self._scale()

    def picture(self, source: str, *, x: float, y: float, height: float, width: float = 1) -> None:
        """Put a picture, given as a data address, with its upper left corner at (x, y)."""
        place = {"xref": "x", "yref": "y", "xanchor": "left", "yanchor": "top"}
        look = {"sizing": "stretch", "layer": "below"}
        self._images.append(
            {"source": source, "x": x, "y": y, "sizex": width, "sizey": height, **place, **look}
        )
        corners = {"x0": x, "x1": x + width, "y0": y, "y1": y + height}
        frame = {"line": {"color": LINE, "width": 1}, "fillcolor": "rgba(0,0,0,0)", "opacity": 1}
        self._shapes.append({"type": "rect", **corners, **frame})

    def eigenvector(self, vector: Tensor, shape: tuple[int, int], *, x: float, y: float) -> None:
        """Put a red-blue picture of a vector, one unit wide."""
        picture = diverging(as_image(vector, shape))
        self.picture(picture, x=x, y=y, height=shape[0] / shape[1])

    def image(
        self, pixels: Tensor, shape: tuple[int, int], *, x: float, y: float, width: float = 1
    ) -> None:
        """Put a grey picture of an input."""
        height = width * shape[0] / shape[1]
        self.picture(grey(as_image(pixels, shape)), x=x, y=y, width=width, height=height)

    def thumbnails(
        self, images: Iterable[Tensor], shape: tuple[int, int], *, x: float, y: float
    ) -> None:
        """Put up to three small inputs one below the other, as high as one picture together."""
        # Width of a small input beside a picture.
        thumb = 0.32
        step = (1 - thumb) * shape[0] / shape[1] / 2
        for number, image in enumerate(images):
            self.image(image, shape, x=x, y=y + number * step, width=thumb)

    def line(
        self, start: tuple[float, float], end: tuple[float, float], *, color: str, width: float
    ) -> None:
        """Draw a line of `width` pixels."""
        x, y = zip(start, end, strict=True)
        line = {"color": color, "width": width}
        look = {"mode": "lines", "line": line, "opacity": 0.75, "hoverinfo": "skip"}
        self._traces.append(go.Scatter(x=x, y=y, **look))

    def label(
        self,
        text: str,
        *,
        x: float,
        y: float,
        size: int = 11,
        color: str | None = None,
        on_line: bool = False,
        from_left: bool = False,
        hover: str = "",
    ) -> None:
        """Write `text`, already safe for HTML, centred on x with its top at y.

        With `on_line` it is centred on y too, on a plain ground that keeps it readable. With
        `from_left` it begins at x. `hover` is shown under the pointer.
        """
        place = {"xref": "x", "yref": "y", "xanchor": "left" if from_left else "center"}
        self._labels.append(
            {
                **{"text": text, "x": x, "y": y, "showarrow": False, **place},
                "yanchor": "middle" if on_line else "top",
                "bgcolor": PAPER if on_line else "rgba(0,0,0,0)",
                "font": {"size": size, "color": color},
                "hovertext": hover or None,
            }
        )

    def _scale(self) -> None:
        # Below everything else, so that callers need not leave room for it.
        bar, strip = 1.2, 0.3
        middle, self.height = self.height + strip / 2, self.height + strip
        left = (self.width - bar) / 2
        self.picture(colour_bar(), x=left, y=middle - 0.05, width=bar, height=0.1)
        for name, x in (("negative", left - 0.6), ("positive", left + bar + 0.6)):
            self.label(name, x=x, y=middle, on_line=True)

    def figure(self) -> "go.Figure":
        """Everything collected, as a figure."""
        figure = new_figure(self._traces)
        hidden = {"visible": False, "constrain": "domain"}
        # A longer line would be cut off on a phone.
        lines = wrap(self.title, 44)
        title = "<br>".join(map(plotly_text, lines))
        top = 30 + 18 * len(lines) if lines else 12
        full = round(self.unit * self.height) + top + 4
        dress(figure, height=full, title=title, alt=self.alt or self.title)
        return figure.update_layout(
            images=self._images,
            shapes=self._shapes,
            annotations=self._labels,
            xaxis={"range": [0, self.width], **hidden},
            yaxis={"range": [self.height, 0], "scaleanchor": "x", **hidden},
            margin={"l": 4, "r": 4, "t": top, "b": 4},
            showlegend=False,
            # The page keeps these proportions when it is narrow.
            meta={**figure.layout.meta, "aspect": self.height / self.width, "height": full},
        )


Name = tuple[int, ...]


@checked
def tree_figure(paths: Paths, shape: tuple[int, int], *, title: str, root: str = "") -> "go.Figure":
    """Draw paths from the direction on the left to first-layer eigenvectors on the right.

    An edge is as thick as its |eigenvalue| is large among those of its layer. Positive ones are
    blue, negative ones red. Below a leaf is its effective eigenvalue. `root` is the name of the
    direction.

    Raises:
        BilensError: the paths are of several directions, or more than can be drawn.

    Source: Pearce et al. 2024, figures 1C and 6.
    """
    most = 24
    if len(set(paths.roots.tolist())) != 1 or len(paths) > most:
        raise BilensError(
            f"tree_figure() draws up to {most} paths of one direction; these are {len(paths)} of "
            f"{len(set(paths.roots.tolist()))}. Choose some with paths.truncate() or paths.of()."
        )
    aspect, depth = shape[0] / shape[1], paths.depth
    # In the order of the tree, so that no two edges cross.
    rows = sorted(range(len(paths)), key=lambda row: paths.indices[row].tolist())
    step, margin = 2.4, 0.5
    rise, leaf = aspect + 0.42, margin + step * depth
    canvas = Canvas(leaf + 1.05, rise * len(rows), unit=88, title=title)
    heights: dict[Name, list[float]] = {}
    eigenvalue: dict[Name, float] = {}
    for place, row in enumerate(rows):
        name = tuple(paths.indices[row].tolist())
        for length in range(depth + 1):
            heights.setdefault(name[:length], []).append(rise * place + aspect / 2)
            if length:
                eigenvalue[name[:length]] = float(paths.eigenvalues[row, length - 1])
        canvas.eigenvector(paths.vectors[row], shape, x=leaf, y=rise * place)
        text = signed(paths.effective[row].item())
        canvas.label(text, x=leaf + 0.5, y=rise * place + aspect, color=GREY)
    middle = {name: sum(ys) / len(ys) for name, ys in heights.items()}
    for name, value in eigenvalue.items():
        color, x = BLUE if value > 0 else RED, margin + step * (len(name) - 1)
        start, end = (x, middle[name[:-1]]), (x + step, middle[name])
        of_layer = [abs(v) for other, v in eigenvalue.items() if len(other) == len(name)]
        width = 1 + 6 * abs(value) / (max(of_layer) or 1.0)
        canvas.line(start, end, color=color, width=width)
        at = ((start[0] + end[0]) / 2, (start[1] + end[1]) / 2)
        canvas.label(signed(value, ".2g"), x=at[0], y=at[1], color=color, on_line=True)
    if root:
        text = f"<b>{plotly_text(root)}</b>"
        canvas.label(text, x=margin / 2, y=middle[()], size=14, on_line=True)
    return canvas.figure()
