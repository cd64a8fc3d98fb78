"""The screen of a classifier of several layers."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from html import escape
from pathlib import Path
from typing import Any

import plotly.graph_objects as go
import torch

from bilens.data import ImageData
from bilens.explore.images import sketchpad, unpack_input
from bilens.explore.readings import PanelView, lay_out
from bilens.explore.screen import (
    Screen,
    StateError,
    check_ranges,
    heading,
    html,
    note_html,
    picture,
)
from bilens.lazy_imports import gradio as gr
from bilens.read import (
    CutReading,
    class_paths,
    explain_deep,
    rank_accuracies,
    read_bonds,
    read_deep,
)
from bilens.read.bonds import recorded_settings
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
from bilens.read.deep import PATHS_NAME
from bilens.read.figures.canvas import as_image, colour_bar_html, diverging, grey
from bilens.read.figures.plots import mark_kept
from bilens.reading import signed
from bilens.registry import Analysis
from bilens.report import (
    Branch,
    branches_html,
    explanation_figure,
    heat_figure,
    kept_directions_figure,
    logits_figure,
    path_figure,
    tree_figure,
)
from bilens.tensor import TensorChain
from bilens.tensor.tree import effective_eigenvalues

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


PATHS, DRAWN, BRANCHES = 300, 6, 5
SEEN = 1000
"""Test images that those beside a tree are chosen from."""

MOST_OPEN = 40
"""Nodes that are shown opened at once."""


@dataclass(frozen=True)
class DeepState:
    """State of the screen.

    Attributes:
        output: number of the class.
        opened: nodes of its tree that are open, such as 0.2: the third eigenvector below the first.
        n_paths: paths kept over all classes.
        input: the image that is explained.
        directions: number between any two layers; 0 for the fewest that keep the accuracy.
        walk: directions on the way, such as 3.1, the logit of the first class of a
            model of three layers, and 2.4, the fourth between its layers 2 and 3.
    """

    output: int = 0
    opened: tuple[str, ...] = ("0",)
    n_paths: int = 100
    input: str = "test-0"
    directions: int = 0
    walk: tuple[str, ...] = ()


class DeepView(PanelView):
    """A classifier of several layers read once, and the views of each state.

    Args:
        model: its inputs are images.
        data: images to measure it on.
        run: its run directory, whose saved paths and settings of a cut are used.
        added: further analyses, each with a panel.

    Raises:
        NotBilinearError: a gate is not linear, or the model has a norm.
        BilensError: its inputs have no image shape, or the data does not fit it.
    """

    def __init__(
        self,
        model: TensorChain,
        data: ImageData,
        run: Path | None = None,
        added: Sequence[Analysis] = (),
    ) -> None:
        self.model, self.data, self.shape = model, data, data.shape
        self.names = data.class_names
        self.reading = read_deep(model, data, PATHS, None if run is None else run / PATHS_NAME)
        self.tree = self.reading.tree
        self.n_paths = len(self.reading.search.paths)
        settings = {} if run is None else recorded_settings(run)
        self.bonds = BondView(model, data, self.shape, **settings)
        self.start = DeepState(n_paths=min(100, self.n_paths))
        self.add_panels(added, [data])

    def checked(self, state: DeepState) -> DeepState:
        """Return the state, if it fits the model.

        Raises:
            StateError: it has no such class, node, direction, input, or number of them.
        """
        check_ranges(
            state,
            output=(0, len(self.names) - 1),
            n_paths=(1, self.n_paths),
            directions=(0, self.bonds.most),
        )
        self.bonds.check(state.walk)
        if len(state.opened) > MOST_OPEN:
            raise StateError(
                "opened",
                f"{len(state.opened)} nodes are open; close some, up to {MOST_OPEN} can be",
            )
        for node in state.opened:
            self._numbers(node)
        unpack_input(state.input, self.data)
        return state

    def tree_html(self, state: DeepState) -> str:
        """Return the tree of the class with its opened nodes and their strongest branches."""
        root = self._branch((state.output,), (), set(state.opened))
        return branches_html(root, f"The logit of {self.names[state.output]}")

    def tree_picture(self, state: DeepState) -> go.Figure | None:
        """Draw the strongest paths of the class; None if the search found no path of it."""
        paths = self.reading.search.paths.of(state.output)
        if not len(paths):
            return None
        name = self.names[state.output]
        x = self.data.test_images[:SEEN]
        paths_of_class = class_paths(self.tree, paths.truncate(min(DRAWN, len(paths))), x)
        title = f"Strongest paths of {name}"
        return tree_figure(
            paths_of_class.paths, self.shape, title=title, root=name, inputs=paths_of_class.inputs
        )

    def paths_picture(self) -> go.Figure:
        """Accuracy of the model cut to its strongest paths."""
        return path_figure(self.reading.by_paths, self.reading.accuracy)

    def explanation_figure(self, state: DeepState) -> go.Figure:
        """Draw the input, and the eigenvectors of its highest logits."""
        explanation = explain_deep(self.tree, unpack_input(state.input, self.data))
        title = "What makes the highest logits"
        return explanation_figure(explanation, self.shape, self.names, title=title)

    def input_figure(self, state: DeepState) -> go.Figure:
        """Logits of the input: the model's, and those of the paths kept."""
        x = unpack_input(state.input, self.data)
        with torch.no_grad():
            logits = self.model(x)
        truncated = self.reading.search.paths.truncate(state.n_paths)(x)
        title = f"Logits: {state.n_paths} paths, and all"
        return logits_figure(logits, truncated, self.names, title=title)

    def _numbers(self, node: str) -> tuple[int, ...]:
        parts = node.split(".")
        width = self.tree.branches((0,)).k
        if len(parts) >= self.tree.depth or not all(
            part.isascii() and part.isdigit() and len(part) < 6 and int(part) < width
            for part in parts
        ):
            raise StateError(
                "opened",
                f"{node[:40]!r} is not a node: up to {self.tree.depth - 1} numbers below {width} "
                "with dots between them",
            )
        return tuple(int(part) for part in parts)

    def _branch(self, node: tuple[int, ...], above: tuple[float, ...], opened: set[str]) -> Branch:
        """Return a node, with its branches if it is open; the root always is."""
        # Closed nodes are not decomposed: all nodes of a tree would take minutes.
        name = ".".join(map(str, node[1:]))
        value = above[-1] if above else 1.0
        if name and name not in opened:
            return Branch(name, value)
        spectrum = self.tree.branches(node)
        shown = list(range(min(BRANCHES, spectrum.k)))
        values = spectrum.values[: len(shown)].tolist()
        is_last = len(node) == self.tree.depth
        branches = [
            self._leaf(
                (*node, i), (*above, value), diverging(as_image(spectrum.vectors[i], self.shape))
            )
            if is_last
            else self._branch((*node, i), (*above, value), opened)
            for i, value in zip(shown, values, strict=True)
        ]
        return Branch(name, value, opened=True, branches=branches, more=spectrum.k - len(shown))

    def _leaf(self, node: tuple[int, ...], values: tuple[float, ...], picture: str) -> Branch:
        effective = float(effective_eigenvalues(torch.tensor([values]))[0])
        name = ".".join(map(str, node[1:]))
        return Branch(name, values[-1], text=f"effective {signed(effective)}", picture=picture)


# What was pressed keeps the focus when the page is drawn anew.
PRESSED = """
const press = (button) => {
  const node = button.dataset.node;
  const value = changed(props.value.split(" ").filter(Boolean), node).join(" ");
  if (value === props.value) return;
  props.value = value;
  trigger("input");
  new MutationObserver((_, seen) => {
    element.querySelector(`[data-node="${node}"]`)?.focus({ preventScroll: true });
    seen.disconnect();
  }).observe(element, { childList: true, subtree: true });
};
element.addEventListener("click", (event) => {
  const button = event.target.closest("[data-node]");
  if (button) press(button);
});
element.addEventListener("keydown", (event) => {
  const button = event.target.closest("g[data-node]");
  if (!button || !["Enter", " "].includes(event.key)) return;
  event.preventDefault();
  press(button);
});
"""
TOGGLE = """
// Closing a node closes all below it.
const changed = (opened, node) => {
  const others = opened.filter((name) => name !== node && !name.startsWith(node + "."));
  return opened.includes(node) ? others : [...opened, node];
};
"""
# A step back in a walk forgets what came after it, and a logit starts anew.
STEP = """
const depth = props.depth + ".";
const changed = (walk, node) => {
  if (node.startsWith(depth)) return [node];
  return walk.includes(node) ? walk.slice(0, walk.indexOf(node) + 1) : [...walk, node];
};
"""


def deep_screen(view: DeepView) -> Screen[DeepState]:
    """Lay the screen out inside a `gr.Blocks`.

    Args:
        view: the classifier, read.
    """
    return lay_out(view, view.reading.facts(), _bonds, _tree, _input)


def _nodes(
    screen: Screen[DeepState], field: str, names: str, show: Callable[[DeepState], str], **how: Any
) -> None:
    """Lay out HTML whose pressed nodes are a field of the state, joined by spaces."""
    component = html(
        field,
        " ".join(getattr(screen.view.start, field)),
        html_template='${page}<p class="bilens-refused" role="alert">${message}</p>',
        page="",
        message="",
        **how,
    )
    screen.control(
        field,
        component,
        read=lambda text: tuple(str(text).split()),
        write=lambda nodes: {"value": " ".join(nodes)},
        say=lambda text: {"message": escape(text)},
    )
    screen.part(names, [component], lambda state: [gr.update(page=show(state))])


def _bonds(view: DeepView, screen: Screen[DeepState]) -> None:
    bonds = view.bonds
    heading(
        "The few directions that it uses",
        "The outputs of a layer are many numbers, and the next layer uses few directions of them. "
        "2.1 is the first direction between layers 2 and 3. The drawing shows the products of two "
        "directions that make up a logit, and the products that make up these, down to the pixels. "
        "Pixels of a direction are blue where they raise it and red where they lower it. Press a "
        "direction to see its parts, and walk on from there.",
    )
    with gr.Row():
        with gr.Column(scale=2, min_width=280):
            per_bond = gr.Slider(
                0,
                bonds.most,
                value=view.start.directions,
                step=1,
                label="Directions between any two layers (0: the fewest that keep the accuracy)",
                elem_id="directions",
            )
            screen.content(
                "directions-text", "directions", lambda s: note_html(bonds.text(s.directions))
            )
        with gr.Column(scale=3, min_width=320):
            screen.picture("directions-curve", "directions", lambda s: bonds.curve(s.directions))
    screen.control("directions", per_bond)
    _nodes(
        screen,
        "walk",
        "directions walk",
        lambda state: bonds.page(state.directions, state.walk),
        js_on_load=STEP + PRESSED,
        depth=bonds.depth,
    )

    def of_walk(draw: Callable[[int, tuple[str, ...]], Any]) -> Callable[[DeepState], Any]:
        return lambda state: draw(state.directions, state.walk)

    with gr.Row():
        for name, draw in {"ends": bonds.ends, "made": bonds.made, "used": bonds.used}.items():
            with gr.Column(min_width=320):
                screen.picture(name, "directions walk", of_walk(draw))


def _tree(view: DeepView, screen: Screen[DeepState]) -> None:
    heading(
        "The tree of a logit",
        "Every eigenvector of a layer is a direction in the layer below, with eigenvectors of its "
        "own, down to the pixels. Press one to see what it branches into. λ is its eigenvalue: "
        "blue is positive, red negative, for pixels as well. Effective is the eigenvalue of the "
        "whole path, which says how much it can weigh. On the right are the strongest paths, "
        "with the test images that each eigenvector reacts to most.",
    )
    screen.choice("output", view.names, label="Class")
    with gr.Row():
        with gr.Column(scale=3, min_width=320):
            _nodes(screen, "opened", "output opened", view.tree_html, js_on_load=TOGGLE + PRESSED)
        with gr.Column(scale=4, min_width=320):
            screen.picture("tree", "output", view.tree_picture)


def _input(view: DeepView, screen: Screen[DeepState]) -> None:
    heading(
        "One image, taken apart",
        "Each logit is a sum over the eigenvectors of the last layer; the bold number is what one "
        "of them adds, blue where it raises the logit and red where it lowers it. What it looks "
        "for is a sum over eigenvectors of the layer below: the pictures above the number are "
        "those that weigh most for this image, each with its share. Rest is what all others add.",
    )
    with gr.Row():
        with gr.Column(scale=2, min_width=280):
            sketchpad(screen, view.data)
        with gr.Column(scale=5, min_width=320):
            screen.picture("explanation", "input", view.explanation_figure)
    heading("How many paths it takes")
    n_paths = gr.Slider(
        1,
        view.n_paths,
        value=view.start.n_paths,
        step=1,
        label="Strongest paths kept, over all classes",
        elem_id="n_paths",
    )
    screen.control("n_paths", n_paths)
    with gr.Row():
        with gr.Column(min_width=320):
            screen.picture("logits", "n_paths input", view.input_figure)
        with gr.Column(min_width=320):
            picture("paths", view.paths_picture())
