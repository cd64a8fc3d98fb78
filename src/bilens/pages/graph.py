"""The picture of a flow: its strongest nodes over the tokens of the text."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from itertools import pairwise
from textwrap import wrap
from typing import Any, NamedTuple

from jaxtyping import Float
from matplotlib.axes import Axes
from matplotlib.patches import PathPatch
from matplotlib.path import Path
from torch import Tensor

from bilens.figures.sheet import BLUE, LINE, PAPER, PIXEL, RED, Figure, empty_figure, styled
from bilens.flows.graph import DRAWN, Flow, FlowGraph
from bilens.flows.nodes import Node
from bilens.pages.layout import plot_of
from bilens.sections import signed

WIDE, NARROW = 700, 350
"""Pixels for which a picture is laid out: those of a page, and of a phone or a paper's column."""

LEFT, RIGHT = 62, 10
"""Pixels beside the axes."""

LABEL, LETTER, LINE_HEIGHT = 10, 6.4, 17
"""Pixels of the letters of labels: their height, their mean width, and that of a line."""


@styled
def graph_figure(
    nodes: Sequence[Node],
    tokens: Sequence[str],
    weights: Float[Tensor, "n n"],
    n_layers: int,
    caption: str,
    width: int = WIDE,
) -> Figure:
    """Draw a graph over the tokens of its text: positions across, layers upwards.

    A head is a line from the position that it attends to, with a square where it writes. Curves are
    the edges with the largest weights on paths to the logit. The nodes with the largest sums of
    these weights, those of `FlowGraph.path_weights`, are labelled. The logit is the first node.
    Tokens without a node are a mark. A label has a line of its own, and has room in a figure of
    `width` pixels.
    """
    # Flows of early layers are large and cancel, so that labels go by the share that reaches the
    # logit on paths among these nodes.
    totals = weights.sum(0).abs().tolist()
    label_ids = [0, *sorted(range(1, len(nodes)), key=lambda i: -totals[i])[:20]]
    columns = _Columns(nodes, len(tokens), [_names(nodes[i])[0] for i in label_ids], width)
    xs = [columns.at[node.position] for node in nodes]
    moves = [node.source not in (None, node.position) for node in nodes]
    labels = {i: columns.label(_names(nodes[i]), xs[i], moves[i]) for i in label_ids}
    xs, ys, rows = _arranged(nodes, xs, labels, n_layers)
    starts = [
        columns.at[node.source] if move else x
        for node, x, move in zip(nodes, xs, moves, strict=True)
    ]
    names = ["⋯" if p is None else f'"{tokens[p]}"' for p, _ in columns.ticks]
    axes = _graph_axes(columns, names, rows, max(ys), caption)
    _draw_edges(axes, weights, xs, starts, ys)
    _draw_nodes(axes, nodes, xs, starts, ys)
    for i, label in labels.items():
        axes.text(
            xs[i] + (10 if label.is_right else -10),
            ys[i] + (ABOVE if label.is_above else 0),
            f"logit {signed(nodes[0].flow)}" if i == 0 else label.text,
            ha="left" if label.is_right else "right",
            va="center",
            size=LABEL * PIXEL,
            bbox={"facecolor": PAPER, "edgecolor": "none", "pad": 0.5},
            zorder=4,
        )
    figure = axes.get_figure()
    assert isinstance(figure, Figure)
    return figure


def _graph_axes(
    columns: "_Columns", names: Sequence[str], rows: Mapping[str, float], top: float, caption: str
) -> Axes:
    """Return the axes of a graph, on which x is in pixels and y in lines of labels."""
    at = [x for _, x in columns.ticks]
    # Tokens stand where they would run into each other.
    ends = [
        (x - LETTER * len(n) / 2, x + LETTER * len(n) / 2) for x, n in zip(at, names, strict=True)
    ]
    stand = any(after[0] < before[1] + 4 for before, after in pairwise(ends))
    below = 14 + (LETTER * max(map(len, names)) if stand else 16)
    width = columns.room + LEFT + RIGHT
    lines = wrap(caption, int(width / 9))
    above, inner = 12 + 18 * len(lines), LINE_HEIGHT * (top + 2)
    height = below + inner + above
    figure = empty_figure(width, height, title=caption)
    look: dict[str, Any] = {"size": 13 * PIXEL, "weight": "bold", "va": "top", "linespacing": 1.2}
    figure.text(4 / width, 1 - 4 / height, "\n".join(lines), **look)
    place = (LEFT / width, below / height, columns.room / width, inner / height)
    axes = figure.add_axes(place, xlim=(0, columns.room), ylim=(-1, top + 1))
    axes.set_xticks(at, names, rotation=90 if stand else 0)
    axes.set_yticks(list(rows.values()), list(rows))
    axes.tick_params(length=0, labelsize=LABEL * PIXEL)
    axes.set_axisbelow(True)
    axes.grid(color=LINE, linewidth=0.5)
    axes.spines["left"].set_visible(False)
    return axes


def _draw_edges(
    axes: Axes,
    weights: Float[Tensor, "n n"],
    xs: Sequence[float],
    starts: Sequence[float],
    ys: Sequence[float],
) -> None:
    """Draw the 40 edges of largest weight as curves; what a head moves enters at its source."""
    most = float(weights.abs().max()) or 1.0
    for place in weights.abs().flatten().argsort(descending=True)[:40].tolist():
        a, b = divmod(place, len(xs))
        weight, end, bend = float(weights[a, b]), starts[a], (ys[a] - ys[b]) / 2
        corners = [(xs[b], ys[b]), (xs[b], ys[b] + bend), (end, ys[a] - bend), (end, ys[a])]
        curve = Path(corners, [Path.MOVETO, Path.CURVE4, Path.CURVE4, Path.CURVE4])
        look: dict[str, Any] = {
            "edgecolor": BLUE if weight > 0 else RED,
            "facecolor": "none",
            "alpha": 0.4,
        }
        thickness = (0.5 + 3 * abs(weight) / most) * PIXEL
        axes.add_patch(PathPatch(curve, linewidth=thickness, zorder=1, **look))


def _draw_nodes(
    axes: Axes,
    nodes: Sequence[Node],
    xs: Sequence[float],
    starts: Sequence[float],
    ys: Sequence[float],
) -> None:
    """Draw nodes, whose area is their |flow|, and lines from where heads attend to."""
    largest = max((abs(node.flow) for node in nodes[1:]), default=1.0) or 1.0
    for node, x, start, y in zip(nodes, xs, starts, ys, strict=True):
        share, color = (abs(node.flow) / largest) ** 0.5, BLUE if node.flow > 0 else RED
        if start != x:
            axes.plot([start, x], [y, y], color=color, linewidth=(1 + 3 * share) * PIXEL, zorder=2)
        axes.plot(
            x,
            y,
            "s" if node.kind == "head" else "o",
            color=color,
            markersize=(5 + 11 * min(share, 1.5)) * PIXEL,
            markeredgecolor=PAPER,
            markeredgewidth=PIXEL,
            zorder=3,
            clip_on=False,
        )


def _names(node: Node) -> list[str]:
    """Return names of a node for its label, the longest first."""
    words = [node.label, node.label.split(", ")[0], node.address]
    return ["logit +0.000"] if node.kind == "output" else words


ABOVE = 0.7
"""Rows by which a label is above its node where the line of a head would cross it."""


class _Label(NamedTuple):
    text: str
    is_right: bool
    is_above: bool


class _Columns:
    """Places across, in pixels of a figure of a given width.

    Attributes:
        at: place of each position that has a node; of None, left of all.
        ticks: a position, or None for those left out, and its place.
        room: pixels of the axis.
    """

    def __init__(
        self, nodes: Sequence[Node], n_tokens: int, labels: Sequence[str], width: int
    ) -> None:
        positions = {p for node in nodes for p in (node.position, node.source) if p is not None}
        marks: list[tuple[int | None, float]] = []
        steps = 0.5 if any(node.position is None for node in nodes) else 0.0
        for position in range(n_tokens):
            if position in positions:
                marks.append((position, steps))
                steps += 1
            elif not marks or marks[-1][0] is not None:
                marks.append((None, steps))
                steps += 0.5
        last = max(place for position, place in marks if position is not None)
        # Columns are near each other, so that the labels of the last one have room.
        edge, longest = 22, max(map(len, labels), default=0) * LETTER + 12
        self.room = width - LEFT - RIGHT
        step = (self.room - edge - longest) / max(last, 1)
        step = max(24.0, min(step, (self.room - 2 * edge) / max(last, 1)))
        self.room = max(self.room, round(2 * edge + step * last))
        self.ticks = [(position, edge + step * place) for position, place in marks]
        self.at: dict[int | None, float] = {**dict(self.ticks), None: 0.5 * edge}

    def label(self, names: Sequence[str], x: float, moves: bool) -> _Label:
        """Return the longest of a node's names that has room on a side of it, and the side."""
        for name in names:
            width = LETTER * len(name) + 10
            if x + width <= self.room:
                return _Label(name, is_right=True, is_above=False)
            if x >= width:
                return _Label(name, is_right=False, is_above=moves)
        return _Label(names[-1], is_right=x < self.room / 2, is_above=moves)


def _arranged(
    nodes: Sequence[Node], xs: Sequence[float], labels: Mapping[int, _Label], n_layers: int
) -> tuple[list[float], list[float], dict[str, float]]:
    """Return the place of each node, and the heights of the rows' names; empty rows are left out.

    A labelled node is in a line of its own, and the others of a row share one, side by side.
    """
    names = [_row(node, n_layers) for node in nodes]
    across, ys = [*xs], [0.0] * len(nodes)
    heights: dict[str, float] = {}
    y = 0.0
    for row in sorted(set(names)):
        first = y
        members = [i for i in range(len(nodes)) if names[i] == row]
        cells: dict[float, int] = defaultdict(int)
        for i in members:
            if i not in labels:
                across[i] += 7 * cells[xs[i]]
                cells[xs[i]] += 1
                ys[i] = y
        y += 1 if cells else 0
        for i in members:
            if i in labels:
                ys[i] = y
                y += 1 + (ABOVE if labels[i].is_above else 0)
        heights[row[1]] = (first + y - 1) / 2
    return across, ys, heights


def _row(node: Node, n_layers: int) -> tuple[int, str]:
    if node.kind == "output":
        return 2 * n_layers, "logit"
    if node.layer is None:
        return -1, "tokens"
    is_mlp = node.part == "mlp"
    return 2 * node.layer + is_mlp, f"{'MLP' if is_mlp else 'heads'} {node.layer}"


@plot_of.register
def flow_plot(reading: Flow, *, width: int = WIDE) -> Figure:
    """Draw the graph of the strongest nodes over the tokens; see `graph_plot`."""
    return reading.top(DRAWN).plot(width=width)


@plot_of.register
def graph_plot(reading: FlowGraph, caption: str = "", *, width: int = WIDE) -> Figure:
    """Draw the graph over the tokens of the text, under a caption and the share that it shows.

    Its labels have room in a figure of `width` pixels.
    """
    flow = reading.flow
    caption = (
        f"{caption} {len(reading.nodes) - 1} of {len(flow.nodes):,} nodes: "
        f"{reading.share_of_logit:.0%} of the change passes through them alone"
    ).strip()
    return graph_figure(
        reading.nodes, flow.tokens, reading.path_weights, flow.n_layers, caption, width
    )
