"""The picture of stages: roles as rows, layers as columns, a bar for each stage."""

from textwrap import wrap
from typing import Any

from matplotlib.axes import Axes

from bilens.circuits.stages import ROWS, Row, Stages
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
    styled,
)

LETTERS, LETTER = 10, 6.5
"""Pixels of the smallest letters, at every width, and about as wide as one of them is."""
BESIDE, ABOVE, BELOW, HIGH = 88, 8, 36, 40
"""Pixels left of the axes, between title and axes, below them without the key, and of a row."""

MIDDLE = 0.68
"""Of a row, where its bar is."""

GROUND: dict[str, Any] = {"bbox": {"facecolor": PAPER, "edgecolor": "none", "pad": 1.5}}
"""Of a label that a dashed line may cross."""


@styled
def stages_figure(
    stages: Stages, n_layers: int, title: str, width: float, model: str = ""
) -> Figure:
    """Draw stages as bars over layers, with f without each, its strongest heads, and both cuts.

    The rows are heads and MLPs at each role that has a stage. Letters have 10 pixels or more.
    """
    places = {(stage.kind, stage.role) for stage in stages.stages}
    rows = [row for row in ROWS if row in places]
    alone, others = stages.measured.restored.value, stages.measured.left.value
    share = f"{len(stages.stages)} stages restore {alone:z.0%}; without them {others:z.0%} is left"
    lines = wrap(title, int(width / 8.2))
    caption = wrap(" · ".join(filter(None, [share, model])), int(width / 5.6))
    key = wrap(_key(stages), int(width / 5.6))
    above, below = ABOVE + 16 * len(lines) + 14 * len(caption), BELOW + 14 * len(key)
    inner = HIGH * len(rows)
    height = above + inner + below
    figure = empty_figure(width, height, title=title, alt=f"{title} {share}")
    look: dict[str, Any] = {"va": "top", "linespacing": 1.2}
    x = 4 / width
    figure.text(x, 1 - 4 / height, "\n".join(lines), size=12 * PIXEL, weight="bold", **look)
    under = 1 - (6 + 16 * len(lines)) / height
    figure.text(x, under, "\n".join(caption), size=LETTERS * PIXEL, **look)
    look["va"] = "bottom"
    figure.text(x, 4 / height, "\n".join(key), size=LETTERS * PIXEL, color=GREY, **look)
    place = (BESIDE / width, below / height, 1 - (BESIDE + 10) / width, inner / height)
    axes = figure.add_axes(place, xlim=(-0.7, n_layers - 0.3), ylim=(len(rows), 0))
    names = [f"{row.role}: {row.kind.replace('mlp', 'MLP')}" for row in rows]
    axes.set_yticks([i + MIDDLE for i in range(len(rows))], names)
    step = max(1, -(-n_layers // 8))
    axes.set_xticks(range(0, n_layers, step))
    axes.tick_params(length=0, labelsize=LETTERS * PIXEL)
    axes.set_xlabel("layer", size=LETTERS * PIXEL)
    axes.spines["left"].set_visible(False)
    for line in range(1, len(rows)):
        axes.axhline(line, color=LINE, linewidth=0.5)
    _draw_stages(axes, stages, rows, width - BESIDE - 10)
    _draw_cuts(axes, stages, rows)
    return figure


def _key(stages: Stages) -> str:
    """Return what the marks of the picture say."""
    entries = ["without: what the other stages restore"]
    if any(stage.strongest for stage in stages.stages):
        entries.append("▼ head that restores most as the stage's only one")
    cuts = stages.cuts
    if cuts is not None and cuts.apart:
        end = "never" if cuts.since is None else f"from that before layer {cuts.since} on"
        word = f"the word alone carries it up to the stream before layer {cuts.until}"
        entries.append(f"dashed: {word}, the end alone {end}")
    return " · ".join(entries)


def _draw_stages(axes: Axes, stages: Stages, rows: list[Row], inner: float) -> None:
    """Draw a bar for each stage, f without it, and marks where its strongest heads are.

    The axes are `inner` pixels wide.
    """
    first, n_layers = axes.get_xlim()
    letter = LETTER * (n_layers - first) / inner  # in layers
    for stage in stages.stages:
        y = rows.index(Row(stage.kind, stage.role)) + MIDDLE
        size = stage.last - stage.first + 1
        for colour, alpha in ((PAPER, 1.0), (BLUE, 0.35)):  # a dashed line ends at a bar
            place: dict[str, Any] = {"height": 0.45, "left": stage.first - 0.45, "zorder": 2}
            axes.barh(y, size - 0.1, color=colour, alpha=alpha, linewidth=0, **place)
        text = f"without {stage.without:z.0%}"
        # It stands on the bar if that is wide enough, or else on the side with more room.
        at, side, ground = (stage.first + stage.last) / 2, "center", {}
        if size < letter * len(text):
            is_right = stage.first < n_layers - stage.last
            at, side = (stage.last + 0.7, "left") if is_right else (stage.first - 0.7, "right")
            ground = GROUND
        axes.text(at, y, text, ha=side, va="center", size=LETTERS * PIXEL, color=INK, **ground)
        for name, f in stage.strongest[:1]:
            layer, text = int(name.split(".")[1]), f"{name}: {f:z.0%}"
            axes.plot([layer], [y - 0.29], marker="v", markersize=4 * PIXEL, color=RED)
            half = letter * len(text) / 2
            at = max(first + half, min(layer, n_layers - half))  # above the mark, within the axes
            look: dict[str, Any] = {"size": LETTERS * PIXEL, "color": RED, **GROUND}
            axes.text(at, y - 0.48, text, ha="center", va="center", **look)


def _draw_cuts(axes: Axes, stages: Stages, rows: list[Row]) -> None:
    """Draw until where the word's stream carries the change, and from where the end's does."""
    cuts = stages.cuts
    if cuts is None or not cuts.apart:
        return
    for role, layer in (("word", cuts.until), ("end", cuts.since)):
        lines = [i for i, row in enumerate(rows) if row.role == role]
        if layer is not None and lines:
            look: dict[str, Any] = {"color": INK, "linewidth": 1, "linestyle": "--", "zorder": 1}
            top = min(lines) + MIDDLE - 0.3  # below the name of a head
            axes.vlines(layer - 0.5, top, max(lines) + 1, **look)
