"""The graph of a flow: nodes, the vectors they read and write, and edges that conserve."""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partialmethod
from typing import Any, ClassVar, Literal

import pandas as pd
import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn import functional

from bilens.analysis import Reading
from bilens.checks import check_count, check_index
from bilens.data import Corpus
from bilens.errors import BilensError
from bilens.lazy_imports import go
from bilens.read.flow.nodes import LEAVES, Node, Rows, graph_figure, node_frame, strongest_first
from bilens.read.language.names import shown_tokens
from bilens.residual import Moment, ResidualModel, Trace
from bilens.sections import Fact, Percent

Sublayer = Literal["attention", "mlp"]
DRAWN = 20
"""Nodes of a figure, and those that are measured and named."""


def notebook_picture(reading: Reading, **options: Any) -> dict[str, Any]:
    """Return the picture of a reading as Plotly shows figures in this notebook, and its text."""
    return {"text/plain": repr(reading), **reading.plot()._repr_mimebundle_()}


@dataclass(frozen=True, eq=False, repr=False)
class Flow(Reading):
    """An exact split of a logit, or of its change between two texts.

    Node b writes o_b into the stream and node a reads it in direction r_a; the edge between them
    carries r_a . o_b. At every node inflow equals outflow. The flows out of tokens, positions and
    biases add up to the value.

    Attributes:
        trace: the model on the text, up to the position whose next token is predicted.
        direction: u, in the normalised stream after the last layer.
        value: the logit at that position before a soft cap, or its change between two texts.
        nodes: the logit first; above before below.
        reads: r_a.
        writes: o_b; between two texts, changes.
        constants: the part of each node's flow that its own biases carry.
        mixing: the factor of a row written at a moment (column) when it is read at a later one
            (row); 0 where it is read earlier.
        vectors: unit vectors that the nodes read that are directions, in their order, in the
            normalised stream. The last coordinate is the constant, through which biases come in.
        frozen: everything that is held fixed at its value on this text; empty between two texts.
        before: the second run; None on one text.
        values: the logit in each run.
        tokens: of the text, as names of nodes have them.
    """

    trace: Trace
    direction: Float[Tensor, " d_model"]
    value: float
    nodes: tuple[Node, ...]
    reads: Rows
    writes: Rows
    constants: Float[Tensor, " nodes"]
    mixing: Float[Tensor, "moments moments"]
    vectors: Float[Tensor, "directions d_model_and_1"]
    frozen: tuple[str, ...]
    before: Trace | None = None
    values: tuple[float, ...] = ()
    tokens: tuple[str, ...] = ()

    axes: ClassVar[dict[str, str]] = {"x": "node", "y": "flow"}

    def facts(self) -> list[Fact]:
        return [
            ("value", self.value),
            ("tokens", len(self.ids)),
            ("layers", len(self.trace.layers)),
            ("nodes", len(self.nodes)),
            ("absolute flow", self.absolute),
            ("condition", self.condition),
        ]

    def frame(self) -> pd.DataFrame:
        """Return a row for each part of the model, those that are measured first."""
        return node_frame(strongest_first([x for x in self.nodes if x.is_part]), self.tokens)

    def plot(self) -> "go.Figure":
        """Draw the graph of the strongest nodes over the tokens of the text."""
        return self.top(DRAWN).plot()

    _repr_mimebundle_ = notebook_picture

    @cached_property
    def sinks(self) -> tuple[int, ...]:
        """Attention sinks: positions that heads attend to whatever the text is about.

        Such a position draws much more than its share of the attention of all later ones, as the
        first token does in most transformers. Heads that have nothing to move attend there.
        """
        pattern = torch.stack([layer.pattern.abs().mean(0) for layer in self.trace.layers]).mean(0)
        time = len(pattern)
        even = 1 / torch.arange(1, time + 1, device=pattern.device)
        return tuple(
            s
            for s in range(time - 3)
            if float(pattern[s + 1 :, s].mean()) > max(0.3, 1.5 * float(even[s + 1 :].mean()))
        )

    @property
    def ids(self) -> Int[Tensor, " time"]:
        """Token ids of the text."""
        return self.trace.ids

    @property
    def absolute(self) -> float:
        """Sum of |flow| over all nodes but the logit."""
        return sum(abs(node.flow) for node in self.nodes[1:])

    @property
    def condition(self) -> float:
        """Absolute flow over the value: by how much rounding of flows grows in it; 0 of none."""
        return self.absolute / abs(self.value) if self.value else 0.0

    def node(self, number: int) -> Node:
        """Return one of the nodes.

        Raises:
            BilensError: the node does not exist.
        """
        return self.nodes[self._checked(number)]

    def vector(self, number: int) -> Float[Tensor, " d_model_and_1"]:
        """Return the vector of a node that is a direction, a row of `vectors`.

        Raises:
            BilensError: the node is not a direction.
        """
        node = self.node(number)
        if node.kind != "direction":
            raise BilensError(f"number={number} is a node of kind {node.kind}, not a direction")
        return self.vectors[self.direction_numbers.index(number)]

    @cached_property
    def direction_numbers(self) -> tuple[int, ...]:
        """Numbers of the nodes that are directions, in the order of `vectors`."""
        return tuple(i for i, node in enumerate(self.nodes) if node.kind == "direction")

    def above(self, moment: int) -> Float[Tensor, "time d_model"]:
        """Return the sum of the directions that read each position of a moment's stream."""
        check_index("moment", moment, self.mixing.shape[1])
        reads = self.reads
        shares = self.mixing[reads.moment, moment, None]
        w = torch.zeros_like(self.trace.stream)
        return w.index_add(0, reads.position, shares * reads.vector)

    def edges(self, numbers: Sequence[int] | None = None) -> Float[Tensor, "n n"]:
        """Return the flow between some nodes: row a, column b is the flow from b up to a.

        All nodes by default take n^2 numbers.

        Raises:
            BilensError: the node does not exist.
        """
        picked = range(len(self.nodes)) if numbers is None else numbers
        return self.edges_between([[number] for number in picked])

    def edges_between(self, groups: Sequence[Sequence[int]]) -> Float[Tensor, "n n"]:
        """Return the flow between groups of nodes: row a, column b is the flow from b up to a.

        Raises:
            BilensError: the node does not exist.
        """
        n, device = len(groups), self.constants.device
        group = torch.full((len(self.nodes),), -1, device=device)
        for number, members in enumerate(groups):
            group[[self._checked(i) for i in members]] = number
        reads, writes = self.reads.grouped(group), self.writes.grouped(group)
        edges = self.constants.new_zeros(n * n)
        for position in range(len(self.ids)):
            r, w = (rows.position == position for rows in (reads, writes))
            shares = self.mixing[reads.moment[r, None], writes.moment[None, w]]
            flows = (reads.vector[r] @ writes.vector[w].T) * shares
            cells = reads.node[r, None] * n + writes.node[None, w]
            edges.index_add_(0, cells.flatten(), flows.flatten())
        edges = edges.reshape(n, n)
        self._add_biases(edges, group.tolist())
        return edges

    def _add_biases(self, edges: Tensor, group: Sequence[int]) -> None:
        """Add the edges from nodes of biases to the nodes that have these biases inside."""
        place = {
            (node.layer, node.part): group[number]
            for number, node in enumerate(self.nodes)
            if node.kind == "bias"
        }
        for number, constant in enumerate(self.constants.tolist()):
            node = self.nodes[number]
            column = place.get((node.layer, node.part), -1)
            if constant and column >= 0 and group[number] >= 0 and node.kind not in LEAVES:
                edges[group[number], column] += constant

    def graph(self, numbers: Sequence[int]) -> "FlowGraph":
        """Return the graph of some of the nodes, with the logit.

        Raises:
            BilensError: the node does not exist.
        """
        picked = tuple(sorted({0, *(self._checked(i) for i in numbers)}))
        nodes = tuple(self.nodes[i] for i in picked)
        held = sum(abs(node.flow) for node in nodes[1:])
        return FlowGraph(self, picked, nodes, self.edges(picked), held / (self.absolute or 1.0))

    def top(self, k: int) -> "FlowGraph":
        """Return the graph of the k parts with the largest |flow|, without remainders.

        Raises:
            BilensError: k is not positive.
        """
        check_count("k", k)
        return self.graph(self.strongest()[:k])

    def covering(self, share: float) -> "FlowGraph":
        """Return the graph of the fewest parts that hold this share of the absolute flow.

        Raises:
            BilensError: more of the absolute flow than is left goes through remainders.
        """
        if not 0 < share <= 1:
            raise BilensError(f"share={share}, expected a number above 0 and at most 1")
        order, held, least = self.strongest(), 0.0, share * self.absolute * (1 - 1e-6)
        for count, number in enumerate(order, 1):
            held += abs(self.nodes[number].flow)
            if held >= least:
                return self.graph(order[:count])
        raise BilensError(
            f"share={share}, and all parts together hold {held / (self.absolute or 1):.3f} of the "
            "absolute flow; the rest was not split. Lower the threshold of flow()"
        )

    def strongest(self) -> list[int]:
        """Return the numbers of the parts, the largest |flow| first."""
        parts = [i for i, node in enumerate(self.nodes) if node.is_part]
        return sorted(parts, key=lambda i: -abs(self.nodes[i].flow))

    def _checked(self, number: int) -> int:
        return check_index("number", number, len(self.nodes), "those of the nodes")


@dataclass(frozen=True, eq=False, repr=False)
class FlowGraph(Reading):
    """A graph of some nodes of a flow."""

    flow: Flow  # the flow of all nodes
    numbers: tuple[int, ...]  # numbers of the nodes in the flow
    nodes: tuple[Node, ...]  # the logit first; above before below
    edges: Float[Tensor, "n n"]  # row a, column b is the flow from b up to a
    share_of_flow: float  # their share of the absolute flow

    axes: ClassVar[dict[str, str]] = Flow.axes

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
        of = "change" if flow.before is not None else "logit"
        caption = caption or (
            f"{len(self.nodes) - 1} of {len(flow.nodes) - 1:,} nodes: {self.share_of_logit:.0%} of "
            f"the {of} passes through them alone"
        )
        layers = len(flow.trace.layers)
        return graph_figure(self.nodes, flow.tokens, self.path_weights, layers, caption)

    _repr_mimebundle_ = notebook_picture

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


class FlowBuilder:
    """A flow in the making; nodes come in from the logit downwards."""

    def __init__(self, model: ResidualModel, trace: Trace) -> None:
        self.model, self.trace = model, trace
        self.nodes: list[Node] = []
        self.constants: list[Tensor] = []
        self.vectors: list[Tensor] = []
        self.rows: dict[str, list[tuple[Tensor, ...]]] = {"reads": [], "writes": []}
        self.outs: dict[tuple[int | None, Sublayer | None], tuple[Tensor, float]] = {}

    def add(
        self,
        nodes: list[Node],
        constants: Float[Tensor, " n"],
        vectors: Float[Tensor, "n n_in"] | None = None,
    ) -> Int[Tensor, " n"]:
        """Add nodes with the flow of their own biases, and return their numbers."""
        first = len(self.nodes)
        self.nodes += nodes
        self.constants.append(constants)
        if vectors is not None:
            missing = self.model.d_model + 1 - vectors.shape[1]
            self.vectors.append(functional.pad(vectors, (0, missing)))
        return torch.arange(first, len(self.nodes), device=constants.device)

    def _row(
        self, name: str, nodes: Int[Tensor, " n"], position: Tensor, moment: Moment, vectors: Tensor
    ) -> None:
        """Add the vectors that nodes read, or write, at some positions."""
        self.rows[name].append((nodes, position, torch.full_like(nodes, moment), vectors))

    read = partialmethod(_row, "reads")
    write = partialmethod(_row, "writes")

    def write_bias(self, layer: int, part: Sublayer, w: Tensor, written: Tensor) -> None:
        """Add the output of a bias at every position, and the directions w that read it."""
        if written.any():
            self.outs[layer, part] = written, float((w * written).sum())

    def add_biases(self) -> None:
        """Add the last nodes: biases of each layer's attention, MLP, and the unembedding."""
        flows: dict[tuple[int | None, Sublayer | None], float] = defaultdict(float)
        constants = torch.cat(self.constants)
        for node, constant in zip(self.nodes, constants.tolist(), strict=True):
            if constant:
                flows[node.layer, node.part] += constant
        for place, (_, through) in self.outs.items():
            flows[place] += through
        for (layer, part), through in flows.items():
            number = self.add([Node("bias", through, layer, part)], constants.new_zeros(1))
            if layer is not None and (layer, part) in self.outs:
                written, _ = self.outs[layer, part]
                places = torch.arange(len(written), device=number.device)
                moment = Moment.attention(layer) if part == "attention" else Moment.mlp(layer)
                self.write(number.expand(len(places)), places, moment, written)

    def flow(self, u: Float[Tensor, " d_model"], **about: Any) -> Flow:
        """Return the nodes that were collected; `about` are the other fields of the flow."""
        reads, writes = (_joined(self.rows.pop(name)) for name in ("reads", "writes"))
        vectors = u.new_zeros(0, self.model.d_model + 1)
        return Flow(
            trace=self.trace,
            direction=u,
            nodes=tuple(self.nodes),
            reads=reads,
            writes=writes,
            constants=torch.cat(self.constants),
            mixing=self.model.parts.mixing().to(u),
            vectors=torch.cat([vectors, *self.vectors]),
            tokens=tuple(shown_tokens(self.model, self.trace.ids)),
            **about,
        )


def _joined(parts: list[tuple[Tensor, ...]]) -> Rows:
    """Return rows as one; the list is empty then, as both together would take the memory twice."""
    number, position, moment, vectors = zip(*parts, strict=True)
    joined = vectors[0].new_empty(sum(map(len, vectors)), vectors[0].shape[1])
    places = torch.cat(number), torch.cat(position), torch.cat(moment)
    del vectors
    end = len(joined)
    while parts:
        *_, rows = parts.pop()
        joined[end - len(rows) : end] = rows
        end -= len(rows)
    return Rows(*places, joined)


def first_texts(corpus: Corpus, n_tokens: int = 4096) -> Iterator[Int[Tensor, " time"]]:
    """Yield the token ids of validation texts, up to a number of tokens."""
    for row in corpus.validation:
        if n_tokens <= 0:
            return
        yield row["input_ids"]
        n_tokens -= len(row["input_ids"])
