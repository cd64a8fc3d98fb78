"""Edges of a flow: how much goes from one node to another, through no other part."""

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from bilens.flows.adjoints import (
    Adjoints,
    LayerGraph,
    Sums,
    gradients,
    lacked_flows,
    start_flows,
    token_flows,
)
from bilens.flows.nodes import Node
from bilens.flows.rules import Leaf


class Edges:
    """Edges between some nodes, found in one walk from the last layer down."""

    def __init__(
        self,
        adjoints: Adjoints,
        row: int,
        nodes: Sequence[Node],
        at: Callable[[Node, LayerGraph, Adjoints], tuple[Tensor, Tensor]],
    ) -> None:
        self.adjoints, self.row, self.nodes, self.at = adjoints, row, nodes, at
        self.edges = torch.zeros(len(nodes), len(nodes), dtype=torch.float64, device="cpu")
        # Adjoints of the number that each node has already met: at streams and embeddings.
        self.reading: dict[int, Sums] = {}
        self.changes: dict[int, Tensor] = {}  # of the outputs of nodes
        # Numbers of nodes by their layer and kind.
        self.shown: dict[int | None, dict[str, list[int]]] = defaultdict(lambda: defaultdict(list))
        for index, node in enumerate(nodes):
            self.shown[node.layer][node.kind].append(index)
        self.tokens = {nodes[i].position: i for i in self.shown[None]["token"]}

    def all(self) -> Tensor:
        """Return all edges."""
        adjoints = self.adjoints
        for i, node in enumerate(self.nodes):
            if node.kind == "output":
                self.reading[i] = Sums()
                self.reading[i].add(
                    adjoints.last.leaf, adjoints.of_question(self.row, adjoints.of_last)
                )
        for layer, of_layer in adjoints.layers():
            self._layer(layer, of_layer, self.shown[layer])
        self._embeddings()
        return self.edges

    def _layer(self, layer: int, graph: LayerGraph, ids: Mapping[str, list[int]]) -> None:
        adjoints = self.adjoints
        earlier = adjoints.earlier(layer)
        mlps = [*ids["mlp"], *ids["expert"]]
        outputs = self._outputs(graph, [*mlps, *ids["head"]])
        parts = _parts(graph, ids["head"], mlps)
        starts = graph.leaves if ids["choice"] or adjoints.lacked else []
        places = [*(leaf for leaf, _ in parts), *(leaf.value for leaf in starts)]

        def note(reader: int, adjoints: Sequence[Tensor | None]) -> None:
            """Note the edges to parts and choices, given the adjoints at their places."""
            for (_, members), of_part in zip(parts, adjoints, strict=False):
                self._to_parts(reader, members, of_part, graph)
            for leaf, of_start in zip(starts, adjoints[len(parts) :], strict=True):
                self._to_choice(reader, ids["choice"], leaf, of_start)

        def read(reader: int, value: Tensor, w: Tensor) -> None:
            """Pull an adjoint back to what was there before, and note the edges."""
            results = gradients(value, [*earlier, *places], w)
            self.reading[reader].add_all(earlier, results)
            note(reader, results[len(earlier) :])

        for reader, sums in self.reading.items():
            # What a later layer has read of this one beside the stream.
            note(reader, [sums.pop(x) for x in places])
            w = adjoints.arriving(layer, sums)
            if w is None:
                continue
            if graph.passes and not places:
                sums.add(graph.stream.leaf, w)
            else:
                read(reader, graph.after, w)
        for reader, (value, w) in outputs.items():
            self.reading[reader] = Sums()
            read(reader, value, w)

    def _outputs(
        self, graph: LayerGraph, numbers: Sequence[int]
    ) -> dict[int, tuple[Tensor, Tensor]]:
        """Return the outputs of nodes with their adjoints, and keep the outputs' changes."""
        outputs = {i: self.at(self.nodes[i], graph, self.adjoints) for i in numbers}
        for i, (value, _) in outputs.items():
            self.changes[i] = self.adjoints.change(value)[self.row]
        return outputs

    def _to_parts(
        self, reader: int, numbers: Sequence[int], w: Tensor | None, graph: LayerGraph
    ) -> None:
        """Note the edges to heads, or to MLPs and experts, given the adjoint at all positions."""
        if w is None:
            return
        for i in numbers:
            node, change = self.nodes[i], self.changes[i]
            first = (node.number or 0) * len(change) if node.kind == "head" else 0
            at = graph.of_experts(w) if node.kind == "expert" else w
            row = at[self.row, node.position, first : first + len(change)]
            self.edges[reader, i] += float(row @ change)

    def _to_choice(self, reader: int, numbers: Sequence[int], leaf: Leaf, w: Tensor | None) -> None:
        """Note the edges to a choice, if there is one, and to tokens that one text lacks."""
        if w is None:
            return
        lacked = lacked_flows(self.adjoints, leaf, w)[self.row]
        change = start_flows(self.adjoints, leaf.value, w)[self.row] - lacked.sum()
        for i in numbers:
            self.edges[reader, i] += float(change)
        for position, through in enumerate(lacked.tolist()):
            if position in self.tokens:
                self.edges[reader, self.tokens[position]] += through

    def _embeddings(self) -> None:
        adjoints, q = self.adjoints, self.row
        stream, first = adjoints.graphs[0].stream, adjoints.first
        nodes = self.tokens
        for reader, sums in self.reading.items():
            w = sums.pop(stream.leaf)
            if w is not None:
                sums.add_all(first, gradients(stream.value, first, w))
            flows = token_flows(adjoints, [sums.get(x) for x in first])[q]
            for position, through in enumerate(flows.tolist()):
                if position in nodes:
                    self.edges[reader, nodes[position]] += through


def _parts(graph: LayerGraph, heads: list[int], mlps: list[int]) -> list[tuple[Tensor, list[int]]]:
    """Return where heads and MLPs go on in the graph of a layer, each with its nodes, if any."""
    cuts = [(graph.heads, heads), (graph.mlp, mlps)]
    return [(cut.leaf, numbers) for cut, numbers in cuts if cut and numbers]
