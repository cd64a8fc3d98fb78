"""A flow: an exact split of the change of a logit between two texts, over a model's parts."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import ClassVar

import torch
from jaxtyping import Float, Int
from torch import Tensor

from bilens.analysis import Reading
from bilens.checks import check_count, check_index, checked
from bilens.errors import BilensError
from bilens.flows.adjoints import Adjoints, LayerGraph
from bilens.flows.edge_flows import Edges
from bilens.flows.fitted import Fitted
from bilens.flows.nodes import LEAVES, Node, NodeKind, Sublayer, node_columns, strongest_first
from bilens.flows.origin import Origin
from bilens.flows.question import Question
from bilens.flows.rules import Rules
from bilens.sections import Columns, Fact, Percent
from bilens.transformer import ResidualModel
from bilens.transformer.experts import expert_count

DRAWN = 20
"""Nodes of a figure, and those that are measured and named."""
SUBLAYERS: dict[NodeKind, Sublayer] = {"head": "attention", "mlp": "mlp"}
LEAST = 1e-4
"""Nodes of a flow have at least this share of its absolute flow."""


@dataclass(frozen=True, eq=False)
class Pairs:
    """The strongest flows of heads from one position to another, in one layer.

    Attributes:
        flows: the flow of each pair.
        places: head, position and source of each.
        attention: mean size of the pattern of all heads.
    """

    flows: Float[Tensor, " pairs"]
    places: Int[Tensor, "pairs 3"]
    attention: Float[Tensor, "time time"]


@dataclass(frozen=True, eq=False, repr=False)
class Flow(Reading):
    """An exact split of the change of a logit between two texts.

    The flow of a part is w . d, where d is the change of its output and w the adjoint of the number
    there. The flows of embeddings and choices add up to the change of the number.

    Attributes:
        question: what is asked.
        fitted: the same in the model's numbers.
        ids: the text, up to the position whose next token is predicted.
        tokens: its tokens, as names of nodes have them.
        second: the tokens of the second text there; empty of another second run.
        values: the number in each run.
        heads: flow of each head at each position, through all sources.
        mlps: flow of each MLP at each position.
        embeddings: flow of each token.
        choices: flow of what each layer chose, such as experts.
        pairs: of each layer, the flows of heads by source; None where heads have no pattern.
        absolute: sum of |flow| over all parts, heads by source.
        rounded: the size of what the values are rounded with, see `rounded_size`.
        streams: the stream after the last layer, in each run.
        changes_stream: whether the model changes the stream between its layers.
        origin: the pass that it was read from.
        row: the row of its text in this pass.
        named: nodes with labels or measured effects.
    """

    question: Question
    fitted: Fitted
    ids: Int[Tensor, " time"]
    tokens: tuple[str, ...]
    second: tuple[str, ...]
    values: tuple[float, float]
    heads: Float[Tensor, "layers heads time"]
    mlps: Float[Tensor, "layers time"]
    embeddings: Float[Tensor, " time"]
    choices: Float[Tensor, " layers"]
    pairs: tuple[Pairs | None, ...]
    absolute: float
    rounded: float
    streams: Float[Tensor, "runs time d_model"]
    changes_stream: bool
    origin: Origin
    row: int
    named: tuple[Node, ...] = ()

    axes: ClassVar[dict[str, str]] = {"x": "node", "y": "flow"}
    is_picture: ClassVar[bool] = True

    @property
    def value(self) -> float:
        """The change of the number between the texts."""
        return self.values[0] - self.values[1]

    @property
    def n_layers(self) -> int:
        """Number of layers."""
        return len(self.mlps)

    @property
    def adjoints(self) -> Adjoints:
        """The pass that it was read from, with its graph; it runs again unless it was just used.

        Raises:
            BilensError: the flow was read from a file, or the model has changed.
        """
        adjoints = self.origin.adjoints()
        numbers = adjoints.numbers[self.row :: adjoints.questions].tolist()
        rounding = 1e-4 * (self.absolute + self.rounded)
        if any(abs(a - b) > rounding for a, b in zip(numbers, self.values, strict=True)):
            self.origin.release()
            raise BilensError(
                f"the model computes {numbers[0]:.6g} now, and {self.values[0]:.6g} when the flow "
                "was read; its weights have changed: read the flow again"
            )
        return adjoints

    @property
    def condition(self) -> float:
        """Absolute flow over the value: by how much rounding of flows grows in it; 0 of none."""
        return self.absolute / abs(self.value) if self.value else 0.0

    # Nodes.

    @property
    def _arrays(self) -> list[tuple[NodeKind, Tensor, Tensor]]:
        """Kind, flows and places of all parts; a place is layer, number, position and source."""
        arrays: list[tuple[NodeKind, Tensor, Tensor]] = []

        def add(kind: NodeKind, flows: Tensor, *axes: int | None) -> None:
            """Add an array whose axes are some of the four numbers of a place, by their order."""
            index = flows.nonzero()
            places = torch.full((len(index), 4), -1, device="cpu")
            for axis, column in enumerate(axes):
                places[:, column] = index[:, axis].cpu()
            arrays.append((kind, flows[tuple(index.T)].cpu(), places))

        add("token", self.embeddings, 2)
        add("mlp", self.mlps, 0, 2)
        add("choice", self.choices, 0)
        for layer, pairs in enumerate(self.pairs):
            if pairs is None:
                of_layer = torch.zeros_like(self.heads)
                of_layer[layer] = self.heads[layer]
                add("head", of_layer, 0, 1, 2)
            else:
                places = pairs.places.long()
                places = torch.cat([torch.full_like(places[:, :1], layer), places], 1)
                arrays.append(("head", pairs.flows.cpu(), places.cpu()))
        return arrays

    @cached_property
    def nodes(self) -> tuple[Node, ...]:
        """All parts with at least `LEAST` of the absolute flow, the largest |flow| first."""
        return self.nodes_above(LEAST)

    def nodes_above(self, share: float) -> tuple[Node, ...]:
        """Return tokens, and all parts with at least a share of the absolute flow."""
        nodes = []
        for kind, flows, places in self._arrays:
            strong = (flows.abs() >= share * self.absolute) & (flows != 0)
            if kind in LEAVES:
                strong = flows != 0
            rows = zip(flows[strong].tolist(), places[strong].tolist(), strict=True)
            for through, place in rows:
                layer, index, position, source = (None if x < 0 else x for x in place)
                part = SUBLAYERS.get(kind)
                nodes.append(Node(kind, through, layer, part, position, source, index))
        nodes_at = {node.place: node for node in self.named}
        nodes = [nodes_at.get(node.place, node) for node in nodes]
        return tuple(sorted(nodes, key=lambda node: -abs(node.flow)))

    def strongest(self, k: int) -> tuple[Node, ...]:
        """Return the k parts with the largest |flow|.

        Raises:
            BilensError: k is not positive.
        """
        check_count("k", k)
        return self.nodes[:k]

    @cached_property
    def output(self) -> Node:
        """The logit, or its change, as a node."""
        return Node("output", self.value, position=len(self.ids) - 1)

    @cached_property
    def sinks(self) -> tuple[int, ...]:
        """Attention sinks: positions that heads attend to whatever the text is about.

        Such a position draws much more than its share of the attention of all later ones, as the
        first token does in most transformers. Heads that have nothing to move attend there.
        """
        patterns = [pairs.attention for pairs in self.pairs if pairs is not None]
        if not patterns:
            return ()
        pattern = torch.stack(patterns).mean(0)
        time = len(pattern)
        even = 1 / torch.arange(1, time + 1, device=pattern.device)
        sinks = []
        for source in range(time - 3):
            share = float(pattern[source + 1 :, source].mean())
            if share > max(0.3, 1.5 * float(even[source + 1 :].mean())):
                sinks.append(source)
        return tuple(sinks)

    def check_model(self, model: ResidualModel) -> None:
        """Raise unless the flow was read from this model."""
        if self.origin.model not in (None, model.model):
            raise BilensError(
                "model is not that of the flow, expected the same one; or read a flow of this one"
            )

    def check_nodes(self, nodes: Sequence[Node]) -> None:
        """Raise unless all nodes are at places of this flow."""
        n_layers, n_heads, time = self.heads.shape
        for node in nodes:
            head = node.number if node.kind == "head" else None
            places = [(node.layer, n_layers), (head, n_heads)]
            places += [(node.position, time), (node.source, time)]
            if any(x is not None and not 0 <= x < size for x, size in places):
                raise BilensError(
                    f"nodes holds {node.address}, expected nodes of this flow, of {n_layers} "
                    f"layers of {n_heads} heads and {time} tokens"
                )

    # What a node writes and reads.

    @checked
    def written(self, nodes: Sequence[Node]) -> list[Float[Tensor, " width"]]:
        """Return the output of each of some nodes, or its change, at its place in the model.

        It is a head's part of the mixed values, the output of an MLP, or an embedding.
        """
        self.check_nodes(nodes)
        of_layer: dict[int | None, list[int]] = defaultdict(list)
        for i, node in enumerate(nodes):
            of_layer[node.layer].append(i)
        adjoints = self.adjoints
        embedding = adjoints.change(adjoints.embedding.value)[self.row]
        outputs = {i: embedding[nodes[i].position] for i in of_layer[None]}
        for layer, graph in adjoints.layers():
            for i in of_layer[layer]:
                value, _ = self.at(nodes[i], graph, adjoints)
                outputs[i] = adjoints.change(value)[self.row]
        return [outputs[i] for i in range(len(nodes))]

    def adjoint(self, node: Node) -> Float[Tensor, " width"]:
        """Return the adjoint of the number at the output of a node in a layer."""
        self.check_nodes([node])
        adjoints = self.adjoints
        for i, layer in adjoints.layers():
            if i == node.layer:
                return self.at(node, layer, adjoints)[1][self.row]
        raise BilensError(f"{node.address} is in no layer")

    @torch.no_grad()
    def experts(self, layer: int, position: int) -> tuple[Node, ...]:
        """Return the experts of a layer at a position as nodes, the largest |flow| first.

        They are parts of the MLP there, and their flows add up to its flow but for that of shared
        experts.

        Raises:
            BilensError: the layer has no experts.
        """
        adjoints = self.adjoints
        graph = dict(adjoints.layers())[check_index("layer", layer, self.n_layers)]
        position = check_index("position", position, len(self.ids))
        if graph.experts is None or graph.of_mlp is None:
            raise BilensError(f"layer={layer} has no experts, expected one with several")
        call, w = graph.experts[0], graph.of_experts(graph.of_mlp)
        nodes = []
        for expert in range(expert_count(call.module)):
            change = adjoints.change(call.term(expert).reshape(w.shape))
            through = float(w[self.row, position] @ change[self.row, position])
            if through:
                nodes.append(Node("expert", through, layer, "mlp", position, None, expert))
        return tuple(sorted(nodes, key=lambda node: -abs(node.flow)))

    def at(self, node: Node, layer: LayerGraph, adjoints: Adjoints) -> tuple[Tensor, Tensor]:
        """Return the output of a node for all texts, and the adjoint there of this question."""
        if node.kind not in (*SUBLAYERS, "expert"):
            raise BilensError(f"{node.address} has no output of its own; expected a head or an MLP")
        position, i = node.position, node.number or 0
        is_mlp = node.part == "mlp"
        cut, w = (layer.mlp, layer.of_mlp) if is_mlp else (layer.heads, layer.of_heads)
        assert cut is not None
        assert w is not None
        assert position is not None
        columns = slice(None)
        if node.kind == "head":
            width = w.shape[-1] // self.heads.shape[1]
            columns = slice(i * width, (i + 1) * width)
        if node.kind == "expert":
            assert layer.experts is not None
            w = layer.of_experts(adjoints.of_question(self.row, w))
            with torch.enable_grad(), Rules(len(adjoints.ids)):
                term = layer.experts[0].term(i).reshape(w.shape)
                return term[:, position], w[:, position]
        w = adjoints.of_question(self.row, w[:, position, columns])
        with torch.enable_grad():
            if is_mlp or node.source is None:
                return cut.value[:, position, columns], w
            assert layer.mix is not None
            with Rules(len(adjoints.ids)):
                return layer.mix.term(i, position, node.source), w

    @checked
    def edges(self, nodes: Sequence[Node]) -> Float[Tensor, "n n"]:
        """Return the flow between some nodes: row a, column b is the flow from b up to a.

        It passes through no other part. At every node the inflow from all parts below is its flow.
        """
        self.check_nodes(nodes)
        return Edges(self.adjoints, self.row, nodes, self.at).all()

    # What is shown.

    def top(self, k: int) -> "FlowGraph":
        """Return the graph of the k parts with the largest |flow|.

        Raises:
            BilensError: k is not positive.
        """
        return self.graph(self.strongest(k))

    def graph(self, nodes: Sequence[Node]) -> "FlowGraph":
        """Return the graph of some nodes, each once, and the logit."""
        different = {node.place: node for node in nodes}.values()
        order = (self.output, *sorted(different, key=height, reverse=True))
        edges = self.edges(order)
        starts = self._starts(order, edges)
        nodes_of = (replace(node, sources=x) for node, x in zip(order, starts, strict=True))
        return FlowGraph(self, tuple(nodes_of), edges)

    def _starts(
        self, nodes: Sequence[Node], edges: Float[Tensor, "n n"], k: int = 2
    ) -> list[tuple[str, ...]]:
        """Return the tokens at which the flow of nodes in parts starts, at most k of each.

        A node's flow has the shares of its inflow, edge by edge, down to the tokens, on paths
        through these nodes. Named are tokens with at least half of the largest share.
        """
        shares = edges.new_zeros(len(nodes), len(self.ids))
        for row in reversed(range(len(nodes))):
            if nodes[row].kind == "token":
                shares[row, nodes[row].position] = 1
            elif nodes[row].flow:
                shares[row] = edges[row] @ shares / nodes[row].flow
        starts = []
        for node, of_node in zip(nodes, shares, strict=True):
            largest = of_node.abs().topk(min(k, len(self.ids)))
            strong = (largest.values > 0) & (largest.values >= largest.values[0] / 2)
            names = [self.tokens[p].strip() for p in largest.indices[strong].tolist()]
            starts.append(tuple(names) if node.part is not None else ())
        return starts

    def facts(self) -> list[Fact]:
        return [
            ("value", self.value),
            ("tokens", len(self.ids)),
            ("layers", self.n_layers),
            ("nodes", len(self.nodes)),
            ("absolute flow", self.absolute),
            ("condition", self.condition),
        ]

    def name(self, node: Node) -> str:
        """Return the name of one of its nodes: the address with the tokens there."""
        return node.name(self.tokens, self.second)

    def columns(self) -> Columns:
        """Return a row for each part of the model, those that are measured first."""
        return node_columns(strongest_first(self.nodes), self.tokens, self.second)


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
    is_picture: ClassVar[bool] = True

    def some(self, nodes: Sequence[Node]) -> "FlowGraph":
        """Return the graph of some of its nodes, and the logit."""
        places = {node.place for node in nodes}
        index = [i for i, node in enumerate(self.nodes) if i == 0 or node.place in places]
        return FlowGraph(
            self.flow, tuple(self.nodes[i] for i in index), self.edges[index][:, index]
        )

    @property
    def named(self) -> tuple[Node, ...]:
        """The nodes that are named in the flow, those of the graph with where their flow starts."""
        own = {node.place: node for node in self.nodes}
        return tuple(own.get(node.place, node) for node in self.flow.named)

    def facts(self) -> list[Fact]:
        return [
            ("value", self.flow.value),
            ("nodes", len(self.nodes) - 1),
            ("share of the absolute flow", Percent(self.share_of_flow)),
            ("share of the logit on paths among them", Percent(self.share_of_logit)),
        ]

    def columns(self) -> Columns:
        """Return a row for each node, those that are measured first."""
        return node_columns(strongest_first(self.nodes[1:]), self.flow.tokens, self.flow.second)

    @property
    def share_of_flow(self) -> float:
        """Share of the absolute flow that the nodes have."""
        return sum(abs(node.flow) for node in self.nodes[1:]) / (self.flow.absolute or 1.0)

    @cached_property
    def path_weights(self) -> Float[Tensor, "n n"]:
        """Weight of each edge, by its paths up to the logit; see `path_weights`."""
        return path_weights(self.nodes, self.edges)

    @property
    def share_of_logit(self) -> float:
        """Share of the logit on paths whose nodes are all among these.

        The sum over all paths from tokens and choices to the logit whose nodes are all
        here, over the logit. What a node sends up is shared out in proportion to what flows in. As
        flows have signs, it may be above 1 or below 0.
        """
        leaves = [i for i, node in enumerate(self.nodes) if node.kind in LEAVES]
        total = float(self.path_weights[:, leaves].sum())
        return total / self.flow.value if self.flow.value else 0.0


def path_weights(nodes: Sequence[Node], edges: Float[Tensor, "n n"]) -> Float[Tensor, "n n"]:
    """Return the weight of each edge: the sum over all paths through it up to the logit, (n, n).

    A node sends up what flows into it, and each part of that inflow has the same share of every
    edge upwards. So an edge into node a counts by the share of a's flow that reaches the logit on
    paths among these nodes. The logit is the first node, and above comes before below.
    """
    flows = edges.new_tensor([node.flow for node in nodes])
    # arriving[b] / flow[b]: the share of b's flow that reaches the logit among these nodes.
    arrivals, weights = torch.zeros_like(flows), torch.zeros_like(edges)
    arrivals[0] = 1
    for b in range(1, len(nodes)):
        weights[:b, b] = arrivals[:b] * edges[:b, b]
        if nodes[b].kind not in LEAVES and flows[b] != 0:
            arrivals[b] = weights[:b, b].sum() / flows[b]
    return weights


def height(node: Node) -> tuple[int, int]:
    """Return where a node is between the tokens and the logit."""
    place_in_layer = {"mlp": 2, "head": 1}.get(node.kind, 0)
    return (-1 if node.layer is None else node.layer, place_in_layer)
