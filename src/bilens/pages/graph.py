"""The picture of a flow: its strongest nodes over the tokens of the text."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from textwrap import wrap
from typing import NamedTuple

import plotly.graph_objects as go
from jaxtyping import Float
from torch import Tensor

from bilens.figures.canvas import BLUE, LINE, PAPER, RED, dress, new_figure
from bilens.flows.graph import DRAWN, Flow, FlowGraph
from bilens.flows.nodes import Node
from bilens.pages.layout import plot_of
from bilens.sections import plotly_text, signed

WIDE, NARROW = 700, 350
"""Pixels for which a picture is laid out: those of a page, and of a phone or a paper's column."""

MARGINS = {"l": 62, "r": 8, "t": 44, "b": 40}

LETTER = 5.8
"""Pixels of a letter of a label."""


def graph_figure(
    nodes: Sequence[Node],
    tokens: Sequence[str],
    weights: Float[Tensor, "n n"],
    n_layers: int,
    caption: str,
    width: int = WIDE,
) -> go.Figure:
    """Draw a graph over the tokens of its text: positions across, layers upwards.

    A head is a line from the position that it attends to, with a square where it writes. Curves are
    the edges with the largest weights on paths to the logit. The nodes with the largest sums of
    these weights, those of `FlowGraph.path_weights`, are labelled. The logit is the first node.
    Tokens without a node are a mark. A label has a line of its own, and has room in a figure of
    `width` pixels and in all wider ones.
    """
    # Flows of early layers are large and cancel, so that labels go by the share that reaches the
    # logit on paths among these nodes.
    reaching = weights.sum(0).abs().tolist()
    labelled = [0, *sorted(range(1, len(nodes)), key=lambda i: -reaching[i])[:20]]
    columns = _Columns(nodes, len(tokens), [_names(nodes[i])[0] for i in labelled], width)
    xs = [columns.at[node.position] for node in nodes]
    moves = [node.source not in (None, node.position) for node in nodes]
    starts = [
        columns.at[node.source] if move else x
        for node, x, move in zip(nodes, xs, moves, strict=True)
    ]
    labels = {i: columns.label(_names(nodes[i]), xs[i], moves[i]) for i in labelled}
    xs, ys, rows = _arranged(nodes, xs, labels, n_layers)
    largest = max((abs(node.flow) for node in nodes[1:]), default=1.0) or 1.0
    shares = [(abs(node.flow) / largest) ** 0.5 for node in nodes]
    colours = [BLUE if node.flow > 0 else RED for node in nodes]
    figure = dress(new_figure(), height=100, title="<br>".join(wrap(caption, 40)))
    starts = [start if move else x for start, x, move in zip(starts, xs, moves, strict=True)]
    strongest = weights.abs().flatten().argsort(descending=True)[:40].tolist()
    most = float(weights.abs().max()) or 1.0
    for a, b in (divmod(i, len(nodes)) for i in strongest):
        weight = float(weights[a, b])
        end = starts[a]  # what a head moves enters it at its source
        bend = (ys[a] - ys[b]) / 2
        figure.add_shape(
            type="path",
            path=f"M {xs[b]},{ys[b]} C {xs[b]},{ys[b] + bend} {end},{ys[a] - bend} {end},{ys[a]}",
            line={"color": BLUE if weight > 0 else RED, "width": 0.5 + 3 * abs(weight) / most},
            opacity=0.4,
            layer="below",
        )
    for x, start, y, share, colour in zip(xs, starts, ys, shares, colours, strict=True):
        if start != x:
            line = {"color": colour, "width": 1 + 3 * share}
            figure.add_shape(type="line", x0=start, x1=x, y0=y, y1=y, line=line, layer="below")
    figure.add_scatter(
        x=xs,
        y=ys,
        mode="markers",
        marker={
            "size": [5 + 11 * share for share in shares],
            "color": colours,
            "symbol": ["square" if node.kind == "head" else "circle" for node in nodes],
            "line": {"color": "white", "width": 1},
        },
        text=[_hover(node, tokens) for node in nodes],
        hovertemplate="%{text}<extra></extra>",
        showlegend=False,
    )
    for i, label in labels.items():
        text = f"logit {signed(nodes[0].flow)}" if i == 0 else label.text
        figure.add_annotation(
            x=xs[i],
            y=ys[i] + (ABOVE if label.is_above else 0),
            text=plotly_text(text),
            showarrow=False,
            xanchor="left" if label.is_right else "right",
            xshift=10 if label.is_right else -10,
            font={"size": 10},
            bgcolor=PAPER,
        )
    names = ["⋯" if p is None else plotly_text(f'"{tokens[p]}"') for p, _ in columns.ticks]
    figure.update_xaxes(
        tickvals=[x for _, x in columns.ticks],
        ticktext=names,
        range=[0, columns.room],
        zeroline=False,
    )
    ends = [-1, max(ys) + 1]
    figure.update_yaxes(
        tickvals=list(rows.values()),
        ticktext=list(rows),
        tickfont={"size": 10},
        gridcolor=LINE,
        zeroline=False,
        range=ends,
    )
    margins = MARGINS | {"t": 26 + 18 * len(wrap(caption, 40))}
    height = 84 + 17 * (ends[1] - ends[0])
    meta = {**figure.layout.meta, "least": columns.room + MARGINS["l"] + MARGINS["r"]}
    return figure.update_layout(margin=margins, height=height, meta=meta)


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

    A wider one has all places further apart, so that labels which fit here fit there.

    Attributes:
        at: place of each position that has a node; of None, left of all.
        ticks: a position, or None for those left out, and its place.
        room: pixels of the axis.
    """

    def __init__(
        self, nodes: Sequence[Node], n_tokens: int, labels: Sequence[str], width: int
    ) -> None:
        used = {p for node in nodes for p in (node.position, node.source) if p is not None}
        marks: list[tuple[int | None, float]] = []
        steps = 0.5 if any(node.position is None for node in nodes) else 0.0
        for position in range(n_tokens):
            if position in used:
                marks.append((position, steps))
                steps += 1
            elif not marks or marks[-1][0] is not None:
                marks.append((None, steps))
                steps += 0.5
        last = max(place for position, place in marks if position is not None)
        # Columns are near each other, so that the labels of the last one have room.
        edge, longest = 22, max(map(len, labels), default=0) * LETTER + 12
        self.room = width - MARGINS["l"] - MARGINS["r"]
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


def _hover(node: Node, tokens: Sequence[str]) -> str:
    lines = [f"{node.name(tokens)}: {signed(node.flow)}"]
    if node.measured is not None:
        lines.append(f"measured {signed(node.measured)}")
    lines += [node.effect()] * bool(node.effect())
    lines += [f"from {', '.join(node.sources)}"] * bool(node.sources)
    return "<br>".join(plotly_text(line) for line in lines)


@plot_of.register
def flow_plot(reading: Flow, *, width: int = WIDE) -> go.Figure:
    """Draw the graph of the strongest nodes over the tokens; see `graph_plot`."""
    return reading.top(DRAWN).plot(width=width)


@plot_of.register
def graph_plot(reading: FlowGraph, caption: str = "", *, width: int = WIDE) -> go.Figure:
    """Draw the graph over the tokens of the text, under a caption.

    Its labels have room in a figure of `width` pixels, such as `save_figure` writes, and in all
    wider ones.
    """
    flow = reading.flow
    quantity = "change" if flow.two_texts else "logit"
    caption = caption or (
        f"{len(reading.nodes) - 1} of {len(flow.nodes):,} nodes: {reading.share_of_logit:.0%} of "
        f"the {quantity} passes through them alone"
    )
    return graph_figure(
        reading.nodes, flow.tokens, reading.path_weights, flow.n_layers, caption, width
    )
