"""The graph of a flow: nodes, the vectors they read and write, and edges that conserve."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import pandas as pd
import torch
from jaxtyping import Float, Int
from torch import Tensor

from bilens.checks import check_count, check_index
from bilens.errors import BilensError
from bilens.reading import Fact, Reading
from bilens.residual import Trace

NodeKind = Literal["output", "token", "position", "head", "direction", "mlp", "bias", "rest"]


@dataclass(frozen=True)
class Node:
    """A part of a model on a text, or between two texts.

    Attributes:
        kind: output is the logit itself, token an embedding, position a position's vector. A head
            is from one position to one. A direction is one of an MLP's input at a position, mlp all
            of an MLP without a gate there. Then bias, and rest, which is not split further.
        flow: the part of the logit, or of its change, that goes through it.
        layer: its number.
        part: attention or mlp, inside a layer.
        position: its position, at which it writes.
        source: the position that a head attends to.
        number: of the head; of the direction, 1 for the strongest there.
        eigenvalue: of a direction: its Ritz value, an eigenvalue where all directions are split.
        role: of a head between two texts: values, the tokens that it moves, or queries or keys,
            the positions that it attends to.
        estimated: its effect to first order, by gradients; None until `account` finds it.
        measured: its effect in the running model; None where it is not measured.
    """

    kind: NodeKind
    flow: float
    layer: int | None = None
    part: Literal["attention", "mlp"] | None = None
    position: int | None = None
    source: int | None = None
    number: int | None = None
    eigenvalue: float | None = None
    role: Literal["values", "queries", "keys"] | None = None
    estimated: float | None = None
    measured: float | None = None

    @property
    def is_part(self) -> bool:
        """True for a part of the model, false for the logit and for remainders."""
        return self.kind not in ("output", "rest")

    @property
    def is_removable(self) -> bool:
        """True if `ablate` can remove it from a flow of one text."""
        return self.is_part and self.kind != "bias" and self.role is None

    def name(self, tokens: Sequence[str]) -> str:
        """Return its name, given the tokens of the text; repeated tokens get their position."""
        at, source = (
            "" if i is None else f"{tokens[i]} ({i})" if tokens.count(tokens[i]) > 1 else tokens[i]
            for i in (self.position, self.source)
        )
        if self.kind == "head":
            of = "" if self.role is None else f"{self.role} of "
            return f"{of}head {self.layer}.{self.number} from {source} to {at}"
        if self.kind == "bias":
            where = {"attention": f"heads of layer {self.layer}", "mlp": f"MLP {self.layer}"}
            return f"biases of {where.get(self.part or '', 'the unembedding')}"
        if self.kind == "rest" and self.part == "attention":
            return f"other heads of layer {self.layer}"
        texts = {
            "output": f"the logit at {at}",
            "token": f"token {at}",
            "position": f"position {self.position}",
            "direction": f"MLP {self.layer} direction {self.number} at {at}",
            "mlp": f"MLP {self.layer} at {at}",
            "rest": f"rest of MLP {self.layer} at {at}",
        }
        return texts[self.kind]


@dataclass(frozen=True, eq=False)
class Rows:
    """Vectors that nodes read from the stream, or write to it.

    Moments are those of `bilens.residual.Moment`.

    Attributes:
        node: the node of each row.
        position: its position.
        moment: its moment.
        vector: the vector.
    """

    node: Int[Tensor, " rows"]
    position: Int[Tensor, " rows"]
    moment: Int[Tensor, " rows"]
    vector: Float[Tensor, "rows d_model"]

    def of(self, nodes: Int[Tensor, " n"], n_nodes: int) -> "Rows":
        """Return the rows of some nodes, which are numbered anew from 0 in this order."""
        place = torch.full((n_nodes,), -1, device=self.node.device)
        place[nodes] = torch.arange(len(nodes), device=place.device)
        among = place[self.node] >= 0
        return Rows(
            place[self.node[among]], self.position[among], self.moment[among], self.vector[among]
        )


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
        vectors: of the nodes that are directions, in their order, in the normalised stream that
            the MLP reads. The last coordinate is the constant, through which biases come in.
        frozen: everything that is held fixed at its value on this text; empty between two texts.
        before: the second run; None on one text.
        values: the logit in each run.
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

    axes: ClassVar[dict[str, str]] = {"x": "node", "y": "flow"}

    def facts(self) -> list[Fact]:
        """Return the value, sizes and the absolute flow."""
        return [
            ("value", self.value),
            ("tokens", len(self.ids)),
            ("layers", len(self.trace.layers)),
            ("nodes", len(self.nodes)),
            ("absolute flow", self.absolute),
        ]

    def frame(self, tokens: Sequence[str] = ()) -> pd.DataFrame:
        """Return a row for each part of the model, the largest |flow| first.

        Args:
            tokens: of the text, for names; numbers of their positions by default.
        """
        shown = tokens or [str(number) for number in range(len(self.ids))]
        nodes = [self.nodes[i] for i in self._strongest()]
        rows = [
            (node.name(shown), node.kind, node.layer, node.flow, node.eigenvalue) for node in nodes
        ]
        return pd.DataFrame(rows, columns=["node", "kind", "layer", "flow", "eigenvalue"])

    @property
    def ids(self) -> Int[Tensor, " time"]:
        """Token ids of the text."""
        return self.trace.ids

    @property
    def absolute(self) -> float:
        """Sum of |flow| over all nodes but the logit."""
        return sum(abs(node.flow) for node in self.nodes[1:])

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
        before = sum(other.kind == "direction" for other in self.nodes[:number])
        return self.vectors[before]

    def above(self, moment: int) -> Float[Tensor, "time d_model"]:
        """Return the sum of the directions that read each position of a moment's stream."""
        check_index("moment", moment, self.mixing.shape[1])
        reads = self.reads
        shares = self.mixing[reads.moment, moment, None]
        w = torch.zeros_like(self.trace.stream)
        return w.index_add(0, reads.position, shares * reads.vector)

    def edges(self, numbers: Sequence[int] | None = None) -> Float[Tensor, "n n"]:
        """Return the flow between some nodes: row a, column b is the flow from b up to a.

        Args:
            numbers: of the nodes; all by default, which takes n^2 numbers.

        Raises:
            BilensError: the node does not exist.
        """
        picked = range(len(self.nodes)) if numbers is None else numbers
        numbers = [self._checked(i) for i in picked]
        index = torch.tensor(numbers, dtype=torch.long, device=self.constants.device)
        n = len(index)
        reads, writes = (rows.of(index, len(self.nodes)) for rows in (self.reads, self.writes))
        edges = self.constants.new_zeros(n * n)
        for position in range(len(self.ids)):
            r, w = (rows.position == position for rows in (reads, writes))
            shares = self.mixing[reads.moment[r, None], writes.moment[None, w]]
            flows = (reads.vector[r] @ writes.vector[w].T) * shares
            cells = reads.node[r, None] * n + writes.node[None, w]
            edges.index_add_(0, cells.flatten(), flows.flatten())
        edges = edges.reshape(n, n)
        self._add_biases(edges, [self.nodes[i] for i in picked], self.constants[index])
        return edges

    def _add_biases(self, edges: Tensor, nodes: Sequence[Node], constants: Tensor) -> None:
        place = {
            (node.layer, node.part): column
            for column, node in enumerate(nodes)
            if node.kind == "bias"
        }
        for row, node in enumerate(nodes):
            column = place.get((node.layer, node.part))
            if column is not None and node.kind not in ("bias", "token", "position"):
                edges[row, column] += constants[row]

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
        return self.graph(self._strongest()[:k])

    def covering(self, share: float) -> "FlowGraph":
        """Return the graph of the fewest parts that hold this share of the absolute flow.

        Raises:
            BilensError: the share is not above 0 and at most 1, or more of the absolute flow than
                is left goes through remainders.
        """
        if not 0 < share <= 1:
            raise BilensError(f"share={share}, expected a number above 0 and at most 1")
        order, held, least = self._strongest(), 0.0, share * self.absolute * (1 - 1e-6)
        for count, number in enumerate(order, 1):
            held += abs(self.nodes[number].flow)
            if held >= least:
                return self.graph(order[:count])
        raise BilensError(
            f"share={share}, and all parts together hold {held / (self.absolute or 1):.3f} of the "
            "absolute flow; the rest was not split. Lower the threshold of flow()"
        )

    def _strongest(self) -> list[int]:
        parts = [i for i, node in enumerate(self.nodes) if node.is_part]
        return sorted(parts, key=lambda i: -abs(self.nodes[i].flow))

    def _checked(self, number: int) -> int:
        return check_index("number", number, len(self.nodes), "those of the nodes")


@dataclass(frozen=True, eq=False)
class FlowGraph:
    """A graph of some nodes of a flow.

    Attributes:
        flow: the flow of all nodes.
        numbers: numbers of the nodes in the flow.
        nodes: the logit first; above before below.
        edges: row a, column b is the flow from b up to a.
        share_of_flow: their share of the absolute flow.
    """

    flow: Flow
    numbers: tuple[int, ...]
    nodes: tuple[Node, ...]
    edges: Float[Tensor, "n n"]
    share_of_flow: float

    @property
    def share_of_logit(self) -> float:
        """Share of the logit that starts and stays in these nodes all the way up.

        The sum over all paths from tokens, positions and biases to the logit whose nodes are all
        here, over the logit. What a node sends up is shared out in proportion to what flows in. As
        flows have signs, it may be above 1 or below 0.
        """
        flows = self.edges.new_tensor([node.flow for node in self.nodes])
        # reached[b]: which part of the direction that b reads comes from nodes that are here.
        reached = torch.zeros_like(flows)
        reached[0] = 1
        total = 0.0
        for b in range(1, len(self.nodes)):
            arriving = float(reached[:b] @ self.edges[:b, b])
            if self.nodes[b].kind in ("token", "position", "bias"):
                total += arriving
            elif flows[b] != 0:
                reached[b] = arriving / flows[b]
        return total / self.flow.value if self.flow.value else 0.0
