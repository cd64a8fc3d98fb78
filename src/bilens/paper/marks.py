"""Traces, shapes, pictures and annotations of plotly figures, drawn on axes of matplotlib."""

import base64
import io
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import unescape
from typing import TYPE_CHECKING, Any

import numpy as np
from PIL import Image

from bilens.errors import BilensError
from bilens.lazy_imports import lazy_import

if TYPE_CHECKING:
    import matplotlib.colors as mpl_colors
    import matplotlib.image as mpl_image
    import matplotlib.patches as mpl_patches
    import matplotlib.path as mpl_path
    import matplotlib.transforms as mpl_transforms
    from matplotlib.axes import Axes
else:  # The extra `figures` installs it; `paper.require_matplotlib` says so.
    mpl_colors = lazy_import("matplotlib.colors")
    mpl_image = lazy_import("matplotlib.image")
    mpl_patches = lazy_import("matplotlib.patches")
    mpl_path = lazy_import("matplotlib.path")
    mpl_transforms = lazy_import("matplotlib.transforms")

POINT = 72 / 96
"""Points of a CSS pixel."""
# What is above covers what is below, in plotly's order.
TRACES, LABELS = 3, 6
CLEAR, GREY = "rgba(0,0,0,0)", "#444"
Item = Mapping[str, Any]
"""A part of a figure as plotly's JSON has it."""


class Axis:
    """Places on an axis: numbers as they are, names in the order in which they come."""

    def __init__(self, layout: Item) -> None:
        self.layout = layout
        self.is_log = layout.get("type") == "log"
        self.names: dict[str, int] = {}

    def places(self, values: Any) -> np.ndarray:
        """Return the place of each value of a trace."""
        values = unpacked(values)
        if self.layout.get("type") == "category" or any(isinstance(v, str) for v in values):
            places = [self.names.setdefault(str(value), len(self.names)) for value in values]
            return np.array(places, dtype=float)
        return np.array(values, dtype=float)

    def place(self, item: Item, key: str, *, log: bool = False) -> float:
        """Return a place of a shape, picture or annotation; the last has logarithms on log axes."""
        value = item[key]
        if isinstance(value, str):
            return float(self.names[value])
        is_power = log and self.is_log and not is_relative(item, key[0])
        return 10.0**value if is_power else float(value)


@dataclass(frozen=True)
class Plot:
    """A pair of axes to draw on, their places, and the font of labels."""

    axes: "Axes"
    layout: Item
    across: Axis
    up: Axis
    font: Item


def draw_scatter(plot: Plot, trace: Item, color: str) -> None:
    """Draw lines, markers and text, as far as the mode of a scatter has them."""
    x, y = plot.across.places(trace["x"]), plot.up.places(trace["y"])
    mode = trace.get("mode") or ("lines+markers" if len(x) < 20 else "lines")
    line, marker, opacity = trace.get("line", {}), trace.get("marker", {}), trace.get("opacity", 1)
    look: dict[str, Any] = {"label": trace.get("name"), "zorder": TRACES}
    color = line.get("color") or color
    if trace.get("fill", "none") != "none":
        raise BilensError(f"fill={trace['fill']!r} of a scatter cannot be drawn on paper; omit it")
    if "lines" in mode:
        plot.axes.plot(x, y, color=rgba(color, opacity), **pen(line), **look)
        look["label"] = None
    if "markers" in mode:
        _draw_markers(plot, (x, y), {"color": color, "opacity": opacity, **marker}, look)
    if "text" in mode:
        font = {**plot.font, **trace.get("textfont", {})}
        sides = np.broadcast_to(trace.get("textposition", "middle center"), len(x))
        for i, text in enumerate(trace["text"]):
            _write(plot, text, (x[i], y[i]), font, side=str(sides[i]))


def _draw_markers(
    plot: Plot, points: tuple[np.ndarray, np.ndarray], marker: Item, look: Item
) -> None:
    x, y = points
    color, edge = marker["color"], marker.get("line", {})
    colors = [color] * len(x) if isinstance(color, str) else color
    shades = np.array([rgba(one, marker["opacity"]) for one in colors])
    sizes = np.broadcast_to(marker.get("size", 6), len(x)) * POINT
    symbols = np.broadcast_to(marker.get("symbol", "circle"), len(x))
    known = {"circle": "o", "square": "s", "diamond": "D", "cross": "P", "x": "X", "star": "*"}
    known |= {"triangle-up": "^", "triangle-down": "v"}
    for symbol in dict.fromkeys(symbols.tolist()):
        if symbol not in known:
            raise BilensError(f"marker.symbol={symbol!r}, expected one of {', '.join(known)}")
        these = symbols == symbol
        plot.axes.scatter(
            x[these],
            y[these],
            s=sizes[these] ** 2,
            marker=known[symbol],
            c=shades[these],
            linewidths=edge.get("width", 0) * POINT,
            edgecolors=rgba(edge["color"]) if "color" in edge else "none",
            clip_on=False,
            **look,
        )


def draw_bars(plot: Plot, bars: Sequence[tuple[Item, str]]) -> None:
    """Draw all bar traces, each with its colour: beside each other, stacked or overlaid."""
    mode = plot.layout.get("barmode", "group")
    stacks: dict[tuple[float, bool], float] = {}
    for number, (trace, color) in enumerate(bars):
        is_across = trace.get("orientation") == "h"
        axis, along, names = (plot.up, "x", "y") if is_across else (plot.across, "y", "x")
        places, lengths = axis.places(trace[names]), np.array(unpacked(trace[along]), dtype=float)
        thickness, starts = 1 - plot.layout.get("bargap", 0.2), np.zeros(len(lengths))
        if mode == "group":
            thickness /= len(bars)
            places = places + thickness * (number - (len(bars) - 1) / 2)
        elif mode != "overlay":
            for i, length in enumerate(lengths):
                # Negative bars are stacked downwards.
                stack = (float(places[i]), bool(length < 0))
                starts[i] = stacks.get(stack, 0.0)
                stacks[stack] = starts[i] + length
        shade = trace.get("marker", {}).get("color") or color
        shades = [shade] * len(places) if isinstance(shade, str) else shade
        draw: Any = plot.axes.barh if is_across else plot.axes.bar
        draw(
            places,
            lengths,
            thickness,
            starts,
            color=[rgba(one, trace.get("opacity", 1)) for one in shades],
            label=trace.get("name"),
            zorder=TRACES,
        )


def draw_heatmap(plot: Plot, trace: Item) -> None:
    """Draw a matrix, words in its cells if it has a template for them, and the scale beside it."""
    look = {**plot.layout.get("coloraxis", {}), **trace}
    colors = look.get("colorscale") or plot.layout.get("colorscale", {}).get("sequential")
    if colors is None:
        raise BilensError("a heatmap has no colorscale; set one: go.Heatmap(colorscale=...)")
    z = np.array(unpacked(trace["z"]), dtype=float)
    x = plot.across.places(trace.get("x", np.arange(z.shape[1])))
    y = plot.up.places(trace.get("y", np.arange(z.shape[0])))
    stops = [(float(place), rgba(color)) for place, color in colors]
    gap = max(trace.get("xgap", 0), trace.get("ygap", 0))
    mesh = plot.axes.pcolormesh(
        x,
        y,
        np.ma.masked_invalid(z),
        cmap=mpl_colors.LinearSegmentedColormap.from_list("scale", stops),
        vmin=look.get("zmin", look.get("cmin")),
        vmax=look.get("zmax", look.get("cmax")),
        edgecolors=rgba(plot.layout.get("plot_bgcolor", "white")) if gap else "face",
        linewidth=gap * POINT,
        rasterized=z.size > 10_000,
    )
    if (template := trace.get("texttemplate")) is not None:
        for i, j in np.ndindex(*z.shape):
            cell = {"z": z[i, j], "text": trace["text"][i][j] if "text" in trace else ""}
            is_dark = np.dot(mesh.cmap(mesh.norm(z[i, j]))[:3], (0.3, 0.6, 0.1)) < 0.5
            font = {**plot.font, "color": "white"} if is_dark else plot.font
            # A template of plotly's without its % is one of Python's.
            text = template.replace("%{", "{").format(**cell)
            _write(plot, text, (float(x[j]), float(y[i])), font)
    if look.get("showscale", True):
        scale_axes = plot.axes.inset_axes((1.02, 0, 0.015, 1))
        scale = plot.axes.figure.colorbar(mesh, cax=scale_axes)
        scale.outline.set_visible(False)
        scale_axes.tick_params(labelsize=points(plot.font), labelcolor=rgba(plot.font["color"]))


def draw_picture(plot: Plot, picture: Item) -> None:
    """Draw a picture from its data address, stretched over its place."""
    kind, _, content = picture["source"].partition(";base64,")
    if not kind.startswith("data:image/"):
        raise BilensError(f"a picture comes from {kind[:60]}; expected a data address")
    pixels = np.asarray(Image.open(io.BytesIO(base64.b64decode(content))).convert("RGBA"))
    left, top = plot.across.place(picture, "x"), plot.up.place(picture, "y")
    # Downwards, whichever way the axis goes.
    low, high = plot.up.layout.get("range", (0, 1))
    bottom = top + picture["sizey"] * (1 if low > high else -1)
    # Not imshow, which sets up the axes anew for each of hundreds of pictures.
    image = mpl_image.AxesImage(
        plot.axes,
        interpolation="none",
        extent=(left, left + picture["sizex"], bottom, top),
        zorder=1 if picture.get("layer") == "below" else 4,
    )
    image.set_data(pixels)
    plot.axes.add_image(image)


def draw_shape(plot: Plot, shape: Item) -> None:
    """Draw a path, line or rectangle."""
    kind = shape["type"]
    if kind == "path":
        path = _path(shape["path"])
    elif kind in ("line", "rect"):
        x0, x1 = (plot.across.place(shape, key) for key in ("x0", "x1"))
        y0, y1 = (plot.up.place(shape, key) for key in ("y0", "y1"))
        corners = [(x0, y0), (x1, y1)]
        if kind == "rect":
            corners = [(x0, y0), (x1, y0), (x1, y1), (x0, y1), (x0, y0)]
        path = mpl_path.Path(corners)
    else:
        raise BilensError(f"a shape is of type {kind!r}; expected path, line or rect")
    line, opacity = shape.get("line", {}), shape.get("opacity", 1)
    patch = mpl_patches.PathPatch(
        path,
        facecolor=rgba(shape.get("fillcolor", CLEAR), opacity),
        edgecolor=rgba(line.get("color", GREY), opacity),
        transform=_transform(plot, shape),
        zorder=1.5 if shape.get("layer") == "below" else 5,
        **pen(line),
    )
    plot.axes.add_patch(patch)


def _path(text: str) -> "mpl_path.Path":
    """Return the path of an SVG's absolute commands M, L, C and Z."""
    codes = {"M": [1], "L": [2], "C": [4, 4, 4], "Z": [79]}
    kinds, corners = list[int](), list[tuple[float, float]]()
    # The e of a number such as 1e-5 is no command.
    for letter, numbers in re.findall(r"([A-DF-Za-df-z])([^A-DF-Za-df-z]*)", text):
        if letter not in codes:
            raise BilensError(f"a path has the command {letter!r}; expected one of M, L, C and Z")
        values = [float(number) for number in re.findall(r"[^\s,]+", numbers)]
        pairs = list(zip(values[::2], values[1::2], strict=True)) or [(0.0, 0.0)]
        kinds += codes[letter] * (len(pairs) // len(codes[letter]))
        corners += pairs
    return mpl_path.Path(corners, kinds)


def draw_annotation(plot: Plot, note: Item) -> None:
    """Write an annotation, on its ground, with an arrow from there if it has one."""
    x = plot.across.place(note, "x", log=True)
    y = plot.up.place(note, "y", log=True)
    # The axes reach as far as labels, as plotly's do.
    is_inside = [not is_relative(note, name) for name in ("x", "y")]
    plot.axes.update_datalim([(x, y)], *is_inside)
    font = {**plot.font, **{k: v for k, v in note.get("font", {}).items() if v is not None}}
    has_arrow = note.get("showarrow", True)
    right, up = note.get("xshift", 0), note.get("yshift", 0)
    if has_arrow:
        right, up = right + note.get("ax", -10), up - note.get("ay", -30)
    up += {"top": -0.25, "bottom": 0.25}.get(note.get("yanchor", ""), 0) * font["size"]
    color = rgba(font["color"])
    plot.axes.annotate(
        plain(note["text"]),
        (x, y),
        xytext=(right * POINT, up * POINT),
        xycoords=_transform(plot, note),
        textcoords="offset points",
        ha={"left": "left", "right": "right"}.get(note.get("xanchor", ""), "center"),
        va={"top": "top", "bottom": "bottom"}.get(note.get("yanchor", ""), "center"),
        color=color,
        fontsize=points(font),
        fontweight="bold" if "<b>" in note["text"] else "normal",
        bbox={
            "facecolor": rgba(note.get("bgcolor", CLEAR)),
            "edgecolor": rgba(note.get("bordercolor", CLEAR)),
            "pad": (1 + note.get("borderpad", 0)) * POINT,
            "linewidth": POINT,
        },
        arrowprops={"arrowstyle": "->", "color": color} if has_arrow else None,
        annotation_clip=False,
        zorder=LABELS,
    )


def _write(
    plot: Plot, text: str, at: tuple[float, float], font: Item, side: str = "middle center"
) -> None:
    """Write on one side of a point: "middle left" is to the left of it."""
    down, across = side.split()
    right = {"left": -6, "center": 0, "right": 6}[across]
    up = {"bottom": -6, "middle": 0, "top": 6}[down]
    plot.axes.annotate(
        plain(text),
        at,
        xytext=(right * POINT, up * POINT),
        textcoords="offset points",
        ha={"left": "right", "center": "center", "right": "left"}[across],
        va={"bottom": "top", "middle": "center", "top": "bottom"}[down],
        color=rgba(font["color"]),
        fontsize=points(font),
        annotation_clip=False,
        zorder=LABELS,
    )


def is_relative(item: Item, name: str) -> bool:
    """Return whether a place is a share of the axes, from their lower left corner."""
    ref = item.get(f"{name}ref", name)
    return ref == "paper" or ref.endswith("domain")


def _transform(plot: Plot, item: Item) -> Any:
    axes = plot.axes
    x, y = (axes.transAxes if is_relative(item, name) else axes.transData for name in "xy")
    return mpl_transforms.blended_transform_factory(x, y)


def unpacked(values: Any) -> Any:
    """Return values as they are, but for those that plotly has packed, as in figures from JSON."""
    if not isinstance(values, dict):
        return values
    numbers = np.frombuffer(base64.b64decode(values["bdata"]), values["dtype"])
    shape = values.get("shape", str(len(numbers)))
    return numbers.reshape([int(size) for size in shape.split(",")])


def pen(line: Item) -> dict[str, Any]:
    """Return the width and dashes of a line."""
    dash = line.get("dash") or "solid"
    dashes = {
        "solid": "solid",
        "dot": (0, (1, 1.5)),
        "dash": (0, (4, 3)),
        "longdash": (0, (7, 3)),
        "dashdot": (0, (4, 2, 1, 2)),
        "longdashdot": (0, (7, 2, 1, 2)),
    }
    if dash not in dashes:
        raise BilensError(f"line.dash={dash!r}, expected one of {', '.join(dashes)}")
    return {"linewidth": line.get("width", 2) * POINT, "linestyle": dashes[dash]}


def rgba(color: Any, opacity: float = 1) -> tuple[float, float, float, float]:
    """Return a colour of CSS as shares of red, green, blue and opacity."""
    if isinstance(color, str) and (inside := re.fullmatch(r"rgba?\((.*)\)", color)):
        red, green, blue, *own = (float(number) for number in inside[1].split(","))
        return red / 255, green / 255, blue / 255, opacity * (own[0] if own else 1)
    if not (isinstance(color, str) and mpl_colors.is_color_like(color)):
        raise BilensError(f"a colour is {color!r}; expected a name, #rrggbb, rgb() or rgba()")
    red, green, blue, own_opacity = mpl_colors.to_rgba(color)
    return red, green, blue, opacity * own_opacity


def points(font: Item) -> float:
    """Return the size of letters in points."""
    # DejaVu Sans, which matplotlib brings, is wider than the page's letters.
    return float(font["size"] * 0.9 * POINT)


def plain(text: str) -> str:
    """Return a text of HTML without tags and entities."""
    return unescape(re.sub(r"</?[bi]>", "", text.replace("<br>", "\n")))
