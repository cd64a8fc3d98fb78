"""Edges of a flow: how much goes from one node to another, through no other part."""

from collections import defaultdict
from collections.abc import Callable, Sequence

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
        self.in_layer: dict[int | None, list[int]] = defaultdict(list)
        for number, node in enumerate(nodes):
            self.in_layer[node.layer].append(number)
        self.tokens = {
            self.nodes[i].position: i for i in self.in_layer[None] if nodes[i].kind == "token"
        }

    def all(self) -> Tensor:
        """Return all edges."""
        adjoints = self.adjoints
        for number, node in enumerate(self.nodes):
            if node.kind == "output":
                self.reading[number] = Sums()
                self.reading[number].add(
                    adjoints.last.leaf, adjoints.of_question(self.row, adjoints.of_last)
                )
        for layer, of_layer in adjoints.layers():
            self._layer(layer, of_layer, self.in_layer[layer])
        self._embeddings()
        return self.edges

    def _layer(self, number: int, graph: LayerGraph, numbers: Sequence[int]) -> None:
        adjoints = self.adjoints
        earlier = adjoints.earlier(number)
        shown: dict[str, list[int]] = defaultdict(list)
        for i in numbers:
            shown[self.nodes[i].kind].append(i)
        read_by = (*shown["mlp"], *shown["expert"], *shown["head"])
        outputs = {i: self.at(self.nodes[i], graph, adjoints) for i in read_by}
        for i, (value, _) in outputs.items():
            self.changes[i] = adjoints.change(value)[self.row]
        cuts = [(graph.heads, shown["head"]), (graph.mlp, [*shown["mlp"], *shown["expert"]])]
        parts = [(cut.leaf, members) for cut, members in cuts if cut and members]
        starts = graph.leaves if shown["choice"] or adjoints.lacked else []
        inputs = [*earlier, *(leaf for leaf, _ in parts), *(leaf.value for leaf in starts)]

        def read(reader: int, value: Tensor, w: Tensor) -> None:
            """Pull an adjoint back to what was there before, and note the edges."""
            found = gradients(value, inputs, w)
            self.reading[reader].add_all(earlier, found)
            for (_, members), of_part in zip(parts, found[len(earlier) :], strict=False):
                self._to_parts(reader, members, of_part, graph)
            for leaf, of_start in zip(starts, found[len(earlier) + len(parts) :], strict=True):
                self._to_choice(reader, shown["choice"], leaf, of_start)

        for reader, sums in self.reading.items():
            # What a later layer has read of this one beside the stream.
            for leaf, members in parts:
                self._to_parts(reader, members, sums.pop(leaf), graph)
            for start in starts:
                self._to_choice(reader, shown["choice"], start, sums.pop(start.value))
            w = adjoints.arriving(number, sums)
            if w is not None and graph.passes and len(inputs) == len(earlier):
                sums.add(graph.stream.leaf, w)
            elif w is not None:
                read(reader, graph.after, w)
        for reader, (value, w) in outputs.items():
            self.reading[reader] = Sums()
            read(reader, value, w)

    def _to_parts(
        self, reader: int, numbers: Sequence[int], w: Tensor | None, graph: LayerGraph
    ) -> None:
        """Note the edges to heads, or to MLPs and experts, given the adjoint at all positions."""
        if w is None:
            return
        for number in numbers:
            node, change = self.nodes[number], self.changes[number]
            first = (node.number or 0) * len(change) if node.kind == "head" else 0
            at = graph.of_experts(w) if node.kind == "expert" else w
            row = at[self.row, node.position, first : first + len(change)]
            self.edges[reader, number] += float(row @ change)

    def _to_choice(self, reader: int, numbers: Sequence[int], leaf: Leaf, w: Tensor | None) -> None:
        """Note the edges to a choice, if there is one, and to tokens that one text lacks."""
        if w is None:
            return
        lacked = lacked_flows(self.adjoints, leaf, w)[self.row]
        chosen = start_flows(self.adjoints, leaf.value, w)[self.row] - lacked.sum()
        for number in numbers:
            self.edges[reader, number] += float(chosen)
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
