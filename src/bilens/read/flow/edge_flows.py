"""Edges of a flow: how much goes from one node to another, through no other part."""

from collections import defaultdict
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from bilens.read.flow.adjoints import LayerAdjoints, Sums, gradients
from bilens.read.flow.nodes import Node

if TYPE_CHECKING:
    from bilens.read.flow.flow import Flow


class Edges:
    """Edges between some nodes, found in one walk from the last layer down."""

    def __init__(self, flow: "Flow", nodes: Sequence[Node]) -> None:
        self.flow, self.nodes = flow, nodes
        self.edges = torch.zeros(len(nodes), len(nodes), dtype=torch.float64)
        # Adjoints of the number that each node has already met: at streams and embeddings.
        self.reading: dict[int, Sums] = {}
        self.changes: dict[int, Tensor] = {}  # of the outputs of nodes
        self.in_layer: dict[int | None, list[int]] = defaultdict(list)
        for number, node in enumerate(nodes):
            self.in_layer[node.layer].append(number)

    def all(self) -> Tensor:
        """Return all edges."""
        flow, adjoints = self.flow, self.flow.adjoints
        for number, node in enumerate(self.nodes):
            if node.kind == "output":
                self.reading[number] = Sums()
                self.reading[number].add(adjoints.last.leaf, flow.only(adjoints.of_last))
        for layer, of_layer in adjoints.layers():
            self._layer(layer, of_layer, self.in_layer[layer])
        self._embeddings()
        return self.edges

    def _layer(self, number: int, layer: LayerAdjoints, numbers: Sequence[int]) -> None:
        graph, adjoints = layer.graph, self.flow.adjoints
        earlier, above = adjoints.earlier(number), adjoints.above(number)
        heads = [i for i in numbers if self.nodes[i].kind == "head"]
        mlps = [i for i in numbers if self.nodes[i].kind == "mlp"]
        choices = [i for i in numbers if self.nodes[i].kind == "choice"]
        chosen = [leaf.value for leaf in graph.leaves if leaf.kind == "choice"] if choices else []
        cuts = [cut for cut, shown in ((graph.heads, heads), (graph.mlp, mlps)) if cut and shown]
        inputs = [*earlier, *(cut.leaf for cut in cuts), *chosen]

        outputs = {i: self.flow.at(self.nodes[i], layer) for i in (*mlps, *heads)}
        for i, (value, _) in outputs.items():
            self.changes[i] = adjoints.change(value)[self.flow.row]

        def read(reader: int, sums: Sums, value: Tensor, w: Tensor) -> None:
            """Pull an adjoint back to what was there before, and note the edges."""
            found = dict(zip(map(id, inputs), gradients(value, inputs, w), strict=True))
            sums.add_all(earlier, [found[id(leaf)] for leaf in earlier])
            for cut, shown, edges in ((graph.heads, heads, self._to_heads), (graph.mlp, mlps, self._to_mlps)):
                of_cut = found.get(id(cut.leaf)) if cut else None
                if of_cut is not None:
                    edges(reader, shown, of_cut)
            of_choices = [(leaf, found[id(leaf)]) for leaf in chosen if found[id(leaf)] is not None]
            for number in choices:
                self.edges[reader, number] += sum(self._product(leaf, w) for leaf, w in of_choices)

        for reader, sums in self.reading.items():
            w = sums.pop(above.leaf)
            if w is None:
                continue
            if layer.passes and not (cuts or chosen):
                sums.add(graph.stream.leaf, w)
            else:
                read(reader, sums, layer.out, w)
        for number in (*mlps, *heads):
            self.reading[number] = Sums()
            read(number, self.reading[number], *outputs[number])

    def _product(self, x: Tensor, w: Tensor) -> float:
        """Return the flow w . dx of an activation for the question of this flow."""
        adjoints, q = self.flow.adjoints, self.flow.row
        size = len(x) // len(adjoints.ids)
        change = adjoints.change(x.unflatten(0, (-1, size)))[q]
        return float((w.unflatten(0, (-1, size))[q] * change).sum())

    def _to_mlps(self, reader: int, numbers: Sequence[int], w: Tensor) -> None:
        for number in numbers:
            row = w[self.flow.row, self.nodes[number].position]
            self.edges[reader, number] += float(row @ self.changes[number])

    def _to_heads(self, reader: int, numbers: Sequence[int], w: Tensor) -> None:
        for number in numbers:
            node, change = self.nodes[number], self.changes[number]
            width, head = len(change), node.number or 0
            row = w[self.flow.row, node.position, head * width : (head + 1) * width]
            self.edges[reader, number] += float(row @ change)

    def _embeddings(self) -> None:
        adjoints, q = self.flow.adjoints, self.flow.row
        stream, leaf = adjoints.graphs[0].stream, adjoints.embedding.leaf
        change = adjoints.change(adjoints.embedding.value)[q]
        for reader, sums in self.reading.items():
            w = sums.pop(stream.leaf)
            if w is not None:
                sums.add(leaf, gradients(stream.value, [leaf], w)[0])
            w = sums.get(leaf)
            for number in self.in_layer[None]:
                node = self.nodes[number]
                if node.kind == "token" and w is not None:
                    self.edges[reader, number] += float(w[q, node.position] @ change[node.position])
