"""A cut model as a drawn network: coordinates as nodes, products of two of them as edges."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import plotly.graph_objects as go
import torch

from bilens.read import BondReading, Direction
from bilens.report.canvas import Canvas
from bilens.report.picture import as_image, diverging, grey
from bilens.report.style import BLUE, GREY, RED
from bilens.tensor import Products

__all__ = ["Edge", "chosen_edges", "network_figure"]

OF_OUTPUT, OF_NODE = 4, 2
"""Products drawn into a logit, and into each coordinate."""
STEP, GAP, SPREAD, JOINT, THICKEST = 2.9, 0.3, 0.42, 0.8, 6.0
Node = tuple[int, int]


@dataclass(frozen=True)
class Edge:
    """A product of two coordinates that adds to a third, or to an output.

    Attributes:
        target: number of the bond behind the layer, and of the coordinate there.
        sources: the two coordinates of the bond before; twice the same for a square.
        coefficient: of the product.
        part: its share of the squared norm of the target.
    """

    target: Node
    sources: tuple[Node, Node]
    coefficient: float
    part: float


def chosen_edges(products: Products, depth: int, output: int) -> list[Edge]:
    """The products that make up most of an output, those that make up most of these, and so on.

    Args:
        products: of a cut model.
        depth: its number of layers.
        output: number of the output.
    """
    edges: list[Edge] = []
    wanted = {output}
    for layer in reversed(range(depth)):
        sources: set[int] = set()
        for target in sorted(wanted):
            rows = torch.nonzero((products.layer == layer) & (products.output == target)).flatten()
            total = float(products.share[rows].sum()) or 1.0
            for row in rows[: OF_OUTPUT if layer == depth - 1 else OF_NODE].tolist():
                pair = int(products.first[row]), int(products.second[row])
                sources |= set(pair)
                edges.append(
                    Edge(
                        (layer + 1, target),
                        ((layer, pair[0]), (layer, pair[1])),
                        float(products.coefficient[row]),
                        float(products.share[row]) / total,
                    )
                )
        wanted = sources
    return edges


def network_figure(reading: BondReading, output: int, shape: tuple[int, int]) -> go.Figure:
    """Draw the strongest products behind an output, from pixels on the left to it on the right.

    Args:
        reading: of a classifier.
        output: number of the class.
        shape: height and width of an input as an image.
    """
    depth, aspect = len(reading.cut.cores), shape[0] / shape[1]
    edges = chosen_edges(reading.cut.products(), depth, output)
    columns = _ordered(edges, depth)
    rise = aspect + GAP
    height = rise * max(len(column) for column in columns)
    tall = {
        node: (height - rise * len(column)) / 2 + rise * place + aspect / 2
        for column in columns
        for place, node in enumerate(column)
    }
    name = reading.data.class_names[output]
    width = STEP * depth + 1.6
    canvas = Canvas(width, height, unit=78, title=f"What makes up the logit of {name}")
    for edge in edges:
        same = [other for other in edges if other.target == edge.target]
        _draw_edge(canvas, edge, same.index(edge) - (len(same) - 1) / 2, tall)
    directions = {(found.bond, found.number): found for found in reading.directions}
    for node, y in tall.items():
        x = STEP * node[0] + (0.0 if node[0] == 0 else 0.6)
        if node[0] == depth:
            canvas.label(f"<b>{name}</b>", x=x + 0.35, y=y, size=15, on_line=True)
        else:
            _draw_node(canvas, reading, directions[node], (x, y - aspect / 2), shape)
    return canvas.figure()


def _ordered(edges: Sequence[Edge], depth: int) -> list[list[Node]]:
    """The nodes of each bond, the input's first, each as near as can be to what it feeds."""
    columns: list[list[Node]] = [[edges[0].target]]
    for layer in reversed(range(depth)):
        above = {node: place for place, node in enumerate(columns[0])}
        fed: dict[Node, list[float]] = {}
        for edge in edges:
            if edge.target[0] == layer + 1:
                for source in edge.sources:
                    fed.setdefault(source, []).append(above[edge.target])
        columns.insert(0, sorted(fed, key=lambda node: (sum(fed[node]) / len(fed[node]), node)))
    return columns


def _draw_edge(canvas: Canvas, edge: Edge, offset: float, tall: Mapping[Node, float]) -> None:
    """Two lines into a dot, one for a square, and one from the dot to the target."""
    color = BLUE if edge.coefficient > 0 else RED
    width = 1 + (THICKEST - 1) * edge.part**0.5
    end = STEP * edge.target[0] + 0.55
    y = tall[edge.target] + SPREAD * offset
    dot = (end - JOINT, y)
    for source in dict.fromkeys(edge.sources):
        right = STEP * source[0] + (1.0 if source[0] == 0 else 1.6)
        canvas.line((right, tall[source]), dot, color=color, width=width)
    canvas.line(dot, (end, tall[edge.target]), color=color, width=width)
    canvas.label(f"{edge.part:.0%}", x=dot[0], y=y, color=color, on_line=True)


def _draw_node(
    canvas: Canvas,
    reading: BondReading,
    direction: Direction,
    corner: tuple[float, float],
    shape: tuple[int, int],
) -> None:
    """A picture of what it stands for, or the images at its two ends; its number below."""
    (x, y), aspect = corner, shape[0] / shape[1]
    if direction.bond == 0:
        stands_for = diverging(as_image(reading.cut.write[:, direction.number], shape))
        canvas.picture(stands_for, x=x, y=y, width=1, height=aspect)
    else:
        for place, end in enumerate(direction.ends):
            image = grey(as_image(reading.data.test_images[end.images[0]], shape))
            left = x + place / 2
            canvas.picture(image, x=left, y=y + aspect / 4, width=0.5, height=aspect / 2)
            label = "+" if place == 0 else "−"
            canvas.label(label, x=left + 0.25, y=y + 0.04 * aspect, color=GREY)
    text = f"{direction.bond}.{direction.number + 1}"
    below = y + aspect * (1 if direction.bond == 0 else 0.76)
    canvas.label(text, x=x + 0.5, y=below, color=GREY)
