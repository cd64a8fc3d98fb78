"""What the explorer shows of a classifier of several layers: functions from a state to figures."""

from dataclasses import dataclass
from pathlib import Path

import plotly.graph_objects as go
import torch

from bilens.data import ImageData
from bilens.explore.bonds import BondView
from bilens.explore.input_codec import unpack_input
from bilens.explore.readings import PanelView
from bilens.explore.state_checks import StateError, check_ranges
from bilens.read import class_paths, explain_deep, read_deep
from bilens.read.chain import size_facts
from bilens.read.figures.canvas import as_image, diverging
from bilens.reading import shown, signed
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

__all__ = ["DeepState", "DeepView"]

PATHS, DRAWN, BRANCHES = 300, 6, 5
SEEN = 1000
"""Test images that those beside a tree are chosen from."""

MOST_OPEN = 40
"""Nodes that are shown opened at once."""


@dataclass(frozen=True)
class DeepState:
    """What the screen shows.

    Attributes:
        output: number of the class.
        opened: nodes of its tree that are open, such as 0.2: the third eigenvector below the first.
        kept: paths kept over all classes.
        input: the image that is explained.
        directions: how many are kept at each bond; 0 for as few as a report keeps.
        walk: directions that were walked through, such as 3.1, the logit of the first class of a
            model of three layers, and 2.4, the fourth between its layers 2 and 3.
    """

    output: int = 0
    opened: tuple[str, ...] = ("0",)
    kept: int = 100
    input: str = "test-0"
    directions: int = 0
    walk: tuple[str, ...] = ()


class DeepView(PanelView):
    """A classifier of several layers read once, and what each state shows of it.

    Args:
        model: its inputs are images.
        data: what it is measured on.
        saved: a file of `save_paths`, which saves the search if it is of this model.

    Raises:
        NotBilinearError: a gate is not linear, or there is a norm.
        BilensError: its inputs have no image shape, or the data does not fit it.
    """

    def __init__(self, model: TensorChain, data: ImageData, saved: Path | None = None) -> None:
        self.model, self.data, self.shape = model, data, data.shape
        self.names = data.class_names
        self.reading = read_deep(model, data, PATHS, saved)
        self.tree = self.reading.tree
        self.found = len(self.reading.search.paths)
        self.bonds = BondView(model, data, self.shape)
        self.start = DeepState(kept=min(100, self.found))

    @property
    def facts(self) -> list[tuple[str, str]]:
        """A name and a value each."""
        search = self.reading.search
        return [
            ("data", self.data.name),
            ("test accuracy", f"{self.reading.accuracy:.2%}"),
            *((name, shown(value)) for name, value in size_facts(self.model)),
            ("nodes decomposed", f"{search.expanded:,} of {search.total:,}"),
        ]

    def checked(self, state: DeepState) -> DeepState:
        """The state, if the model has it.

        Raises:
            StateError: it has no such class, node, direction, input, or number of them.
        """
        check_ranges(
            state,
            output=(0, len(self.names) - 1),
            kept=(1, self.found),
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
        """The tree of the class with the opened nodes, each with its strongest branches."""
        root = self._branch((state.output,), (), set(state.opened))
        return branches_html(root, f"The logit of {self.names[state.output]}")

    def tree_picture(self, state: DeepState) -> go.Figure | None:
        """The strongest paths of the class, drawn; None where none is among those found."""
        paths = self.reading.search.paths.of(state.output)
        if not len(paths):
            return None
        name = self.names[state.output]
        x = self.data.test_images[:SEEN]
        some = class_paths(self.tree, paths.truncate(min(DRAWN, len(paths))), x)
        title = f"Strongest paths of {name}"
        return tree_figure(some.paths, self.shape, title=title, root=name, inputs=some.inputs)

    def paths_picture(self) -> go.Figure:
        """Accuracy of the model cut to its strongest paths."""
        return path_figure(self.reading.by_paths, self.reading.accuracy)

    def explanation_figure(self, state: DeepState) -> go.Figure:
        """The input, and the eigenvectors that make its highest logits."""
        found = explain_deep(self.tree, unpack_input(state.input, self.data))
        title = "What makes the highest logits"
        return explanation_figure(found, self.shape, self.names, title=title)

    def input_figure(self, state: DeepState) -> go.Figure:
        """Logits of the input: the model's, and those of the paths kept."""
        x = unpack_input(state.input, self.data)
        with torch.no_grad():
            whole = self.model(x)
        kept = self.reading.search.paths.truncate(state.kept)(x)
        title = f"Logits: {state.kept} paths, and all"
        return logits_figure(whole, kept, self.names, title=title)

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
        """A node with what it branches into, where it is open; the root always is."""
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
