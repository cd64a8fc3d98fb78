"""The graph of a flow: nodes, the vectors they read and write, and edges that conserve."""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partialmethod
from heapq import nlargest
from itertools import islice
from typing import ClassVar, Literal

import pandas as pd
import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn import functional

from bilens.analysis import Reading
from bilens.checks import check_count, check_index, checked
from bilens.data import Corpus
from bilens.errors import BilensError
from bilens.lazy_imports import go
from bilens.read.flow.nodes import LEAVES, Node, Rows, graph_figure, node_frame
from bilens.read.language.names import shown_tokens
from bilens.residual import Moment, ResidualModel, Trace
from bilens.residual.trace import mlp_inputs
from bilens.sections import Fact, Percent

Sublayer = Literal["attention", "mlp"]
DRAWN = 60
"""Nodes of a figure."""
SINK, FOLLOWING = 0.3, 3
"""An attention sink draws this share of the attention of at least that many later positions."""


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
        """Return a row for each part of the model, the largest |flow| first."""
        return node_frame([self.nodes[i] for i in self._strongest()], self.tokens)

    def plot(self) -> "go.Figure":
        """Draw the graph of the strongest nodes over the tokens of the text."""
        return self.top(DRAWN).plot()

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
            for s in range(time - FOLLOWING)
            if float(pattern[s + 1 :, s].mean()) > max(SINK, 1.5 * float(even[s + 1 :].mean()))
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
        return self.vectors[self.direction_numbers.index(number % len(self.nodes))]

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

        Args:
            numbers: of the nodes; all by default, which takes n^2 numbers.

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


@dataclass(frozen=True, eq=False, repr=False)
class FlowGraph(Reading):
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

    axes: ClassVar[dict[str, str]] = Flow.axes

    def facts(self) -> list[Fact]:
        return [
            ("value", self.flow.value),
            ("nodes", len(self.nodes) - 1),
            ("share of the absolute flow", Percent(self.share_of_flow)),
            ("share of the logit on paths among them", Percent(self.share_of_logit)),
        ]

    def frame(self) -> pd.DataFrame:
        """Return a row for each node, the largest |flow| first."""
        nodes = sorted(self.nodes[1:], key=lambda node: -abs(node.flow))
        return node_frame(nodes, self.flow.tokens)

    def plot(self) -> "go.Figure":
        """Draw the graph over the tokens of the text."""
        return graph_figure(
            self.nodes, self.flow.tokens, self.path_weights, len(self.flow.trace.layers)
        )

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

    def paths(self, k: int) -> list[tuple[float, tuple[int, ...]]]:
        """Return the k strongest paths: their weights, and their nodes from the logit down.

        The weights of all paths among all nodes of a flow add up to the logit. A path's weight is
        its edge into the logit times one share for each node on the way. The share is that of the
        node's inflow that comes from the next one.

        Raises:
            BilensError: k is not positive.
        """
        check_count("k", k)
        edges, ends = self.edges.tolist(), []
        best: list[list[tuple[float, tuple[int, ...]]]] = [[(1.0, (0,))]]
        for b in range(1, len(self.nodes)):
            ways: list[tuple[float, tuple[int, ...]]] = []
            for a in range(b):
                if edges[a][b] and (a == 0 or self.nodes[a].flow):
                    share = edges[a][b] / (self.nodes[a].flow if a else 1.0)
                    ways += [(weight * share, (*path, b)) for weight, path in best[a]]
            # A weight is a product along the path, so that a part of one of the k best paths is
            # among the k best to its end.
            ways = nlargest(k, ways, key=lambda way: abs(way[0]))
            is_leaf = self.nodes[b].kind in LEAVES
            ends += ways if is_leaf else []
            best.append([] if is_leaf else ways)
        return nlargest(k, ends, key=lambda way: abs(way[0]))


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

    def bias_flows(self) -> list[float]:
        """Return the flows of the nodes that are biases."""
        return [node.flow for node in self.nodes if node.kind == "bias"]

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

    def flow(
        self,
        u: Float[Tensor, " d_model"],
        value: float,
        frozen: tuple[str, ...],
        before: Trace | None,
        values: tuple[float, ...],
    ) -> Flow:
        """Return the nodes that were collected."""
        reads, writes = (
            Rows(*(torch.cat(part) for part in zip(*self.rows[name], strict=True)))
            for name in ("reads", "writes")
        )
        vectors = u.new_zeros(0, self.model.d_model + 1)
        return Flow(
            trace=self.trace,
            direction=u,
            value=value,
            nodes=tuple(self.nodes),
            reads=reads,
            writes=writes,
            constants=torch.cat(self.constants),
            mixing=self.model.parts.mixing().to(u),
            vectors=torch.cat([vectors, *self.vectors]),
            frozen=frozen,
            before=before,
            values=values,
            tokens=tuple(shown_tokens(self.model, self.trace.ids)),
        )


TOP, ENDS, ENDING = 4, 3, 4
"""Tokens of a label; texts of a label, and tokens that each of them shows."""
LIKELY, BLOCK = 100, 2**11
"""Most probable next tokens, from which the tokens that a node raises or lowers are taken; columns
of W_U that are compared at a time."""
SEARCHED = 4096
"""Tokens of texts that are searched for contexts of directions."""


@torch.no_grad()
@checked
def described(
    model: ResidualModel, flow: Flow, k: int, texts: Iterable[str | Int[Tensor, " time"]] = ()
) -> Flow:
    """Return a flow whose k strongest nodes have the tokens that they read and write.

    A direction v reads the tokens whose columns of W_U have the largest cosine with it, in the sign
    that it has on this text. Of the most probable next tokens at a node's position, a direction or
    a head raises and lowers those with the largest and the smallest o . W_U, o its output. This is
    the logit lens, which counts no later layer. Given texts, a direction is also described by the
    ends of those after which v . n is largest, n the normalised input of its MLP.

    Args:
        model: the model of the flow.
        flow: the flow.
        k: number of nodes.
        texts: texts that are searched, or their token ids; the model runs on each.
    """
    strongest = sorted(range(len(flow.nodes)), key=lambda i: -abs(flow.nodes[i].flow))[:k]
    directions = [i for i in strongest if flow.nodes[i].kind == "direction"]
    writers = [i for i in strongest if flow.nodes[i].kind in ("direction", "head")]
    place = {number: row for row, number in enumerate(flow.direction_numbers)}
    vectors = flow.vectors[[place[i] for i in directions], :-1]
    reads = shown_rows(model, nearest_tokens(model, vectors))
    layers = [flow.nodes[i].layer or 0 for i in directions]
    ends = dict(zip(directions, strongest_ends(model, layers, vectors, texts), strict=True))
    positions = [flow.nodes[i].position or 0 for i in writers]
    changed = lens(model, node_outputs(flow, writers), flow.trace.logits[positions])
    writes, lowers = (shown_rows(model, ids) for ids in changed)
    read = dict(zip(directions, reads, strict=True))
    written = dict(zip(writers, zip(writes, lowers, strict=True), strict=True))
    nodes = []
    for i, node in enumerate(flow.nodes):
        raises, lowered = written.get(i, (node.writes, node.lowers))
        reads_now = read.get(i, node.reads)
        after = ends.get(i) or node.after
        nodes.append(replace(node, after=after, reads=reads_now, writes=raises, lowers=lowered))
    return replace(flow, nodes=tuple(nodes))


def strongest_ends(
    model: ResidualModel,
    layers: Sequence[int],
    vectors: Float[Tensor, "n d_model"],
    texts: Iterable[str | Int[Tensor, " time"]],
) -> list[tuple[str, ...]]:
    """Return the ends of the texts after which directions of MLPs' inputs are most active.

    Args:
        model: the model.
        layers: the layer of each direction.
        vectors: the directions, in the normalised stream.
        texts: texts, or their token ids. A text counts once for each direction, at its strongest
            position.
    """
    best: list[list[tuple[float, str]]] = [[] for _ in layers]
    for ids in map(model.ids, texts) if layers else ():
        batch = ids[None]
        inputs = [n[0] for n in mlp_inputs(model.model, [x.mlp for x in model.parts.layers], batch)]
        for number, (layer, vector) in enumerate(zip(layers, vectors, strict=True)):
            active, position = (inputs[layer] @ vector).max(0)
            first = max(0, int(position) + 1 - ENDING)
            end = "".join(shown_tokens(model, ids[first : int(position) + 1]))
            best[number].append((float(active), end))
    ranked = [dict.fromkeys(end for _, end in sorted(ends, reverse=True)) for ends in best]
    return [tuple(islice(ends, ENDS)) for ends in ranked]


def first_texts(corpus: Corpus, n_tokens: int = SEARCHED) -> Iterator[Int[Tensor, " time"]]:
    """Yield the token ids of validation texts, up to a number of tokens."""
    for row in corpus.validation:
        if n_tokens <= 0:
            return
        yield row["input_ids"]
        n_tokens -= len(row["input_ids"])


def node_outputs(flow: Flow, numbers: list[int]) -> Float[Tensor, "n d_model"]:
    """Return the outputs of some nodes, added up over positions."""
    place = torch.full((len(flow.nodes),), -1, device=flow.constants.device)
    place[numbers] = torch.arange(len(numbers), device=place.device)
    row = place[flow.writes.node]
    outputs = flow.writes.vector.new_zeros(len(numbers), len(flow.direction))
    return outputs.index_add(0, row[row >= 0], flow.writes.vector[row >= 0])


def lens(
    model: ResidualModel, rows: Float[Tensor, "n d_model"], logits: Float[Tensor, "n vocab"]
) -> tuple[Int[Tensor, "n k"], Int[Tensor, "n k"]]:
    """Return the likely next tokens whose logits each row raises most, and lowers most.

    Args:
        model: the model.
        rows: changes of the stream.
        logits: of the model, at the position of each row.
    """
    likely = logits.topk(min(LIKELY, model.vocab_size)).indices
    columns = _logit_vectors(model, model.parts.unembed.weight()[likely])
    changes = torch.einsum("ntd,nd->nt", columns, rows)
    return likely.gather(1, _top(changes)), likely.gather(1, _top(-changes))


def nearest_tokens(model: ResidualModel, rows: Float[Tensor, "n d_model"]) -> Int[Tensor, "n k"]:
    """Return the tokens whose columns of W_U have the largest cosine with each row.

    The mean of all columns, on which no probability depends, is subtracted first.
    """
    weight = model.parts.unembed.weight()
    if not len(rows):
        return _top(rows @ weight.T)
    mean, cosines = weight.mean(0), []
    # The differences from the mean of all columns at once would be a copy of W_U.
    for block in weight.split(BLOCK):
        columns = functional.normalize(_logit_vectors(model, block - mean), dim=1)
        cosines.append(rows @ columns.T)
    return _top(torch.cat(cosines, 1))


def shown_rows(model: ResidualModel, ids: Int[Tensor, "n k"]) -> list[tuple[str, ...]]:
    """Return rows of tokens as text."""
    return [tuple(shown_tokens(model, row)) for row in ids]


def _logit_vectors(
    model: ResidualModel, columns: Float[Tensor, "*batch d_model"]
) -> Float[Tensor, "*batch d_model"]:
    """Return columns of W_U as vectors of the stream before the final norm's gain."""
    norm = model.parts.norm
    return columns if norm is None else norm.centred(columns * norm.gain())


def _top(scores: Float[Tensor, "n tokens"]) -> Int[Tensor, "n k"]:
    return scores.topk(min(TOP, scores.shape[1])).indices
