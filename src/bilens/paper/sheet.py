"""Figures on paper: matplotlib draws the package's plotly figures as SVG, PDF or PNG.

No browser is needed, which plotly itself would start. Scatters, bars and heatmaps on one pair of
axes are drawn, with shapes, pictures and annotations. Sizes are CSS pixels, 96 to an inch. Files
have no dates, so that equal figures are equal files.
"""

import base64
import io
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from html import escape
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bilens.checks import checked
from bilens.errors import BilensError
from bilens.files import file_names, written_whole
from bilens.lazy_imports import go, lazy_import, pio
from bilens.paper.marks import (
    GREY,
    LABELS,
    POINT,
    Axis,
    Item,
    Plot,
    draw_annotation,
    draw_bars,
    draw_heatmap,
    draw_picture,
    draw_scatter,
    draw_shape,
    plain,
    points,
    rgba,
)

if TYPE_CHECKING:
    import matplotlib.figure as mpl_figure
    import matplotlib.font_manager as mpl_fonts
    import matplotlib.style as mpl_style
    import matplotlib.ticker as mpl_ticker
else:  # The extra `figures` installs it; `require_matplotlib` says so.
    mpl_figure = lazy_import("matplotlib.figure")
    mpl_fonts = lazy_import("matplotlib.font_manager")
    mpl_style = lazy_import("matplotlib.style")
    mpl_ticker = lazy_import("matplotlib.ticker")


def has_matplotlib() -> bool:
    """Return True if figures can be saved."""
    return find_spec("matplotlib") is not None


def require_matplotlib() -> None:
    """Raise an error, before figures are computed, if they cannot be saved."""
    if not has_matplotlib():
        raise BilensError("figures are saved by matplotlib: pip install matplotlib")


@checked
def save_figure(
    figure: "go.Figure", path: Path, *, width: int | None = None, scale: float = 2
) -> None:
    """Write a figure as PNG, SVG or PDF, by the name's ending; text stays text in the last two.

    The width is in CSS pixels, by default by the figure's proportions; the height is the
    figure's own. `scale` is device pixels for each of these, for PNG.

    Raises:
        BilensError: matplotlib is missing, or the figure has something other than scatters, bars
            and heatmaps on one pair of axes.
    """
    if path.suffix not in (".png", ".svg", ".pdf"):
        raise BilensError(f"path={path} ends in {path.suffix!r}; expected .png, .svg or .pdf")
    require_matplotlib()
    dates: dict[str, Any] = {".png": {}, ".svg": {"Date": None}, ".pdf": {"CreationDate": None}}
    with own_style(), written_whole(path) as temporary:
        sheet = paper_figure(figure, width)
        options = {"format": path.suffix[1:], "metadata": dates[path.suffix]}
        sheet.savefig(temporary, dpi=96 * scale, **options)


def still_picture(figure: "go.Figure", alt: str) -> str:
    """Return a figure as HTML that needs no script, with a text for those who do not see it."""
    with own_style():
        content = io.BytesIO()
        paper_figure(figure).savefig(content, format="svg", metadata={"Date": None})
    source = f"data:image/svg+xml;base64,{base64.b64encode(content.getvalue()).decode()}"
    return f'<img style="max-width: 100%" src="{source}" alt="{escape(alt)}">'


@checked
def save_figures(figures: "Mapping[str, go.Figure]", folder: Path, kind: str) -> None:
    """Save each figure under its name in `folder` as png, svg or pdf; see `file_names`."""
    for name, figure in zip(file_names(figures), figures.values(), strict=True):
        save_figure(figure, folder / f"{name}.{kind}")


def _natural_width(figure: "go.Figure") -> int:
    layout = figure.layout
    if not (layout.meta and "aspect" in layout.meta):
        return 900
    # Pictures keep their proportions, so the width follows from the height.
    inner = layout.height - layout.margin.t - layout.margin.b
    return int(inner / layout.meta["aspect"] + layout.margin.l + layout.margin.r)


def own_style() -> AbstractContextManager[None]:
    """Return matplotlib's defaults in place of the user's settings, with text as text."""
    installed = {font.name for font in mpl_fonts.fontManager.ttflist}
    # For letters that DejaVu Sans, which matplotlib brings, lacks.
    other_scripts = (
        *("Noto Sans CJK SC", "Noto Sans CJK JP", "WenQuanYi Zen Hei", "PingFang SC"),
        *("Hiragino Sans", "Microsoft YaHei", "Arial Unicode MS"),
    )
    others = [name for name in other_scripts if name in installed]
    settings = {
        "font.family": ["DejaVu Sans", *others, "sans-serif"],
        "svg.fonttype": "none",
        "pdf.fonttype": 42,
        "svg.hashsalt": "bilens",
        "text.parse_math": False,
    }
    return mpl_style.context(settings, after_reset=True)


def paper_figure(figure: "go.Figure", width: int | None = None) -> "mpl_figure.Figure":
    """Return the figure as matplotlib draws it."""
    width = width or _natural_width(figure)
    layout = _full_layout(figure)
    traces = [trace.to_plotly_json() for trace in figure.data]
    axes = {trace.get(f"{name}axis", name) for trace in traces for name in "xy"} - {"x", "y"}
    if axes:
        raise BilensError(
            f"the figure also has the axes {', '.join(sorted(axes))}; expected one pair. Save each "
            "part as a figure of its own, or write a page with figure.write_html()."
        )
    height = layout.get("height", 450)
    sheet = mpl_figure.Figure(figsize=(width / 96, height / 96), dpi=96)
    sheet.set_facecolor(rgba(layout.get("paper_bgcolor", "white")))
    plot = Plot(
        sheet.add_subplot(),
        layout,
        across=Axis(layout.get("xaxis", {})),
        up=Axis(layout.get("yaxis", {})),
        font={"size": 12, "color": GREY, **layout.get("font", {})},
    )
    plot.axes.set_facecolor(rgba(layout.get("plot_bgcolor", "white")))
    _draw_traces(plot, traces)
    drawn = {"images": draw_picture, "shapes": draw_shape, "annotations": draw_annotation}
    for name, draw in drawn.items():
        for item in layout.get(name, ()):
            draw(plot, item)
    _draw_axis(plot, plot.across, plot.axes.xaxis, ("bottom", "top"))
    _draw_axis(plot, plot.up, plot.axes.yaxis, ("left", "right"))
    if "scaleanchor" in plot.up.layout:
        plot.axes.set_aspect("equal")
    _draw_legend(plot, figure)
    _fit(plot, width, height)
    return sheet


def _full_layout(figure: "go.Figure") -> dict[str, Any]:
    """Return the layout, with the template's entries where it has none."""
    own = figure.layout.to_plotly_json()
    template = own.pop("template", {}).get("layout")
    if template is None:
        template = pio.templates[pio.templates.default or "none"].layout.to_plotly_json()
    return _merged(template, own)


def _merged(below: Item, above: Item) -> dict[str, Any]:
    result = dict(below)
    for name, value in above.items():
        is_group = isinstance(value, dict) and isinstance(result.get(name), dict)
        result[name] = _merged(result[name], value) if is_group else value
    return result


def _draw_traces(plot: Plot, traces: Sequence[Item]) -> None:
    if plot.across.is_log:
        plot.axes.set_xscale("log")
    if plot.up.is_log:
        plot.axes.set_yscale("log")
    colors = plot.layout.get("colorway") or pio.templates["plotly"].layout.colorway
    bars = list[tuple[Item, str]]()
    for number, trace in enumerate(traces):
        color = colors[number % len(colors)]
        match trace["type"]:
            case "scatter" | "scattergl":
                draw_scatter(plot, trace, color)
            case "bar":
                bars.append((trace, color))
            case "heatmap":
                draw_heatmap(plot, trace)
            case kind:
                raise BilensError(
                    f"a trace of the figure is of type {kind!r}; expected scatter, bar or heatmap. "
                    "figure.write_html() writes a page of any figure."
                )
    draw_bars(plot, bars)


def _draw_axis(plot: Plot, axis: Axis, drawn: Any, sides: tuple[str, str]) -> None:
    """Set the range, line, ticks and title of an axis, whose line is on the first of two sides."""
    look, axes = axis.layout, plot.axes
    is_across = sides[0] == "bottom"
    if "range" in look:
        ends = [10.0**end if axis.is_log else end for end in look["range"]]
        (axes.set_xlim if is_across else axes.set_ylim)(*ends)
    elif look.get("autorange") == "reversed":
        drawn.set_inverted(True)
    is_visible = look.get("visible", True)
    axes.spines[sides[1]].set_visible(False)
    axes.spines[sides[0]].set_visible(is_visible and look.get("showline", False))
    axes.spines[sides[0]].set_color(rgba(look.get("linecolor", GREY)))
    drawn.set_visible(is_visible)
    if not is_visible:
        return
    if look.get("showgrid", True):
        drawn.grid(True, color=rgba(look.get("gridcolor", "#eee")), linewidth=POINT)
    axes.set_axisbelow(True)
    if look.get("zeroline") and not axis.is_log:
        draw_line = axes.axvline if is_across else axes.axhline
        draw_line(0, color=rgba(look.get("zerolinecolor", GREY)), linewidth=POINT)
    _set_ticks(axis, drawn)
    color, title = rgba(plot.font["color"]), look.get("title", {})
    drawn.set_tick_params(
        which="both",
        length=5 * POINT if look.get("ticks") == "outside" else 0,
        width=POINT,
        color=rgba(look.get("tickcolor", GREY)),
        labelcolor=color,
        labelsize=points({**plot.font, **look.get("tickfont", {})}),
    )
    size = points({**plot.font, "size": 14, **title.get("font", {})})
    drawn.set_label_text(plain(title.get("text") or ""), fontsize=size, color=color)


def _set_ticks(axis: Axis, drawn: Any) -> None:
    look = axis.layout
    if look.get("tickvals") is not None:
        names = look.get("ticktext", look["tickvals"])
        drawn.set_ticks(look["tickvals"], [plain(str(name)) for name in names])
    elif axis.names:
        # Of more than 60 names every second or third is shown.
        step = -(-len(axis.names) // 60)
        names = [plain(name) for name in axis.names]
        drawn.set_ticks(range(0, len(names), step), names[::step])
    elif axis.is_log:
        form = look.get("tickformat", "g")
        drawn.set_major_formatter(lambda value, _: format(value, form))
    else:
        drawn.set_major_locator(mpl_ticker.MaxNLocator("auto", steps=[1, 2, 5, 10]))
    drawn.set_minor_locator(mpl_ticker.NullLocator())


def _draw_legend(plot: Plot, figure: "go.Figure") -> None:
    hidden = {trace.name for trace in figure.data if trace.showlegend is False}
    by_name = dict[str, Any]()
    for handle, name in zip(*plot.axes.get_legend_handles_labels(), strict=True):
        if name not in hidden:
            by_name.setdefault(plain(name), handle)
    if not (by_name and plot.layout.get("showlegend", len(figure.data) > 1)):
        return
    own = plot.layout.get("legend", {})
    row = own.get("orientation") == "h"
    corner = {"x": 0, "y": -0.1} if row else {"x": 1.02, "y": 1}  # plotly's defaults
    look = {**corner, "xanchor": "left", "yanchor": "top", **own}
    down = {"top": "upper", "bottom": "lower"}.get(look["yanchor"], "center")
    side = {"left": "left", "right": "right"}.get(look["xanchor"], "center")
    place: Any = "center" if down == side else f"{down} {side}"
    legend = plot.axes.legend(
        list(by_name.values()),
        list(by_name),
        loc=place,
        bbox_to_anchor=(look["x"], look["y"]),
        ncols=len(by_name) if row else 1,
        title=plain(look.get("title", {}).get("text") or ""),
        frameon=False,
        fontsize=points(plot.font),
        title_fontsize=points(plot.font),
        labelcolor=rgba(plot.font["color"]),
        borderaxespad=0,
    )
    legend.set_zorder(LABELS)


def _fit(plot: Plot, width: int, height: int) -> None:
    """Place the axes within the margins, which grow until no label is cut off."""
    axes: Any = plot.axes
    pad = 3
    margin = {"l": 80.0, "r": 80.0, "t": 100.0, "b": 80.0, **plot.layout.get("margin", {})}
    # Labels move with the axes, so that they are measured again.
    for _ in range(3):
        inner = width - margin["l"] - margin["r"], height - margin["t"] - margin["b"]
        left, bottom = margin["l"] / width, margin["b"] / height
        axes.set_position((left, bottom, inner[0] / width, inner[1] / height))
        box = axes.get_tightbbox()
        names = [label.get_window_extent() for label in axes.get_xticklabels() if label.get_text()]
        if any(name.x1 + pad > after.x0 > name.x0 for name, after in pairwise(names)):
            axes.tick_params(axis="x", rotation=90)
            box = axes.get_tightbbox()
        outside = {
            "l": pad - box.x0,
            "r": box.x1 + pad - width,
            "b": pad - box.y0,
            "t": box.y1 + pad - height,
        }
        if max(outside.values()) <= 0:
            break
        for side, excess in outside.items():
            margin[side] += max(0, excess)
    title = plot.layout.get("title", {})
    axes.figure.text(
        margin["l"] / width,
        1 - margin["t"] / 2 / height,
        plain(title.get("text") or ""),
        fontsize=points({"size": 17, **title.get("font", {})}),
        color=rgba(plot.font["color"]),
        va="center",
        wrap=True,
    )
