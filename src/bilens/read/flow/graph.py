"""The graph of some nodes of a flow: edges between them, and what reaches the logit on its paths."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

import pandas as pd
import torch
from jaxtyping import Float, Int
from torch import Tensor

from bilens.analysis import Reading
from bilens.data import Corpus
from bilens.lazy_imports import go
from bilens.read.flow.flow import Flow
from bilens.read.flow.nodes import LEAVES, Node, graph_figure, node_frame, strongest_first
from bilens.sections import Fact, Percent

DRAWN = 20
"""Nodes of a figure, and those that are measured and named."""


def notebook_picture(reading: Reading, **options: Any) -> dict[str, Any]:
    """Return the picture of a reading as Plotly shows figures in this notebook, and its text."""
    return {"text/plain": repr(reading), **reading.plot()._repr_mimebundle_()}


@dataclass(frozen=True, eq=False, repr=False)
class FlowGraph(Reading):
    """Some nodes of a flow and the edges between them.

    Attributes:
        flow: the flow of all nodes.
        nodes: the logit first; above before below.
        edges: row a, column b is the flow from b up to a, through no other part.
    """

    flow: Flow
    nodes: tuple[Node, ...]
    edges: Float[Tensor, "n n"]

    axes: ClassVar[dict[str, str]] = {"x": "node", "y": "flow"}

    @classmethod
    def of(cls, flow: Flow, nodes: Sequence[Node]) -> "FlowGraph":
        """Return the graph of some nodes and the logit."""
        ordered = (flow.output, *sorted(nodes, key=_height, reverse=True))
        return cls(flow, ordered, flow.edges(ordered))

    def some(self, nodes: Sequence[Node]) -> "FlowGraph":
        """Return the graph of some of its nodes, and the logit."""
        places = {node.place for node in nodes}
        index = [i for i, node in enumerate(self.nodes) if i == 0 or node.place in places]
        return FlowGraph(
            self.flow, tuple(self.nodes[i] for i in index), self.edges[index][:, index]
        )

    def facts(self) -> list[Fact]:
        return [
            ("value", self.flow.value),
            ("nodes", len(self.nodes) - 1),
            ("share of the absolute flow", Percent(self.share_of_flow)),
            ("share of the logit on paths among them", Percent(self.share_of_logit)),
        ]

    def frame(self) -> pd.DataFrame:
        """Return a row for each node, those that are measured first."""
        return node_frame(strongest_first(self.nodes[1:]), self.flow.tokens)

    def plot(self, caption: str = "") -> "go.Figure":
        """Draw the graph over the tokens of the text, under a caption."""
        flow = self.flow
        of = "change" if flow.two_texts else "logit"
        caption = caption or (
            f"{len(self.nodes) - 1} of {len(flow.nodes):,} nodes: {self.share_of_logit:.0%} of "
            f"the {of} passes through them alone"
        )
        return graph_figure(self.nodes, flow.tokens, self.path_weights, flow.n_layers, caption)

    _repr_mimebundle_ = notebook_picture

    @property
    def share_of_flow(self) -> float:
        """Share of the absolute flow that the nodes have."""
        return sum(abs(node.flow) for node in self.nodes[1:]) / (self.flow.absolute or 1.0)

    @cached_property
    def path_weights(self) -> Float[Tensor, "n n"]:
        """Weight of each edge: the sum over all paths through it up to the logit, (n, n).

        A node sends up what flows into it, and each part of that inflow has the same share of
        every edge upwards. So an edge into node a counts by the share of a's flow that reaches
        the logit on paths among these nodes.
        """
        flows = self.edges.new_tensor([node.flow for node in self.nodes])
        # arriving[b] / flow[b]: the share of b's flow that reaches the logit among these nodes.
        reached, weights = torch.zeros_like(flows), torch.zeros_like(self.edges)
        reached[0] = 1
        for b in range(1, len(self.nodes)):
            weights[:b, b] = reached[:b] * self.edges[:b, b]
            if self.nodes[b].kind not in LEAVES and flows[b] != 0:
                reached[b] = weights[:b, b].sum() / flows[b]
        return weights

    @property
    def share_of_logit(self) -> float:
        """Share of the logit on paths whose nodes are all among these.

        The sum over all paths from tokens, positions and biases to the logit whose nodes are all
        here, over the logit. What a node sends up is shared out in proportion to what flows in. As
        flows have signs, it may be above 1 or below 0.
        """
        leaves = [i for i, node in enumerate(self.nodes) if node.kind in LEAVES]
        total = float(self.path_weights[:, leaves].sum())
        return total / self.flow.value if self.flow.value else 0.0


def _height(node: Node) -> tuple[float, bool]:
    """Return where a node is between the tokens and the logit."""
    return (-1 if node.layer is None else node.layer, node.part == "mlp" and node.kind == "mlp")


def first_texts(corpus: Corpus, n_tokens: int = 4096) -> Iterator[Int[Tensor, " time"]]:
    """Yield the token ids of validation texts, up to a number of tokens."""
    for row in corpus.validation:
        if n_tokens <= 0:
            return
        yield row["input_ids"]
        n_tokens -= len(row["input_ids"])
