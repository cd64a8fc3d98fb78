"""The screen of a classifier of several layers."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

import plotly.graph_objects as go
import torch

from bilens.data import ImageData
from bilens.explore.bonds import BondView
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
from bilens.explore.sketchpad import sketchpad, unpack_input
from bilens.lazy_imports import gradio as gr
from bilens.read import class_paths, explain_deep, read_deep
from bilens.read.bonds import recorded_settings
from bilens.read.deep import PATHS_NAME
from bilens.read.figures.canvas import as_image, diverging
from bilens.reading import signed
from bilens.registry import Analysis
from bilens.report import (
    Branch,
    branches_html,
    explanation_figure,
    logits_figure,
    path_figure,
    tree_figure,
)
from bilens.tensor import TensorChain
from bilens.tensor.tree import effective_eigenvalues

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
