"""Nodes of a flow: names, vectors that they read from the stream and write to it, and a picture."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import mean
from typing import Any, Literal

import pandas as pd
from jaxtyping import Float
from torch import Tensor

from bilens.figures.canvas import BLUE, LINE, PAPER, RED, dress
from bilens.lazy_imports import go
from bilens.residual.changes import Part
from bilens.sections import plotly_text, signed

NodeKind = Literal["output", "token", "position", "head", "mlp", "choice", "bias"]
Sublayer = Literal["attention", "mlp"]
LEAVES = ("token", "position", "bias", "choice")
"""Kinds of nodes at which a flow starts."""


@dataclass(frozen=True)
class Node:
    """A part of a model on a text, or between two texts.

    Attributes:
        kind: output is the logit itself, token an embedding, position a position's vector. A head
            is at one position, from one or from all. An mlp is at one position. A choice is what a
            layer chose, such as experts; a bias is at all positions.
        flow: the part of the logit, or of its change, that goes through it.
        layer: its number.
        part: attention or mlp, inside a layer.
        position: its position, at which it writes.
        source: the position that a head attends to; None for all.
        number: of the head.
        measured: its effect in the running model; None where it is not measured.
        raises: next tokens that are more likely with it than without it, the most first.
        lowers: next tokens that are less likely with it.
        sources: tokens of the text at which most of its flow starts.
    """

    kind: NodeKind
    flow: float
    layer: int | None = None
    part: Sublayer | None = None
    position: int | None = None
    source: int | None = None
    number: int | None = None
    measured: float | None = None
    raises: tuple[str, ...] = ()
    lowers: tuple[str, ...] = ()
    sources: tuple[str, ...] = ()

    @property
    def place(self) -> tuple[object, ...]:
        """What tells it from the other nodes of its flow."""
        return self.kind, self.layer, self.part, self.number, self.position, self.source

    @property
    def is_part(self) -> bool:
        """True for a part of the model, false for the logit."""
        return self.kind != "output"

    @property
    def is_removable(self) -> bool:
        """True if it can be removed from a run of the model, or exchanged between two."""
        return self.kind in ("head", "mlp", "token", "position")

    @property
    def address(self) -> str:
        """Its address, such as head.26.0@4 or mlp.26@4; words for what is no part at a place."""
        match self.kind:
            case "head" | "mlp" | "token" | "position":
                return str(Part(self.kind, self.layer, self.number, self.position))
            case "bias":
                where = {"attention": f"heads of layer {self.layer}", "mlp": f"mlp.{self.layer}"}
                return f"biases of {where.get(self.part or '', 'the unembedding')}"
            case "choice":
                return f"choice of layer {self.layer}"
        return "the logit"

    @property
    def strength(self) -> float:
        """Size of its measured effect, or of its flow where it is not measured."""
        return abs(self.flow if self.measured is None else self.measured)

    def name(self, tokens: Sequence[str]) -> str:
        """Return its address with the tokens there; a source that is repeated has its position."""
        if self.position is None or self.kind == "position":
            return self.address
        at = f'"{tokens[self.position]}"'
        if self.kind == "head" and self.source is not None:
            source = tokens[self.source]
            repeated = f" ({self.source})" if tokens.count(source) > 1 else ""
            return f'{self.address} "{source}"{repeated} → {at}'
        return f"{self.address} {at}"

    def effect(self, k: int = 3) -> str:
        """Return in words the tokens that it raises and lowers; empty where it is not measured."""
        sides = (("raises", self.raises[:k]), ("lowers", self.lowers[:k]))
        return "; ".join(f"{verb} {', '.join(names)}" for verb, names in sides if names)

    @property
    def label(self) -> str:
        """Return a name for a picture, whose columns are the tokens of the text."""
        words = self.effect(2).split("; ")
        # Of a part that lowers the logit, first what it lowers.
        words = words if self.flow > 0 else words[::-1]
        return f"{self.address} {words[0]}".strip()


def strongest_first(nodes: Sequence[Node]) -> list[Node]:
    """Return nodes by their measured effects, then those that are not measured by their flows."""
    return sorted(nodes, key=lambda node: (node.measured is None, -node.strength))


def node_frame(nodes: Sequence[Node], tokens: Sequence[str]) -> pd.DataFrame:
    """Return a row for each node; columns in which no node has an entry are left out."""
    frame = pd.DataFrame(
        {
            "node": [node.name(tokens) for node in nodes],
            "kind": [node.kind for node in nodes],
            "layer": [node.layer for node in nodes],
            "flow": [node.flow for node in nodes],
            "measured effect": [node.measured for node in nodes],
            "raises": [", ".join(node.raises) for node in nodes],
            "lowers": [", ".join(node.lowers) for node in nodes],
            "from": [", ".join(node.sources) for node in nodes],
        }
    )
    optional = ["measured effect", "raises", "lowers", "from"]
    empty = [name for name in optional if not frame[name].replace("", None).notna().any()]
    return frame.drop(columns=empty)


def graph_figure(
    nodes: Sequence[Node],
    tokens: Sequence[str],
    weights: Float[Tensor, "n n"],
    n_layers: int,
    caption: str,
) -> "go.Figure":
    """Draw a graph over the tokens of its text: positions across, layers upwards.

    A head is a line from the position that it attends to, with a square where it writes. Curves are
    the edges with the largest weights on paths to the logit. The nodes with the largest sums of
    these weights, those of `FlowGraph.path_weights`, are labelled. The logit is the first node.
    """
    xs, ys, ticks = _arranged(nodes, n_layers)
    largest = max((abs(node.flow) for node in nodes[1:]), default=1.0) or 1.0
    shares = [(abs(node.flow) / largest) ** 0.5 for node in nodes]
    colours = [BLUE if node.flow > 0 else RED for node in nodes]
    figure = dress(go.Figure(), height=100, title=caption)
    starts = [
        ticks["columns"][node.source] if node.source not in (None, node.position) else x
        for node, x in zip(nodes, xs, strict=True)
    ]
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
            "size": [5 + 15 * share for share in shares],
            "color": colours,
            "symbol": ["square" if node.kind == "head" else "circle" for node in nodes],
            "line": {"color": "white", "width": 1},
        },
        text=[_hover(node, tokens) for node in nodes],
        hovertemplate="%{text}<extra></extra>",
        showlegend=False,
    )
    # Flows of early layers are large and cancel, so that labels go by the share that reaches the
    # logit on paths among these nodes.
    reaching = weights.sum(0).abs().tolist()
    labelled = [0, *sorted(range(1, len(nodes)), key=lambda i: -reaching[i])[:20]]
    columns = ticks["columns"]
    left, ends = min(xs) - 0.25, [min(ys) - 1, max(ys) + 1]
    right = max(columns.values()) + 0.2
    for column in {round(x) for x in xs}:
        members = sorted((i for i in labelled if round(xs[i]) == column), key=lambda i: -ys[i])
        for i, y in zip(members, _spread([ys[i] for i in members]), strict=True):
            name = nodes[i].label if i else f"logit {signed(nodes[0].flow)}"
            beside = [x for x, h in zip(xs, ys, strict=True) if h == ys[i] and round(x) == column]
            ends = [min(ends[0], y - 1), max(ends[1], y + 1)]
            # Labels have a fixed width in letters, a letter's share of a figure's width is fixed,
            # and columns share the remainder.
            taken = min(0.6, (len(name) + 6) * 0.0066)
            right = max(right, (max(beside) + 0.2 - left * taken) / (1 - taken))
            figure.add_annotation(
                x=max(beside),
                y=y,
                text=plotly_text(name),
                showarrow=False,
                xanchor="left",
                xshift=10,
                font={"size": 10},
                bgcolor=PAPER,
            )
    names = [plotly_text(f'"{tokens[p]}"') for p in columns]
    figure.update_xaxes(
        tickvals=list(columns.values()), ticktext=names, range=[left, right], zeroline=False
    )
    figure.update_yaxes(
        tickvals=list(ticks["rows"].values()),
        ticktext=list(ticks["rows"]),
        gridcolor=LINE,
        zeroline=False,
        range=ends,
    )
    margins = {"l": 70, "r": 12, "t": 44, "b": 40}
    height = 84 + 20 * (ends[1] - ends[0])
    # Labels of 10 pixels need this width; on a phone the figure scrolls.
    meta = {**figure.layout.meta, "least": 800}
    return figure.update_layout(margin=margins, height=height, meta=meta)


def _spread(heights: Sequence[float]) -> list[float]:
    """Return the nearest heights, in descending order, that are a gap apart."""
    # Pooled adjacent violators: labels that touch are moved as one block to their mean place.
    blocks: list[list[float]] = []
    # Rows between two labels.
    gap = 0.75
    for place, height in enumerate(heights):
        blocks.append([height + gap * place])
        while len(blocks) > 1 and mean(blocks[-2]) < mean(blocks[-1]):
            blocks[-2:] = [blocks[-2] + blocks[-1]]
    moved = [mean(block) for block in blocks for _ in block]
    return [height - gap * place for place, height in enumerate(moved)]


def _arranged(
    nodes: Sequence[Node], n_layers: int
) -> tuple[list[float], list[float], dict[str, dict[Any, float]]]:
    """Return the place of each node, and those of columns and rows; empty ones are left out."""
    positions = {p for node in nodes for p in (node.position, node.source) if p is not None}
    columns = {p: float(i) for i, p in enumerate(sorted(positions))}
    names = [_row(node, n_layers) for node in nodes]
    rows = {name: float(i) for i, (_, name) in enumerate(sorted(set(names)))}
    cells: dict[tuple[float, float], list[int]] = defaultdict(list)
    for i, node in enumerate(nodes):
        column = -0.4 if node.position is None else columns[node.position]
        cells[column, rows[names[i][1]]].append(i)
    widest = max(len(members) for members in cells.values())
    xs, ys = [0.0] * len(names), [0.0] * len(names)
    for (x, y), members in cells.items():
        for place, i in enumerate(members):
            xs[i] = x + (place - (len(members) - 1) / 2) * min(0.09, 0.4 / widest)
            ys[i] = y
    return xs, ys, {"columns": columns, "rows": rows}


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
