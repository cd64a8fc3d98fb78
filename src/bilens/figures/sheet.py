"""One look for all figures, which matplotlib draws, and figures in pages, notebooks and files.

A function that draws is decorated with `styled`, begins with `new_figure`, and uses matplotlib:

    @styled
    def losses(values: Sequence[float]) -> Figure:
        figure, axes = new_figure(title="Loss")
        axes.plot(values, color=BLUE)
        return figure

Sizes are CSS pixels, 96 to an inch. Files hold no dates, so that equal figures are equal files.
"""

import base64
import io
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache, wraps
from html import escape
from pathlib import Path
from textwrap import wrap
from threading import RLock
from typing import Any, ParamSpec, TypeVar

import matplotlib.figure
import matplotlib.font_manager
import matplotlib.style
from matplotlib.axes import Axes
from matplotlib.rcsetup import cycler
from matplotlib.text import Text
from PIL import Image

from bilens.checks import checked
from bilens.errors import BilensError
from bilens.files import file_names, written_whole

BLUE, RED, GREY = "#2166ac", "#b2182b", "#6e747c"
INK, PAPER, LINE = "#1f2328", "#ffffff", "#d0d4da"
SERIES = (BLUE, RED, "#1b9e77", "#9467bd", "#c07a1a", "#35978f", GREY)
"""Colours of curves, which are seen on light and dark ground."""

VARIABLES = {
    **{BLUE: "blue", RED: "red", GREY: "small", INK: "ink", PAPER: "paper", LINE: "line"},
    **{"#000000": "ink"},
}
"""Colours that a page replaces by its own variables, which a dark page sets to others."""

LEAST = 10
"""Pixels of the smallest letters on a page; a figure that would have smaller ones scrolls."""

CHART = 425
"""Width of a chart in pixels: on a phone its letters still have 10."""

PIXEL = 72 / 96
"""Points of a CSS pixel."""

Args = ParamSpec("Args")
Drawn = TypeVar("Drawn")


class Figure(matplotlib.figure.Figure):
    """A figure of matplotlib that notebooks show as SVG, with `alt` for those who do not see it."""

    alt = ""

    def _repr_html_(self) -> str:
        return image_html(self)


# Settings of matplotlib belong to the process, and visitors of an explorer draw in several threads.
_STYLE_LOCK = RLock()


@cache
def _settings() -> dict[str, Any]:
    fonts = {font.name for font in matplotlib.font_manager.fontManager.ttflist}
    # For letters that DejaVu Sans, which matplotlib brings, lacks.
    other_scripts = (
        *("Noto Sans CJK SC", "Noto Sans CJK JP", "WenQuanYi Zen Hei", "PingFang SC"),
        *("Hiragino Sans", "Microsoft YaHei", "Arial Unicode MS"),
    )
    others = [name for name in other_scripts if name in fonts]
    return {
        "font.family": ["DejaVu Sans", *others, "sans-serif"],
        "font.size": 12 * PIXEL,
        **dict.fromkeys(("axes.labelsize", "xtick.labelsize", "ytick.labelsize"), 12 * PIXEL),
        **dict.fromkeys(("text.color", "axes.labelcolor", "axes.edgecolor"), INK),
        **dict.fromkeys(("xtick.color", "ytick.color"), INK),
        "legend.fontsize": 12 * PIXEL,
        "legend.frameon": False,
        "axes.prop_cycle": cycler(color=SERIES),
        "axes.spines.top": False,
        "axes.spines.right": False,
        "image.interpolation": "none",
        "image.composite_image": False,
        "text.parse_math": False,
        "svg.fonttype": "none",
        "svg.hashsalt": "bilens",
        "pdf.fonttype": 42,
    }


@contextmanager
def own_style(**changes: Any) -> Iterator[None]:
    """Use the settings of bilens, with changes, in place of the user's own."""
    with _STYLE_LOCK, matplotlib.style.context({**_settings(), **changes}, after_reset=True):
        yield


def styled(draw: Callable[Args, Drawn]) -> Callable[Args, Drawn]:
    """Let a function draw with the settings of bilens, whatever the user's own are."""

    @wraps(draw)
    def wrapper(*args: Args.args, **kwargs: Args.kwargs) -> Drawn:
        with own_style():
            return draw(*args, **kwargs)

    return wrapper


def empty_figure(width: float, height: float, *, title: str, alt: str = "") -> Figure:
    """Return a figure without axes, of pixels; `alt` is by default the title."""
    if not all(isinstance(x, int | float) and 1 <= x <= 1e5 for x in (width, height)):
        raise BilensError(
            f"width={width!r}, height={height!r}: expected numbers of pixels, 1 to 100,000"
        )
    figure = Figure(figsize=(width / 96, height / 96), dpi=96)
    figure.alt = alt or title
    return figure


def new_figure(
    *, width: float = CHART, height: float = 300, title: str = "", alt: str = ""
) -> tuple[Figure, Axes]:
    """Return a figure and its axes, whose labels, legend and title have room beside each other."""
    figure = empty_figure(width, height, title=title, alt=alt)
    figure.set_layout_engine("constrained", w_pad=0.04, h_pad=0.04)
    if title:
        # Bold letters of 14 pixels are about 9.5 wide.
        text = "\n".join(wrap(title, max(1, int(width / 9.5))))
        figure.suptitle(text, x=0.01, ha="left", size=14 * PIXEL, weight="bold")
    return figure, figure.add_subplot()


def add_legend(axes: Axes, title: str = "") -> None:
    """Add a legend below the axes, in as many columns as have room."""
    handles, names = axes.get_legend_handles_labels()
    if not handles:
        return
    figure = axes.get_figure()
    assert isinstance(figure, matplotlib.figure.Figure)
    width = figure.get_figwidth() * 96
    columns = max(1, min(len(names), int(width / (50 + 8 * max(map(len, names))))))
    figure.legend(handles, names, loc="outside lower left", ncols=columns, title=title or None)


def alt_of(figure: matplotlib.figure.Figure, default: str = "") -> str:
    """Return the text for those who do not see a figure: its own, a title, or the default."""
    titles = [figure.get_suptitle(), *(axes.get_title() for axes in figure.axes)]
    return next(filter(None, [getattr(figure, "alt", ""), *titles, default]), "A figure")


def svg_of(figure: matplotlib.figure.Figure, salt: str = "bilens", **options: Any) -> bytes:
    """Return a figure as SVG with text as text; `salt` makes its ids differ from others'."""
    content = io.BytesIO()
    with own_style(**{"svg.hashsalt": salt}):
        figure.savefig(content, format="svg", metadata={"Date": None}, **options)
    return re.sub(rb'data:image/png;base64,([^"]*)', _with_palette, content.getvalue())


def image_html(figure: matplotlib.figure.Figure) -> str:
    """Return a figure as an image that HTML of any kind holds, such as a notebook."""
    source = base64.b64encode(svg_of(figure)).decode()
    look = 'style="max-width: 100%; background: white"'
    return f'<img {look} src="data:image/svg+xml;base64,{source}" alt="{escape(alt_of(figure))}">'


def figure_html(figure: matplotlib.figure.Figure, salt: str, default_alt: str = "") -> str:
    """Return a figure as an element of a page, which a dark page shows in its own colours.

    It is as wide as its place, down to a width at which the smallest letters have `LEAST` pixels,
    and then scrolls. `salt` differs between the figures of a page.
    """
    svg = svg_of(figure, salt, transparent=True).decode()
    svg = re.sub(r"<metadata>.*?</metadata>|<!--.*?-->", "", svg[svg.index("<svg") :], flags=re.S)
    # A page has a style of its own, and numbered names of groups would be there several times.
    svg = re.sub(r"<defs>\s*<style.*?</style>\s*</defs>", "", svg, flags=re.S)
    svg = re.sub(r'<g id="[\w.]+_\d+">', "<g>", svg)
    svg = re.sub(r"<[^>]*>", _in_colours_of_page, svg)
    svg = re.sub(r"\s*\n\s*", " ", svg)
    # What each picture and path says is said once, in the page's style.
    svg = re.sub(r'<image xlink:href=("[^"]*") id="[^"]*"', r"<image href=\1", svg)
    svg = re.sub(r' style="image-rendering:[^"]*"|; stroke-linejoin: miter', "", svg)
    width, height = (round(float(size) * 96) for size in figure.get_size_inches())
    texts = (text for text in figure.findobj(Text) if isinstance(text, Text))
    sizes = [float(text.get_fontsize()) for text in texts if text.get_text()]
    least = min(width, round(width * LEAST / (min(sizes, default=12) / PIXEL)))
    view = re.search(r'viewBox="[^"]*"', svg)
    assert view is not None
    head = f'<svg role="img" aria-label="{escape(alt_of(figure, default_alt))}" {view[0]}'
    look = f"min-width: {least}px; aspect-ratio: {width} / {height}"
    svg = svg.replace(svg[: svg.index(">") + 1], f'{head} style="{look}">', 1)
    room = f"flex: {width} 1 {least}px; max-width: {round(1.4 * width)}px"
    return f'<figure class="scroll" style="{room}">{svg}</figure>'


def _in_colours_of_page(tag: re.Match[str]) -> str:
    """Return a tag with the page's colours, and the letters that it inherits."""
    if tag[0].startswith("<image"):
        return tag[0]
    text = re.sub(
        r"font-family: 'DejaVu Sans'[^;\"]*;? ?| transform=\"rotate\(-0 [^)]*\)\"", "", tag[0]
    )
    for colour, name in VARIABLES.items():
        text = re.sub(rf"(fill|stroke): {colour}\b", rf"\1: var(--{name})", text)
    return text


def _with_palette(picture: re.Match[bytes]) -> bytes:
    """Return a picture of few colours with a palette, which is half as long."""
    source = Image.open(io.BytesIO(base64.b64decode(picture[1])))
    if source.has_transparency_data and min(source.getchannel("A").tobytes()) < 255:
        return picture[0]  # blank cells, which a palette would make black
    image = source.convert("RGB")
    buffer = io.BytesIO()
    red, green, blue = (channel.tobytes() for channel in image.split())
    if red == green == blue:
        image = image.convert("L")
    elif image.getcolors(256) is not None:
        image = image.quantize(256)
    image.save(buffer, "PNG", optimize=True)
    return b"data:image/png;base64," + base64.b64encode(buffer.getvalue())


@checked
def save_figure(figure: matplotlib.figure.Figure, path: str | Path, *, scale: float = 2) -> None:
    """Write a figure as PNG, SVG or PDF, by the name's ending; text stays text in the last two.

    `scale` is device pixels for each CSS pixel, for PNG.

    Raises:
        BilensError: the name has another ending.
    """
    path = Path(path)
    if path.suffix not in (".png", ".svg", ".pdf"):
        raise BilensError(f"path={path} ends in {path.suffix!r}; expected .png, .svg or .pdf")
    with own_style(), written_whole(path) as temporary:
        match path.suffix:
            case ".svg":
                temporary.write_bytes(svg_of(figure))
            case ".pdf":
                figure.savefig(temporary, format="pdf", metadata={"CreationDate": None})
            case _:
                figure.savefig(temporary, format="png", dpi=96 * scale)


@checked
def save_figures(figures: Mapping[str, matplotlib.figure.Figure], folder: Path, kind: str) -> None:
    """Save each figure under its name in `folder` as png, svg or pdf; see `file_names`."""
    for name, figure in zip(file_names(figures), figures.values(), strict=True):
        save_figure(figure, folder / f"{name}.{kind}")
