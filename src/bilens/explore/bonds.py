"""Views of the few directions between the layers of a deep classifier."""

import math
from functools import lru_cache
from html import escape
from typing import Any

import plotly.graph_objects as go

from bilens.data import ImageData
from bilens.explore.screen import StateError
from bilens.read import CutReading, rank_accuracies, read_bonds
from bilens.read.cuts import (
    LEAST_DRAWN,
    BondNode,
    Edge,
    draw_network,
    edges_from,
    edges_into,
    ends_figure,
    node_name,
)
from bilens.read.figures.canvas import as_image, colour_bar_html, diverging, grey
from bilens.read.figures.plots import mark_kept
from bilens.reading import signed
from bilens.report import heat_figure, kept_directions_figure
from bilens.tensor import TensorChain

MOST, PARTNERS, LONGEST_WALK = 60, 6, 30


class BondView:
    """The bonds of a classifier, and the pages of walks through them.

    A direction is called by its bond and its number there, from 1; those of the last bond are the
    logits. Of k directions at each bond, k = 0 is the cut of `read_bonds`, which
    reports show.

    Args:
        model: of several layers; read in float64 on the CPU.
        data: images to measure it on.
        shape: height and width of an input as an image.
        settings: of `read_bonds`.

    Raises:
        NotBilinearError: a gate is not linear, or the model has a norm.
    """

    def __init__(
        self, model: TensorChain, data: ImageData, shape: tuple[int, int], **settings: Any
    ) -> None:
        self.report = read_bonds(model, data, **settings)
        self.model, self.data, self.shape = self.report.model, self.report.data, shape
        self.bonds = self.report.bonds
        self.sizes = [*(bond.k for bond in self.bonds.bonds), data.n_classes]
        self.depth = len(self.sizes) - 1
        self.most = min(MOST, max(self.sizes[:-1]))

    def check(self, walk: tuple[str, ...]) -> None:
        """Raise if a direction of a walk is not one of the model.

        Raises:
            StateError: it is not, or the walk is too long.
        """
        if len(walk) > LONGEST_WALK:
            raise StateError("walk", f"{len(walk)} steps are too many, up to {LONGEST_WALK} can be")
        for name in walk:
            if self._node(name) is None:
                raise StateError(
                    "walk",
                    f"{name[:40]!r} is not a direction: a bond from 0 to {self.depth}, a dot, and "
                    f"a number from 1, up to {', '.join(map(str, self.sizes))} there",
                )

    def _node(self, name: str) -> BondNode | None:
        bond, _, number = name.partition(".")
        if not all(p.isascii() and p.isdigit() and len(p) < 6 for p in (bond, number)):
            return None
        node = int(bond), int(number) - 1
        return node if node[0] <= self.depth and 0 <= node[1] < self.sizes[node[0]] else None

    @lru_cache(maxsize=8)  # noqa: B019  a view lives as long as its app
    def reading(self, k: int) -> CutReading:
        """Cut the model to k directions at each bond."""
        return CutReading.of(self.bonds.cut(k), self.data) if k else self.report.cut_reading

    def nodes(self, k: int, walk: tuple[str, ...]) -> list[BondNode]:
        """Return a walk that starts at a logit, without directions that the cut leaves out."""
        # The slider may have gone below a direction of the walk since it was taken.
        steps = [node for node in map(self._node, walk) if node is not None]
        sizes = (*self.reading(k).cut.ranks, self.data.n_classes)
        steps = [node for node in steps if node[1] < sizes[node[0]]]
        return steps if steps and steps[0][0] == self.depth else [(self.depth, 0), *steps]

    def text(self, k: int) -> str:
        """Return a sentence on the accuracy with this number of directions."""
        _, accuracy, error = self._measured(k)
        ranks = " + ".join(map(str, self.report.cut.ranks))
        size = f"{k} directions between layers" if k else f"{ranks} directions, the fewest,"
        return (
            f"With {size} the model gets {accuracy:.2%} of the test images right, with all of them "
            f"{self.report.accuracy:.2%}. On these images the logits change by "
            f"{error:.2g} of their size (RMS, each minus the mean over classes)."
        )

    def curve(self, k: int) -> go.Figure:
        """Plot accuracy against the directions kept, with a mark at k."""
        most, accuracy, _ = self._measured(k)
        full = self.report.accuracy
        figure = kept_directions_figure(self.report.by_rank, full)
        return mark_kept(figure, most, full - accuracy, accuracy)

    @lru_cache(maxsize=64)  # noqa: B019
    def _measured(self, k: int) -> tuple[int, float, float]:
        if not k:
            cut = self.report.cut
            return max(cut.ranks), self.report.cut_accuracy, self.report.held_out.error
        return rank_accuracies(self.bonds, self.data, [k])[0]

    def name(self, node: BondNode) -> str:
        """Return the name of a direction; a logit has that of its class. Not escaped."""
        return self.data.class_names[node[1]] if node[0] == self.depth else node_name(node)

    def ends(self, k: int, walk: tuple[str, ...]) -> go.Figure | None:
        """Draw the effect of the last direction on each logit; None for a logit itself."""
        node = self.nodes(k, walk)[-1]
        if node[0] == self.depth:
            return None
        direction = self.reading(k).direction(*node)
        title = f"What {self.name(node)} adds to the logits"
        return ends_figure(direction, self.data.class_names, title=title)

    def made(self, k: int, walk: tuple[str, ...]) -> go.Figure | None:
        """Draw the interaction matrix of the last direction; None for a direction of the pixels."""
        bond, number = node = self.nodes(k, walk)[-1]
        if bond == 0:
            return None
        core = self.reading(k).cut.cores[bond - 1]
        names = [node_name((bond - 1, i)) for i in range(core.n_in)]
        title = f"What makes {self.name(node)}"
        return heat_figure(core.interaction(output=number).dense(), names, names, title=title)

    def used(self, k: int, walk: tuple[str, ...]) -> go.Figure | None:
        """Draw the products that the last direction is part of; None for a logit."""
        bond, number = node = self.nodes(k, walk)[-1]
        if bond == self.depth:
            return None
        core = self.reading(k).cut.cores[bond]
        others = [node_name((bond, i)) for i in range(core.n_in)]
        targets = [self.name((bond + 1, i)) for i in range(core.n_out)]
        title = f"What {self.name(node)} goes into"
        return heat_figure(core.dense()[:, number], targets, others, title=title)

    def page(self, k: int, walk: tuple[str, ...]) -> str:
        """Return the drawn network and the last direction of the walk, as HTML.

        Each possible next step is a button with its name in `data-node`.
        """
        nodes, reading = self.nodes(k, walk), self.reading(k)
        last = nodes[-1]
        trail = " › ".join(
            self._button(node, escape(self.name(node)), is_chosen=node == last) for node in nodes
        )
        selected = None if last[0] == self.depth else last
        drawing = draw_network(reading, nodes[0][1], self.shape, selected)
        return (
            f'{self._logits(nodes[0][1])}<div class="steps">Walk {trail}</div>'
            f'<div class="bonds"><div class="network scroll">{drawing.svg()}</div>'
            f"{self._card(reading, last)}</div>"
        )

    def _logits(self, number: int) -> str:
        buttons = (
            self._button((self.depth, i), escape(name), is_chosen=i == number)
            for i, name in enumerate(self.data.class_names)
        )
        return f'<div class="steps" role="group" aria-label="logit">Logit {"".join(buttons)}</div>'

    def _card(self, reading: CutReading, node: BondNode) -> str:
        bond, number = node
        if bond == self.depth:
            head, ends = f"The logit of {escape(self.name(node))}", ""
        else:
            direction = reading.direction(bond, number)
            place = "of the pixels" if bond == 0 else f"between layers {bond} and {bond + 1}"
            head = f"{self.name(node)}, {place}, {direction.share:.1%} of the squared norm"
            ends = "".join(
                self._pictures(
                    caption,
                    [grey(as_image(self.data.test_images[i], self.shape)) for i in end.images],
                )
                for caption, end in zip(("largest on", "smallest on"), direction.ends, strict=True)
            )
        pictures = [diverging(as_image(x, self.shape)) for x in reading.pixels(bond, number)]
        captions = ("in pixels",) if bond == 0 else ("makes it large", "makes it small")
        kinds = ("",) if bond == 0 else ("up", "down")
        shown = "".join(
            self._pictures(caption, [image], kind)
            for caption, image, kind in zip(captions, pictures, kinds, strict=True)
        )
        products = reading.products
        made = self._products(reading, "Made of", node, edges_into(products, node, PARTNERS))
        used = self._products(reading, "Goes into", node, edges_from(products, node, PARTNERS))
        return (
            f'<section class="card"><h3>{head}</h3><div class="ends">{shown}{ends}</div>'
            f'<div class="tables">{made}{used}</div>{colour_bar_html()}</section>'
        )

    def _pictures(self, caption: str, pictures: list[str], kind: str = "") -> str:
        images = "".join(f'<img src="{picture}" alt="">' for picture in pictures)
        return (
            f'<figure class="{kind}"><div>{images}</div>'
            f'<figcaption class="{kind}">{caption}</figcaption></figure>'
        )

    def _products(self, reading: CutReading, title: str, node: BondNode, edges: list[Edge]) -> str:
        """Return the strongest products that make a direction, or that it is part of."""
        edges = [edge for edge in edges if edge.part >= LEAST_DRAWN]
        # A logit is explained by the products that raise it; those that lower it follow.
        edges.sort(key=lambda edge: edge.target[0] == self.depth and edge.coefficient < 0)
        if not edges:
            return ""
        rows = []
        for edge in edges:
            terms = sorted(set(edge.sources), key=lambda term: (term != node, term))
            mark = "²" if len(terms) == 1 else ""
            text = " × ".join(self._named(reading, term, mark) for term in terms)
            if edge.target != node:
                text += f" → {self._named(reading, edge.target)}"
            part = math.copysign(edge.part, edge.coefficient)
            kind = "up" if part > 0 else "down"
            rows.append(f'<li><b class="{kind}">{signed(part, ".0%")}</b> {text}</li>')
        return f'<div class="products"><h4>{title}</h4><ul>{"".join(rows)}</ul></div>'

    def _named(self, reading: CutReading, node: BondNode, mark: str = "") -> str:
        if node[0] == self.depth:
            return self._button(node, escape(self.name(node)))
        if node[0] == 0:
            picture = diverging(as_image(reading.cut.write[:, node[1]], self.shape))
        else:
            highest = reading.direction(*node).ends[0].images[0]
            picture = grey(as_image(self.data.test_images[highest], self.shape))
        return self._button(node, f'<img src="{picture}" alt="">{self.name(node)}{mark}')

    def _button(self, node: BondNode, content: str, *, is_chosen: bool = False) -> str:
        pressed = str(is_chosen).lower()
        name = node_name(node)
        return (
            f'<button type="button" data-node="{name}" aria-pressed="{pressed}">{content}</button>'
        )
