"""Flows: an exact split of a logit, or of its change between two texts, over a model's parts."""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor

from bilens.checks import ROUNDING, check_count, check_sum
from bilens.errors import BilensError
from bilens.read.flow.adjoints import Adjoints, Cut, LayerAdjoints, Sums, gradients
from bilens.read.flow.nodes import LEAVES, Node, NodeKind
from bilens.read.flow.rules import Rules

KEPT_PAIRS = 2**16
"""Pairs of positions of a layer's heads whose flows are kept, the strongest."""
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
class Flow:
    """An exact split of a logit, or of its change between two texts.

    The flow of a part is w . d, where d is its output, or the change of it, and w the adjoint of
    the number there. The flows of embeddings, positions, biases and choices add up to the number.

    Attributes:
        ids: the text, up to the position whose next token is predicted.
        tokens: its tokens, as names of nodes have them.
        values: the number in each run.
        heads: flow of each head at each position, through all sources.
        mlps: flow of each MLP at each position.
        embeddings: flow of each token.
        positions: flow of the vector of each position, on one text.
        biases: flow of the biases of each layer's attention and MLP, on one text.
        unembedding: flow of the biases after the last layer.
        choices: flow of what each layer chose, such as experts.
        pairs: of each layer, the flows of heads by source; None where heads have no pattern.
        absolute: sum of |flow| over all parts, heads by source.
        adjoints: the pass that it was read from.
        question: its number among the questions of this pass.
        named: nodes with measured effects and names.
    """

    ids: Int[Tensor, " time"]
    tokens: tuple[str, ...]
    values: tuple[float, ...]
    heads: Float[Tensor, "layers heads time"]
    mlps: Float[Tensor, "layers time"]
    embeddings: Float[Tensor, " time"]
    positions: Float[Tensor, " time"]
    biases: Float[Tensor, "layers 2"]
    unembedding: float
    choices: Float[Tensor, " layers"]
    pairs: tuple[Pairs | None, ...]
    absolute: float
    adjoints: Adjoints
    question: int
    named: tuple[Node, ...] = ()

    @property
    def value(self) -> float:
        """The number, or its change between two texts."""
        return self.values[0] - self.values[1] if self.two_texts else self.values[0]

    @property
    def two_texts(self) -> bool:
        """True if it is a change between two texts."""
        return len(self.values) == 2

    @property
    def n_layers(self) -> int:
        """Number of layers."""
        return len(self.mlps)

    @property
    def condition(self) -> float:
        """Absolute flow over the value: by how much rounding of flows grows in it; 0 of none."""
        return self.absolute / abs(self.value) if self.value else 0.0

    # Nodes.

    @cached_property
    def _arrays(self) -> list[tuple[NodeKind, Tensor, Tensor]]:
        """Kind, flows and places of all parts; a place is layer, number, position and source."""
        arrays: list[tuple[NodeKind, Tensor, Tensor]] = []

        def add(kind: NodeKind, flows: Tensor, *axes: int | None) -> None:
            """Add an array whose axes are some of the four numbers of a place, by their order."""
            index = flows.nonzero()
            places = torch.full((len(index), 4), -1)
            for axis, number in enumerate(axes):
                places[:, number] = index[:, axis].cpu()
            arrays.append((kind, flows[tuple(index.T)].cpu(), places))

        add("token", self.embeddings, 2)
        add("position", self.positions, 2)
        add("mlp", self.mlps, 0, 2)
        add("choice", self.choices, 0)
        for layer, pairs in enumerate(self.pairs):
            if pairs is None:
                of_layer = torch.zeros_like(self.heads)
                of_layer[layer] = self.heads[layer]
                add("head", of_layer, 0, 1, 2)
            else:
                places = torch.cat([torch.full_like(pairs.places[:, :1], layer), pairs.places], 1)
                arrays.append(("head", pairs.flows.cpu(), places.cpu()))
        return arrays

    @cached_property
    def nodes(self) -> tuple[Node, ...]:
        """All parts with at least `LEAST` of the absolute flow, the largest |flow| first."""
        nodes = []
        for kind, flows, places in self._arrays:
            strong = (flows.abs() >= LEAST * self.absolute) & (flows != 0)
            if kind in LEAVES:
                strong = flows != 0
            rows = zip(flows[strong].tolist(), places[strong].tolist(), strict=True)
            for through, place in rows:
                layer, number, position, source = (None if x < 0 else x for x in place)
                part = {"head": "attention", "mlp": "mlp"}.get(kind)
                nodes.append(Node(kind, through, layer, part, position, source, number))
        for layer, both in enumerate(self.biases.tolist()):
            for part, through in zip(("attention", "mlp"), both, strict=True):
                if through:
                    nodes.append(Node("bias", through, layer, part=part))
        if self.unembedding:
            nodes.append(Node("bias", self.unembedding))
        named = {node.place: node for node in self.named}
        nodes = [named.get(node.place, node) for node in nodes]
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
        known = [pairs.attention for pairs in self.pairs if pairs is not None]
        if not known:
            return ()
        pattern = torch.stack(known).mean(0)
        time = len(pattern)
        even = 1 / torch.arange(1, time + 1, device=pattern.device)
        sinks = []
        for source in range(time - 3):
            share = float(pattern[source + 1 :, source].mean())
            if share > max(0.3, 1.5 * float(even[source + 1 :].mean())):
                sinks.append(source)
        return tuple(sinks)

    # What a node writes and reads.

    def written(self, nodes: Sequence[Node]) -> list[Float[Tensor, " width"]]:
        """Return the output of each of some nodes, or its change, at its place in the model.

        It is a head's part of the mixed values, the output of an MLP, or an embedding.
        """
        of_layer: dict[int | None, list[int]] = defaultdict(list)
        for number, node in enumerate(nodes):
            of_layer[node.layer].append(number)
        embedding = self.adjoints.change(self.adjoints.embedding.value)[self.question]
        outputs = {number: embedding[nodes[number].position] for number in of_layer[None]}
        for layer, adjoints in self.adjoints.layers():
            for number in of_layer[layer]:
                value, _ = self._value(nodes[number], adjoints)
                outputs[number] = self.adjoints.change(value)[self.question]
        return [outputs[number] for number in range(len(nodes))]

    def _value(self, node: Node, layer: LayerAdjoints) -> tuple[Tensor, Tensor]:
        """Return the output of a node for all texts, and the adjoint there, of the question."""
        graph, position, number = layer.graph, node.position, node.number or 0
        cut, w = (graph.mlp, layer.mlp) if node.kind == "mlp" else (graph.heads, layer.heads)
        assert cut is not None and w is not None and position is not None
        columns = slice(None)
        if node.kind == "head":
            width = w.shape[-1] // self.heads.shape[1]
            columns = slice(number * width, (number + 1) * width)
        w = self._only(w[:, position, columns])
        with torch.enable_grad():
            if node.kind == "mlp" or node.source is None:
                return cut.value[:, position, columns], w
            assert graph.mix is not None
            with Rules(self.adjoints.table, len(self.adjoints.ids)):
                return graph.mix.term(number, position, node.source), w

    def _only(self, w: Float[Tensor, "texts *shape"]) -> Tensor:
        """Return adjoints of this question's texts, 0 for those of other questions."""
        only = torch.zeros_like(w)
        for text in range(self.question, len(w), self.adjoints.questions):
            only[text] = w[text]
        return only

    def edges(self, nodes: Sequence[Node]) -> Float[Tensor, "n n"]:
        """Return the flow between some nodes: row a, column b is the flow from b up to a.

        It passes through no other part. At every node the inflow from all parts below is its flow.
        Nodes may be parts of the model, the logit, and embeddings.
        """
        return _Edges(self, nodes).all()


class _Edges:
    """Edges between some nodes, found in one walk from the last layer down."""

    def __init__(self, flow: Flow, nodes: Sequence[Node]) -> None:
        self.flow, self.nodes = flow, nodes
        self.edges = torch.zeros(len(nodes), len(nodes), dtype=torch.float64)
        # Adjoints of the number that each node has already met: at streams and embeddings.
        self.reading: dict[int, Sums] = {}
        self.in_layer: dict[int | None, list[int]] = defaultdict(list)
        for number, node in enumerate(nodes):
            self.in_layer[node.layer].append(number)

    def all(self) -> Tensor:
        """Return all edges."""
        flow, adjoints = self.flow, self.flow.adjoints
        for number, node in enumerate(self.nodes):
            if node.kind == "output":
                self.reading[number] = Sums()
                self.reading[number].add(adjoints.last.leaf, flow._only(adjoints.of_last))
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

        def read(reader: int, sums: Sums, value: Tensor, w: Tensor) -> None:
            """Pull an adjoint back to what was there before, and note the edges."""
            found = dict(zip(map(id, inputs), gradients(value, inputs, w), strict=True))
            sums.add_all(earlier, [found[id(leaf)] for leaf in earlier])
            for cut, shown, edges in ((graph.heads, heads, self._to_heads), (graph.mlp, mlps, self._to_mlps)):
                of_cut = found.get(id(cut.leaf)) if cut else None
                if of_cut is not None:
                    edges(reader, shown, layer, of_cut)
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
            value, w = self.flow._value(self.nodes[number], layer)
            self.reading[number] = Sums()
            read(number, self.reading[number], value, w)

    def _product(self, x: Tensor, w: Tensor) -> float:
        """Return the flow w . dx of an activation for the question of this flow."""
        adjoints, q = self.flow.adjoints, self.flow.question
        size = len(x) // len(adjoints.ids)
        change = adjoints.change(x.unflatten(0, (-1, size)))[q]
        return float((w.unflatten(0, (-1, size))[q] * change).sum())

    def _to_mlps(
        self, reader: int, numbers: Sequence[int], layer: LayerAdjoints, w: Tensor
    ) -> None:
        q = self.flow.question
        assert layer.graph.mlp is not None
        change = self.flow.adjoints.change(layer.graph.mlp.leaf)[q]
        for number in numbers:
            position = self.nodes[number].position
            self.edges[reader, number] += float(w[q, position] @ change[position])

    def _to_heads(
        self, reader: int, numbers: Sequence[int], layer: LayerAdjoints, w: Tensor
    ) -> None:
        q = self.flow.question
        for number in numbers:
            node = self.nodes[number]
            change = self._change(number, layer)
            width, head = len(change), node.number or 0
            block = slice(head * width, (head + 1) * width)
            self.edges[reader, number] += float(w[q, node.position, block] @ change)

    def _change(self, number: int, layer: LayerAdjoints) -> Tensor:
        value, _ = self.flow._value(self.nodes[number], layer)
        return self.flow.adjoints.change(value)[self.flow.question]

    def _embeddings(self) -> None:
        adjoints, q = self.flow.adjoints, self.flow.question
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


def read_flows(adjoints: Adjoints, tokens: Sequence[tuple[str, ...]]) -> list[Flow]:
    """Return the flow of each question of a pass.

    Raises:
        BilensError: the flows do not add up to the number.
    """
    questions, time = adjoints.questions, adjoints.ids.shape[1]
    places = adjoints.places
    n_layers, n_heads = len(places.layers), places.n_heads
    like = adjoints.embedding.value.detach()
    heads = like.new_zeros(questions, n_layers, n_heads, time)
    mlps = like.new_zeros(questions, n_layers, time)
    biases, choices = like.new_zeros(questions, n_layers, 2), like.new_zeros(questions, n_layers)
    pairs: list[list[Pairs | None]] = [[None] * n_layers for _ in range(questions)]
    absolute = like.new_zeros(questions)
    for layer, of_layer in adjoints.layers():
        graph = of_layer.graph
        if graph.mlp is not None and of_layer.mlp is not None:
            mlps[:, layer] = (of_layer.mlp[:questions] * adjoints.change(graph.mlp.leaf)).sum(-1)
        if graph.heads is not None and of_layer.heads is not None:
            terms = of_layer.heads[:questions] * adjoints.change(graph.heads.leaf)
            heads[:, layer] = terms.unflatten(-1, (n_heads, -1)).sum(-1).transpose(1, 2)
            if graph.mix is not None:
                for question, of_question in enumerate(_pairs(adjoints, of_layer)):
                    pairs[question][layer], size = of_question
                    absolute[question] += size
            else:
                absolute += heads[:, layer].abs().sum((1, 2))
        for number, (leaf, w) in enumerate(zip(graph.leaves, of_layer.leaves, strict=True)):
            if w is None:
                continue
            if leaf.kind == "choice":
                choices[:, layer] += _of_texts(adjoints, leaf.value, w)
            else:
                biases[:, layer, int(number >= graph.of_attention)] += (w * leaf.value).sum().detach()
    absolute += mlps.abs().sum((1, 2))
    of_tokens = adjoints.of_tokens[:questions] * adjoints.change(adjoints.embedding.value)
    embeddings = of_tokens.sum(-1)
    positions, unembedding = like.new_zeros(questions, time), like.new_zeros(questions)
    for leaf, w in zip(adjoints.first_leaves, adjoints.of_first_leaves, strict=True):
        if w is not None and leaf.kind == "constant":
            of_constant = (w * leaf.value.detach()).sum(-1)
            positions += of_constant if of_constant.shape[-1:] == (time,) else of_constant / time
    for leaf, w in zip(adjoints.last_leaves, adjoints.of_last_leaves, strict=True):
        if w is not None and leaf.kind == "constant":
            unembedding += (w * leaf.value).sum().detach()
    flows = []
    for question in range(questions):
        texts = range(question, len(adjoints.ids), questions)
        flow = Flow(
            ids=adjoints.ids[question],
            tokens=tokens[question],
            values=tuple(float(adjoints.numbers[text]) for text in texts),
            heads=heads[question],
            mlps=mlps[question],
            embeddings=embeddings[question],
            positions=positions[question],
            biases=biases[question],
            unembedding=float(unembedding[question]),
            choices=choices[question],
            pairs=tuple(pairs[question]),
            absolute=float(absolute[question]),
            adjoints=adjoints,
            question=question,
        )
        check_flow(flow)
        flows.append(flow)
    return flows


def _of_texts(adjoints: Adjoints, x: Tensor, w: Tensor) -> Float[Tensor, " questions"]:
    """Return the flow w . dx of a leaf whose first axis holds the texts, and further axes."""
    size = len(x) // len(adjoints.ids)
    change = adjoints.change(x.unflatten(0, (-1, size)))
    w = w.unflatten(0, (-1, size))[: adjoints.questions]
    return (w * change).flatten(1).sum(1)


@torch.no_grad()
def _pairs(adjoints: Adjoints, layer: LayerAdjoints) -> Iterator[tuple[Pairs, Tensor]]:
    """Yield the strongest pairs of each question, and the sum of all sizes."""
    mix = layer.graph.mix
    assert mix is not None and layer.heads is not None
    questions, time = adjoints.questions, adjoints.ids.shape[1]
    w = layer.heads.unflatten(-1, (mix.output.shape[1], -1)).transpose(1, 2)[:questions]
    attention = w.new_zeros(questions, time, time)
    sizes = w.new_zeros(questions)
    kept: list[list[tuple[Tensor, Tensor]]] = [[] for _ in range(questions)]
    for heads in mix.blocks():
        pattern, values = mix.pattern(heads), mix.values[:, heads].detach()
        attention += pattern[:questions].abs().sum(1)
        of_texts = w[:, heads].repeat(len(pattern) // questions, 1, 1, 1)
        flows = adjoints.change(pattern * (of_texts @ values.mT))
        sizes += flows.abs().sum((1, 2, 3))
        for question in range(questions):
            index = flows[question].nonzero()
            of_pairs = flows[question][tuple(index.T)]
            index[:, 0] += heads.start
            kept[question].append(_strongest(of_pairs, index))
    for question in range(questions):
        flows, places = (torch.cat(parts) for parts in zip(*kept[question], strict=True))
        flows, places = _strongest(flows, places)
        yield Pairs(flows, places, attention[question] / mix.output.shape[1]), sizes[question]


def _strongest(flows: Tensor, places: Tensor) -> tuple[Tensor, Tensor]:
    if len(flows) <= KEPT_PAIRS:
        return flows, places
    index = flows.abs().topk(KEPT_PAIRS).indices
    return flows[index], places[index]


def check_flow(flow: Flow) -> None:
    """Raise unless the flows of embeddings, positions, biases and choices add up to the value.

    They do within rounding of the absolute flow, and within a hundredth of the value.
    """
    parts = (flow.embeddings, flow.positions, flow.biases, flow.choices)
    total = float(sum(part.double().sum() for part in parts)) + flow.unembedding
    size = flow.absolute + sum(map(abs, flow.values)) + float(flow.embeddings.abs().sum())
    check_sum("The flow of tokens, positions, biases and choices", total, flow.value, size=size)
    if abs(total - flow.value) > 0.01 * abs(flow.value) + ROUNDING * sum(map(abs, flow.values)):
        raise BilensError(
            f"The flow of tokens, positions, biases and choices adds up to {total:.6g}, expected "
            f"{flow.value:.6g}: its parts are {size:.2g} in all and cancel beyond rounding. Take a "
            "text or mean embeddings as the second run, not vectors near 0, or dtype=torch.float64"
        )
