"""Pictures of vectors and images, a canvas that they are placed on, and trees of eigenvectors."""

import base64
import io
from collections.abc import Callable, Iterable
from functools import cache
from textwrap import wrap
from typing import Any

import matplotlib.image
import matplotlib.patches
import numpy as np
from jaxtyping import Float, UInt8
from matplotlib.axes import Axes
from PIL import Image
from torch import Tensor

from bilens.checks import checked
from bilens.errors import BilensError
from bilens.figures.sheet import (
    BLUE,
    GREY,
    INK,
    LINE,
    PAPER,
    PIXEL,
    RED,
    Figure,
    empty_figure,
    own_style,
)
from bilens.sections import signed
from bilens.tensor import Paths

DIVERGING = ("#67001f", RED, "#f4a582", "#f7f7f7", "#92c5de", BLUE, "#053061")
"""Negative is red, zero is white, positive is blue, as in Pearce et al. 2024, figure 2."""

Pixels = UInt8[np.ndarray, "h w *channels"]


@cache
def _palette() -> Float[np.ndarray, "127 3"]:
    """127 colours, so that zero is exactly the middle one, and a page stays small."""
    stops = np.array([[*bytes.fromhex(color[1:])] for color in DIVERGING])
    at = np.linspace(-1, 1, len(stops))
    return np.stack([np.interp(np.linspace(-1, 1, 127), at, channel) for channel in stops.T], 1)


def as_image(vector: Float[Tensor, " n"], shape: tuple[int, int]) -> Float[np.ndarray, "h w"]:
    """Fold a vector into an image; a constant coordinate at its end is left out."""
    height, width = shape
    values = vector.detach().cpu().double().numpy()
    if len(values) == height * width + 1:
        values = values[:-1]
    if len(values) != height * width:
        raise BilensError(f"A vector of {len(values)} elements is not an image of shape {shape}")
    return values.reshape(shape)


def diverging(image: Float[np.ndarray, "h w"], limit: float | None = None) -> Pixels:
    """Return a red-blue picture as pixels; `limit` is full colour."""
    limit = float(np.abs(image).max()) if limit is None else limit
    # A picture of zeros is white, and not divided by zero.
    shades = np.clip(image / limit, -1, 1) if limit > 0 else np.zeros_like(image)
    return _palette()[np.rint(63 * shades).astype(int) + 63].astype(np.uint8)


def grey(image: Float[np.ndarray, "h w"]) -> Pixels:
    """Return an input as a picture, ink on paper, as pixels."""
    return np.rint(255 * (1 - np.clip(image, 0, 1))).astype(np.uint8)


def data_address(pixels: Pixels) -> str:
    """Return pixels as an enlarged picture that HTML holds; browsers blur what they enlarge."""
    times = max(1, -(-112 // min(pixels.shape[:2])))
    buffer = io.BytesIO()
    Image.fromarray(pixels.repeat(times, 0).repeat(times, 1)).save(buffer, "PNG", optimize=True)
    return "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode()


class Canvas:
    """Collects pictures, lines and labels, and makes one figure of them.

    x grows to the right, y downwards, and squares stay square; a unit is `unit` pixels. With
    `scale`, a colour bar of eigenvectors is at the bottom.
    """

    def __init__(
        self,
        width: float,
        height: float,
        *,
        unit: int,
        title: str,
        alt: str = "",
        scale: bool = True,
    ) -> None:
        self.width, self.height, self.unit, self.title, self.alt = width, height, unit, title, alt
        self._marks: list[Callable[[Axes], object]] = []
        if scale:
            self._scale()

    def picture(
        self, pixels: Pixels, *, x: float, y: float, height: float, width: float = 1
    ) -> None:
        """Put a picture, (h, w) in grey or (h, w, 3), with its upper left corner at (x, y)."""
        colours = pixels if pixels.ndim == 3 else pixels[..., None].repeat(3, 2)

        def draw(axes: Axes) -> None:
            extent = (x, x + width, y + height, y)
            axes.imshow(
                colours, extent=extent, aspect="auto", interpolation="none", zorder=1, clip_on=False
            )
            frame: dict[str, Any] = {
                "edgecolor": LINE,
                "facecolor": "none",
                "linewidth": PIXEL,
                "clip_on": False,
            }
            axes.add_patch(matplotlib.patches.Rectangle((x, y), width, height, **frame))

        self._marks.append(draw)

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
        for i, image in enumerate(images):
            self.image(image, shape, x=x, y=y + i * step, width=thumb)

    def line(
        self, start: tuple[float, float], end: tuple[float, float], *, color: str, width: float
    ) -> None:
        """Draw a line of `width` pixels."""
        (x0, y0), (x1, y1) = start, end
        look: dict[str, Any] = {
            "color": color,
            "linewidth": width * PIXEL,
            "alpha": 0.75,
            "zorder": 2,
        }
        self._marks.append(lambda axes: axes.plot([x0, x1], [y0, y1], **look))

    def label(
        self,
        text: str,
        *,
        x: float,
        y: float,
        size: int = 12,
        color: str = INK,
        bold: bool = False,
        on_line: bool = False,
        from_left: bool = False,
    ) -> None:
        """Write lines of text, centred on x, with their top at y.

        With `on_line` they are centred on y too, on a plain ground that keeps them readable. With
        `from_left` they begin at x.
        """
        look: dict[str, Any] = {
            "color": color,
            "size": size * PIXEL,
            "weight": "bold" if bold else "normal",
        }
        look |= {"ha": "left" if from_left else "center", "va": "center" if on_line else "top"}
        if on_line:
            look["bbox"] = {"facecolor": PAPER, "edgecolor": "none", "pad": 1}
        lines = text.split("\n")
        step = 1.3 * size / self.unit
        # A line by itself stays in its place whatever letters a browser has.
        top = y - step * (len(lines) - 1) / 2 if on_line else y
        for i, line in enumerate(lines):
            self._text(line, x, top + step * i, look)

    def _text(self, text: str, x: float, y: float, look: dict[str, Any]) -> None:
        self._marks.append(lambda axes: axes.text(x, y, text, zorder=3, **look))

    def _scale(self) -> None:
        # Below everything else, so that callers need not leave room for it.
        bar, strip = 1.2, 0.3
        middle, self.height = self.height + strip / 2, self.height + strip
        left = (self.width - bar) / 2
        colours = _palette().round().astype(np.uint8)[None]
        self.picture(colours, x=left, y=middle - 0.05, width=bar, height=0.1)
        for name, x in (("negative", left - 0.6), ("positive", left + bar + 0.6)):
            self.label(name, x=x, y=middle, on_line=True)

    def figure(self) -> Figure:
        """Everything collected, as a figure."""
        edge = 4
        width, inner = self.unit * self.width + 2 * edge, self.unit * self.height
        lines = wrap(self.title, int(width / 9.5))
        top = 10 + 19 * len(lines) if lines else edge
        height = inner + top + edge
        with own_style():
            figure = empty_figure(width, height, title=self.title, alt=self.alt)
            for i, line in enumerate(lines):
                at = edge / width, 1 - (6 + 19 * i) / height
                figure.text(*at, line, size=14 * PIXEL, weight="bold", va="top")
            place = (edge / width, edge / height, 1 - 2 * edge / width, inner / height)
            axes = figure.add_axes(place, xlim=(0, self.width), ylim=(self.height, 0))
            axes.set_axis_off()
            axes.set_autoscale_on(False)
            for draw in self._marks:
                draw(axes)
        return figure


Name = tuple[int, ...]


@checked
def tree_figure(paths: Paths, shape: tuple[int, int], *, title: str, root: str = "") -> Figure:
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
        canvas.label(text, x=leaf + 0.5, y=rise * place + aspect + 0.03, color=GREY)
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
        canvas.label(root, x=margin / 2, y=middle[()], size=14, bold=True, on_line=True)
    return canvas.figure()
