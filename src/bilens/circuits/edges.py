"""Edges between the parts of a circuit: the few that carry its answer, found and measured.

A part writes to the stream: the embedding, a head or an MLP. A reader takes the stream as input: a
head's queries, keys or values, an MLP, or the logits. Keys and values that a group of heads share
are one reader. An edge joins each part to each later reader.

Source:
    Syed et al. 2023, "Attribution patching outperforms automated circuit discovery"; Hanna et al.
    2024 (arXiv 2403.17806).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from bilens.circuits.case import Case
from bilens.circuits.interval import Interval
from bilens.circuits.patching import parts_in
from bilens.circuits.search import Cases, MaskedCases, search_circuit
from bilens.errors import BilensError
from bilens.transformer import ResidualModel
from bilens.transformer.changes import Change, Part, Site, mixed_site, mlp_site
from bilens.transformer.layers import NormedInput
from bilens.transformer.maps import LinearMap


class Reader(NamedTuple):
    """A place where the stream is read."""

    # Heads or MLP of a layer, or the model for the logits; its norm is before the maps.
    part: NormedInput
    # Maps that read, and the rows of each that belong to this reader.
    maps: tuple[tuple[LinearMap, slice], ...]
    sources: int  # number of parts whose output is read, the first in order
    role: str = ""  # queries, keys or values of heads; empty for MLPs and the logits
    owners: tuple[Part, ...] = ()  # heads or the MLP whose input it is; none for the logits


class EdgeGraph:
    """The parts of a model in order, and the readers of its stream.

    Parts are the embedding, and of each layer its heads and its MLP. Readers are of each layer
    queries by head, keys and values by group, and the MLP; then the logits.
    """

    def __init__(self, model: ResidualModel) -> None:
        modules = model.modules
        layers = modules.layers
        mixed = [(layer.residual_mix, layer.heads.v_first_share) for layer in layers]
        if modules.parallel or any(share is not None for shares in mixed for share in shares):
            raise BilensError(
                f"Layers of this {type(model.model).__name__} run heads and MLP side by side, or "
                "read more than the stream; expected one after the other. Circuits of parts are "
                "available"
            )
        self.model = model
        self.readers: list[Reader] = []
        for number, layer in enumerate(layers):
            heads, mlp, before = layer.heads, layer.mlp, self.source(number)
            of_roles = {
                "queries": ([pair[0] for pair in heads.pairs], heads.n_heads),
                "keys": ([pair[1] for pair in heads.pairs], heads.n_kv_heads),
                "values": ([heads.value], heads.n_kv_heads),
            }
            for role, (maps, count) in of_roles.items():
                width = heads.n_heads // count
                for i in range(count):
                    owners = [Part("head", number, h) for h in range(i * width, (i + 1) * width)]
                    rows = tuple((part, _block(part, i, count)) for part in maps)
                    self.readers.append(Reader(heads, rows, before, role, tuple(owners)))
            rows = tuple((part, slice(None)) for part in mlp.reads)
            owner = (Part("mlp", number),)
            self.readers.append(Reader(mlp, rows, before + heads.n_heads, "", owner))
        self.n_sources = self.source(model.n_layers)
        self.readers.append(Reader(modules, (), self.n_sources))

    def source(self, layer: int, head: int = 0) -> int:
        """Return the number of a head of a layer; its MLP comes after its last head."""
        return 1 + layer * (self.model.n_heads + 1) + head

    def first_reader(self, layer: int) -> int:
        """Return the number of the first reader of a layer."""
        return layer * ((len(self.readers) - 1) // self.model.n_layers)

    @cached_property
    def exists(self) -> Bool[Tensor, "readers sources"]:
        """Pairs of readers and parts that an edge joins."""
        counts = torch.tensor([reader.sources for reader in self.readers])
        return torch.arange(self.n_sources) < counts[:, None]

    def between(self, parts: Bool[Tensor, "layers parts"]) -> Bool[Tensor, "readers sources"]:
        """Return the edges between some parts, from the embedding and to the logits."""
        named = set(parts_in(parts))
        sources = torch.cat([torch.ones(1, dtype=torch.bool), parts.flatten()])
        readers = [not reader.owners or bool(named & {*reader.owners}) for reader in self.readers]
        return torch.tensor(readers)[:, None] & sources & self.exists

    def head_outputs(
        self, layer: int, mixed: Float[Tensor, "*batch time all_heads"]
    ) -> Float[Tensor, "*batch heads time d_model"]:
        """Return the output of each head to the stream. A norm after them has the run's scale."""
        heads, n = self.model.modules.layers[layer].heads, self.model.n_heads
        weight = heads.out.weight().unflatten(1, (n, -1))
        rows = torch.einsum("...thk,dhk->...htd", mixed.unflatten(-1, (n, -1)), weight)
        if (norm := heads.out_norm) is not None:
            scale = norm.scale(rows.sum(-3))[..., None, :, None]
            rows = norm.centred(rows) * scale * norm.gain()
        return heads.residual_scale * rows

    def mlp_output(
        self, layer: int, output: Float[Tensor, "*batch d"]
    ) -> Float[Tensor, "*batch d"]:
        """Return the output of an MLP to the stream, after a norm if it has one."""
        mlp = self.model.modules.layers[layer].mlp
        if (norm := mlp.out_norm) is not None:
            output = norm.applied(norm.normalised(output))
        return mlp.residual_scale * output


class EdgeRuns:
    """Runs of a question in which only some edges carry what they do on the first text.

    All others carry what they do on the second text, so that only layers with readers of such edges
    are run at all.
    """

    def __init__(self, graph: EdgeGraph, case: Case) -> None:
        self.graph, self.case = graph, case
        self.first, self.second = case.alone

    def streams(self, masks: Float[Tensor, "n readers sources"]) -> Float[Tensor, "n time d_model"]:
        """Return the last stream in the run of each mask of edges."""
        graph, second = self.graph, self.second
        shares = masks * graph.exists.to(masks)
        change = self.first.tokens - second.tokens
        written = _Written(shares, change.expand(len(masks), 1, -1, -1))
        reads = shares.detach().ne(0).any(0).any(-1)
        for layer in range(graph.model.n_layers):
            start, end = graph.first_reader(layer), graph.first_reader(layer + 1)
            readers = [start + i for i in reads[start:end].nonzero().flatten().tolist()]
            if readers:
                second.run_layer(layer, self._changes(layer, readers, written), len(masks))
        return written.into(len(graph.readers) - 1, second.stream[0])

    @cached_property
    def _outputs(self) -> list[tuple[Tensor, Tensor]]:
        """What the heads and the MLP of each layer write on the second text."""
        graph, second = self.graph, self.second
        written = []
        with torch.no_grad():
            for layer, mixed in enumerate(second.mixed):
                output = graph.mlp_output(layer, second.outputs[layer][0])
                written.append((graph.head_outputs(layer, mixed[0]), output))
        return written

    @cached_property
    def _mlp_inputs(self) -> list[Tensor]:
        """The streams of the second run that the MLP of each layer reads."""
        return [self.second.layer(n).mlp_input[0] for n in range(self.graph.model.n_layers)]

    def _changes(self, number: int, readers: list[int], written: "_Written") -> list[Change]:
        """Return the changes of a layer in which some readers take what was written so far."""
        graph, (heads_written, mlp_written) = self.graph, self._outputs[number]
        layer, of_mlp = graph.model.modules.layers[number], graph.first_reader(number + 1) - 1
        stream, start = self.second.streams[number][0], graph.source(number)

        def read_by(reader: int, part: LinearMap, rows: slice, y: Tensor) -> Tensor:
            x = layer.heads.applied(layer.heads.normalised(written.into(reader, stream)))
            weight, bias = part.weight()[rows], part.bias()
            columns = torch.arange(part.n_out) if part.rows is None else part.rows
            y = y.clone()
            y[..., columns[rows]] = x @ weight.T if bias is None else x @ weight.T + bias[rows]
            return y

        def keep_heads(mixed: Tensor) -> None:
            written.add(start, graph.head_outputs(number, mixed) - heads_written)

        def keep_mlp(y: Tensor) -> None:
            change = graph.mlp_output(number, y) - mlp_written
            written.add(start + graph.model.n_heads, change[:, None])

        # Queries, keys and values may be one module, whose output is changed reader by reader.
        changes: list[Change] = []
        for reader in readers:
            for part, rows in graph.readers[reader].maps if reader != of_mlp else ():
                site = Site(part.module, "output", number)
                changes.append((site, partial(read_by, reader, part, rows)))
        if changes:
            changes.append((mixed_site(graph.model, number), keep_heads))
        if of_mlp in readers:
            before = self._mlp_inputs[number]
            into_mlp = Site(layer.mlp.norm_or_module, "input", number)
            changes.append((into_mlp, lambda _: written.into(of_mlp, before)))
            changes.append((mlp_site(graph.model, number), keep_mlp))
        return changes


class _Written:
    """What parts write more than on the second text, as far as a run has come."""

    def __init__(self, shares: Tensor, embedding: Tensor) -> None:
        self.shares, self.sources, self.changes = shares, [0], embedding

    def add(self, first: int, changes: Float[Tensor, "n parts time d_model"]) -> None:
        """Add what parts of successive numbers write."""
        self.sources += range(first, first + changes.shape[1])
        self.changes = torch.cat([self.changes, changes], 1)

    def into(self, reader: int, stream: Tensor) -> Tensor:
        """Return the stream of the second text with a reader's share of the changes."""
        shares = self.shares[:, reader, self.sources]
        return stream + torch.einsum("ns,nstd->ntd", shares, self.changes)


class EdgeCases(MaskedCases):
    """Questions about a model, on which masks of edges are measured."""

    def __init__(self, cases: Cases) -> None:
        super().__init__(cases.model, cases.cases)
        self.graph = EdgeGraph(cases.model)
        self.runs = [EdgeRuns(self.graph, case) for case in cases.cases]

    @property
    def everything(self) -> Bool[Tensor, "readers sources"]:
        return self.graph.exists

    @property
    def groups(self) -> list[list[int]]:
        return [[number] for number in range(len(self))]

    def streams(
        self, group: int, masks: Float[Tensor, "n *shape"]
    ) -> Float[Tensor, "n texts time d_model"]:
        runs = self.runs[group]
        return runs.streams(masks.to(runs.second.tokens))[:, None]


class CircuitEdge(NamedTuple):
    """An edge from a part, or the embedding, to parts of the circuit that read, or the logits.

    The role is as of a `Reader`. The share is its integrated gradient, a share of the change.
    """

    source: Part | None
    readers: tuple[Part, ...]
    role: str
    share: float


@dataclass(frozen=True, eq=False)
class EdgeCircuit:
    """The edges between the parts of a circuit that carry its answer."""

    edges: tuple[CircuitEdge, ...]  # the largest share first
    candidates: int  # number of edges between the parts, from the embedding and to the logits
    mask: Bool[Tensor, "readers sources"]
    restored: Interval  # f on the questions that measure


def find_edges(
    ordering: Sequence[Cases],
    deciding: Cases,
    measuring: Cases,
    parts: Bool[Tensor, "layers parts"],
) -> EdgeCircuit:
    """Return the fewest edges between some parts that keep nine tenths of what the parts restore.

    The search is that of parts, among all edges between them. Every other edge carries what it does
    on the second text.
    """
    first, others = [EdgeCases(cases) for cases in ordering], EdgeCases(measuring)
    graph = others.graph
    candidates = graph.between(parts)
    count = int(candidates.sum())
    whole = float(deciding.shares(parts[None].double()).min())
    found = search_circuit(first, EdgeCases(deciding), 0.9 * whole, candidates, edge_sizes(count))
    mask = found.mask
    shares = others.scores(mask)
    named = [None, *parts_in(torch.ones_like(parts))]
    inside = set(parts_in(parts))
    edges = []
    for reader, source in mask.nonzero().tolist():
        _, _, _, role, owners = graph.readers[reader]
        readers = tuple(part for part in owners if part in inside)
        edges.append(CircuitEdge(named[source], readers, role, float(shares[reader, source])))
    rises = others.values(mask[None].double())[0]
    return EdgeCircuit(
        edges=tuple(sorted(edges, key=lambda edge: -abs(edge.share))),
        candidates=count,
        mask=mask,
        restored=Interval.of(rises, others.changes),
    )


def edge_sizes(count: int) -> list[int]:
    """Return the numbers of edges that are tried among some, two for each doubling."""
    return sorted({max(1, round(count * 2 ** (-step / 2))) for step in range(12)})


def _block(part: LinearMap, number: int, count: int) -> slice:
    width = part.n_out // count
    return slice(number * width, (number + 1) * width)
