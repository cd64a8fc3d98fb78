"""Drawings of a cut: the network of a class, its directions, and its matrices."""

from collections.abc import Mapping, Sequence

from bilens.checks import check_index, checked
from bilens.figures.canvas import Canvas, diverging
from bilens.figures.sheet import BLUE, GREY, RED, Figure
from bilens.images.cuts import BondNode, CutReading, ProductEdge, chosen_edges

STEP = 2.9


@checked
def network_figure(reading: CutReading, output: int, shape: tuple[int, int]) -> Figure:
    """Draw the strongest products below a class, from pixels on the left to it on the right."""
    check_index("output", output, reading.data.n_classes)
    depth, aspect = len(reading.cut.cores), shape[0] / shape[1]
    edges = chosen_edges(reading.products, depth, output)
    columns = _ordered(edges, (depth, output))
    rise = aspect + 0.3
    height = rise * max(len(column) for column in columns)
    # Columns of fewer nodes are centred between the others.
    tall = {
        node: (height - rise * len(column)) / 2 + rise * place + aspect / 2
        for column in columns
        for place, node in enumerate(column)
    }
    name = reading.data.class_names[output]
    into = sum(edge.part for edge in edges if edge.target == (depth, output))
    title = f"The logit of {name}: products drawn into it, {into:.0%} of its squared norm"
    # Explanation of a network, below it.
    legend = (
        "Blue raises, red lowers; % is the share of a product.",
        "Two lines into a dot are a product, one line is a square.",
        "2.1 is direction 1 between layers 2 and 3; 0.1 is of the pixels.",
        "At + and − are the images on which a direction is largest and smallest.",
    )
    canvas = Canvas(STEP * depth + 1.6, height + 0.25 * len(legend) + 0.15, unit=78, title=title)
    # At the left, where a phone shows it without scrolling.
    for line, text in enumerate(legend):
        canvas.label(text, x=0, y=height + 0.1 + 0.25 * line, from_left=True)
    for edge in edges:
        # Edges into one node end side by side, in the order of their share.
        same = [other for other in edges if other.target == edge.target]
        _draw_edge(canvas, edge, same.index(edge) - (len(same) - 1) / 2, tall)
    for node, y in tall.items():
        x = STEP * node[0] + (0.0 if node[0] == 0 else 0.6)
        if node[0] == depth:
            canvas.label(name, x=x + 0.35, y=y, size=15, bold=True, on_line=True)
        else:
            _draw_node(canvas, reading, node, (x, y - aspect / 2), shape)
    return canvas.figure()


def _ordered(edges: Sequence[ProductEdge], root: BondNode) -> list[list[BondNode]]:
    """Return the nodes of each bond, the input's first, close to the nodes that they feed."""
    columns: list[list[BondNode]] = [[root]]
    for layer in reversed(range(root[0])):
        # Ordered by the mean place of the nodes above, which keeps most edges from crossing.
        above = {node: place for place, node in enumerate(columns[0])}
        above_of: dict[BondNode, list[float]] = {}
        for edge in edges:
            if edge.target[0] == layer + 1:
                for source in edge.sources:
                    above_of.setdefault(source, []).append(above[edge.target])
        columns.insert(
            0, sorted(above_of, key=lambda node: (sum(above_of[node]) / len(above_of[node]), node))
        )
    return columns


def _draw_edge(
    canvas: Canvas, edge: ProductEdge, offset: float, tall: Mapping[BondNode, float]
) -> None:
    """Two lines into a dot, one for a square, and one from the dot to the target."""
    color = BLUE if edge.coefficient > 0 else RED
    width = 1 + 5 * edge.part**0.5
    end = STEP * edge.target[0] + 0.55
    y = tall[edge.target] + 0.42 * offset
    dot = (end - 0.8, y)
    for source in dict.fromkeys(edge.sources):
        right = STEP * source[0] + (1.0 if source[0] == 0 else 1.6)
        canvas.line((right, tall[source]), dot, color=color, width=width)
    # The product is where both lines meet, and one line leads on from there.
    canvas.line(dot, (end, tall[edge.target]), color=color, width=width)
    canvas.label(f"{edge.part:.0%}", x=dot[0], y=y, color=color, on_line=True)


def _draw_node(
    canvas: Canvas,
    reading: CutReading,
    node: BondNode,
    corner: tuple[float, float],
    shape: tuple[int, int],
) -> None:
    """Draw the picture of a coordinate, or the images at its two ends, and its number below."""
    (x, y), aspect = corner, shape[0] / shape[1]
    if node[0] == 0:
        canvas.eigenvector(reading.cut.write[:, node[1]], shape, x=x, y=y)
    else:
        for place, (i, *_) in enumerate(reading.direction(*node).images):
            image, left = reading.data.test_images[i], x + place / 2
            canvas.image(image, shape, x=left, y=y + aspect / 4, width=0.5)
            label = "+" if place == 0 else "−"
            canvas.label(label, x=left + 0.25, y=y + 0.04 * aspect, color=GREY)
    below = y + aspect * (1 if node[0] == 0 else 0.76) + 0.03
    # Coordinates are numbered from 1.
    canvas.label(f"{node[0]}.{node[1] + 1}", x=x + 0.5, y=below, color=GREY)


@checked
def directions_figure(reading: CutReading, bond: int, shape: tuple[int, int]) -> Figure:
    """Draw the coordinates of a bond in rows: the picture of each, and both of its ends.

    The bond of the input has the number 0.
    """
    check_index("bond", bond, len(reading.cut.ranks))
    rows = [reading.direction(bond, k) for k in range(reading.cut.ranks[bond])]
    aspect = shape[0] / shape[1]
    rise = aspect + 0.16
    n_pictures = 1 + (bond > 0)
    start = 1.1 + n_pictures * 1.08
    images = len(rows[0].images[0])
    names = 1.7
    side = images * 1.04 + names
    where = "of the pixels" if bond == 0 else f"between layers {bond} and {bond + 1}"
    title = f"Coordinates {where}"
    canvas = Canvas(start + 2 * side, rise * len(rows), unit=56, title=title)
    for place, direction in enumerate(rows):
        y = rise * place
        middle = y + aspect / 2
        name = f"{bond}.{direction.number + 1}\n{direction.share:.1%}"
        canvas.label(name, x=0.5, y=middle, color=GREY, on_line=True)
        for k, vector in enumerate(reading.pixels(bond, direction.number)):
            canvas.eigenvector(vector, shape, x=1.05 + 1.08 * k, y=y)
        for k, shown_images in enumerate(direction.images):
            left = start + side * k
            for i, index in enumerate(shown_images):
                canvas.image(reading.data.test_images[index], shape, x=left + 1.04 * i, y=y)
            lines = _moved(direction.effects[k], reading.data.class_names)
            for line, (text, color) in enumerate(lines):
                at = middle + 0.3 * (line - (len(lines) - 1) / 2)
                x = left + side - names / 2 - 0.1
                canvas.label(text, x=x, y=at, color=color, on_line=True)
    return canvas.figure()


@checked
def matrices_figure(reading: CutReading, layer: int) -> Figure:
    """Draw the interaction matrices of a layer of the cut model, one for each output coordinate."""
    check_index("layer", layer, len(reading.cut.cores))
    core = reading.cut.cores[layer]
    matrices = core.dense()
    # One scale for all, so that weak matrices look weak.
    limit = float(matrices.abs().max())
    names = [f"{layer + 1}.{k + 1}" for k in range(core.n_out)]
    if layer == len(reading.cut.cores) - 1:
        names = list(reading.data.class_names)
    n_columns = 7
    n_rows = -(-len(names) // n_columns)
    title = f"Layer {layer + 1}: {core.n_out} matrices of {core.n_in} x {core.n_in}"
    tile = 1.3
    canvas = Canvas(tile * n_columns, tile * n_rows, unit=96, title=title)
    for place, (name, matrix) in enumerate(zip(names, matrices, strict=True)):
        row, column = divmod(place, n_columns)
        x, y = tile * column + (tile - 1) / 2, tile * row
        # Square roots: the few large entries would leave the others white.
        colours = (matrix.sign() * (matrix.abs() / limit).sqrt()).numpy()
        canvas.picture(diverging(colours, 1.0), x=x, y=y, width=1, height=1)
        canvas.label(name, x=x + 0.5, y=y + 1.01, color=GREY)
    return canvas.figure()


def _moved(effects: Sequence[float], names: Sequence[str]) -> list[tuple[str, str]]:
    """Return a line of the classes that an end raises most, one of those it lowers; colours."""
    # Relative to the strongest effect of the same end, since ends differ in size.
    largest = max(map(abs, effects))
    lines = []
    for mark, sign, color in (("▲", 1, BLUE), ("▼", -1, RED)):
        # Effects below a quarter of the largest are not named.
        of_classes = zip(effects, names, strict=True)
        strong = [(sign * x, name) for x, name in of_classes if sign * x > 0.25 * largest]
        strong.sort(key=lambda effect: -effect[0])
        if strong:
            lines.append((f"{mark} {', '.join(name for _, name in strong[:3])}", color))
    return lines
