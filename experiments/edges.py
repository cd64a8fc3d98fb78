"""Edges between the parts of a transformer: their attributions, and runs with only some of them.

A part writes to the stream: the embedding, a head or an MLP. A reader takes the stream as input: a
head's queries, keys or values, an MLP, or the logits. Keys and values that a group of heads share
are one reader. An edge joins each part to each later reader.

Source:
    Syed et al. 2023, "Attribution patching outperforms automated circuit discovery"; Hanna et al.
    2024 (arXiv 2403.17806).
"""

from collections import defaultdict
from collections.abc import Sequence
from functools import cached_property, partial
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from bilens.errors import BilensError
from bilens.read.flow.contrast import Other
from bilens.read.flow.patching import first_change, runs_of
from bilens.read.flow.question import Question
from bilens.read.flow.split import Split, split
from bilens.read.language import TokenDirection
from bilens.read.linear.projections import Reads
from bilens.read.linear.secants import norm_secant
from bilens.residual import Moment, ResidualModel
from bilens.residual.interventions import Number, Run, Site, Slope, last_site, mixture, slopes
from bilens.residual.layers import NormedInput
from bilens.residual.parts import LinearMap, Norm
from experiments.patching import GRADIENTS


class Reader(NamedTuple):
    """A place where the stream is read.

    Attributes:
        part: heads or MLP of a layer, or the model for the logits; its norm is before the maps.
        maps: maps that read, and the rows of each that belong to this reader.
        sources: number of parts whose output is read, the first in order.
    """

    part: NormedInput
    maps: tuple[tuple[LinearMap, slice], ...]
    sources: int


class EdgeGraph:
    """The parts of a model in order, and the readers of its stream.

    Args:
        model: a model whose layers run heads and then an MLP.

    Attributes:
        readers: of each layer queries by head, keys and values by group, and the MLP; the logits.
        n_sources: number of parts: the embedding, and of each layer its heads and its MLP.
    """

    def __init__(self, model: ResidualModel) -> None:
        parts = model.parts
        if parts.parallel or any(layer.residual_mix is not None for layer in parts.layers):
            raise BilensError("Edges of parallel layers and of mixed embeddings are not supported")
        if any(layer.heads.v_first_share is not None for layer in parts.layers):
            raise BilensError("Edges of values that layers share are not supported")
        self.model = model
        self.readers: list[Reader] = []
        for number, layer in enumerate(parts.layers):
            heads, mlp, before = layer.heads, layer.mlp, self.source(number)
            queries = [pair[0] for pair in heads.pairs]
            keys = [pair[1] for pair in heads.pairs]
            groups = ((queries, heads.n_heads), (keys, heads.n_kv_heads))
            for maps, count in (*groups, ([heads.value], heads.n_kv_heads)):
                self.readers += [
                    Reader(heads, tuple((part, _block(part, i, count)) for part in maps), before)
                    for i in range(count)
                ]
            rows = tuple((part, slice(None)) for part in mlp.reads)
            self.readers.append(Reader(mlp, rows, before + heads.n_heads))
        self.n_sources = self.source(model.n_layers)
        self.readers.append(Reader(parts, (), self.n_sources))

    def source(self, layer: int, head: int = 0) -> int:
        """Return the number of a head of a layer; its MLP comes after its last head."""
        return 1 + layer * (self.model.n_heads + 1) + head

    def first_reader(self, layer: int) -> int:
        """Return the number of the first reader of a layer."""
        return layer * (len(self.readers) // self.model.n_layers)

    @cached_property
    def exists(self) -> Bool[Tensor, "readers sources"]:
        """Pairs of readers and parts that an edge joins."""
        counts = torch.tensor([reader.sources for reader in self.readers])
        return torch.arange(self.n_sources) < counts[:, None]

    def outputs(self, run: Run) -> Float[Tensor, "sources time d_model"]:
        """Return the output of every part to the stream."""
        rows = [run.tokens[None]]
        for layer in range(self.model.n_layers):
            rows.append(self.head_outputs(layer, run.mixed[layer]))
            rows.append(self.mlp_output(layer, run.outputs[layer])[None])
        return torch.cat(rows)

    def head_outputs(
        self, layer: int, mixed: Float[Tensor, "*batch time all_heads"]
    ) -> Float[Tensor, "*batch heads time d_model"]:
        """Return the output of each head to the stream. A norm after them has the run's scale."""
        heads, n = self.model.parts.layers[layer].heads, self.model.n_heads
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
        mlp = self.model.parts.layers[layer].mlp
        return mlp.residual_scale * _normed(mlp.out_norm, output)

    def scores(
        self, change: Float[Tensor, "sources time d"], reads: Float[Tensor, "readers time d"]
    ) -> Float[Tensor, "readers sources"]:
        """Return the product of each part's change with each reader's direction; 0 if no edge."""
        return (reads.flatten(1) @ change.flatten(1).T) * self.exists.to(change)

    def flow_reads(self, through: Split) -> Float[Tensor, "readers time d_model"]:
        """Return the direction of the stream that each reader reads in a flow."""
        rows, shape = [], through.above[Moment.embedding()].shape
        places = torch.arange(shape[0], device=through.root.device)
        for number, layer in enumerate(self.model.parts.layers):
            heads = through.heads_map(number)
            roles = heads.branches(heads.back(through.above[Moment.attention(number)]))
            by_role = {branch.role or "values": branch.reads for branch in roles}
            for role in ("queries", "keys", "values"):
                parts = [_by_head(reads) for reads in by_role.get(role, ())]
                zero = through.root.new_zeros(self.model.n_heads, *shape)
                by_head = torch.stack([zero, *parts]).sum(0)
                count = layer.heads.n_heads if role == "queries" else layer.heads.n_kv_heads
                rows.append(by_head.unflatten(0, (count, -1)).sum(1))
            mlp = through.mlp_map(number)
            pulled = mlp.pulled(through.above[Moment.mlp(number)])
            rows.append(mlp.read(pulled, places)[0][None])
        return torch.cat([*rows, self.logit_reads(through)])

    def logit_reads(self, through: Split) -> Float[Tensor, "1 time d_model"]:
        """Return the direction of the stream that the logits read, at the last position."""
        last = torch.zeros_like(through.above[Moment.embedding()])
        last[-1] = through.root
        return last[None]

    def gradient_reads(
        self, runs: tuple[Run, Run], number: Number, points: Sequence[float]
    ) -> Float[Tensor, "readers time d_model"]:
        """Return the mean gradient by each reader's input at points between the embeddings."""
        first, second = runs
        shares = first.tokens.new_tensor(points)[:, None, None]
        tokens = second.tokens + shares * (first.tokens - second.tokens)
        readers = self.readers[:-1]
        sites = {Site(part.module, False, 0) for reader in readers for part, _ in reader.maps}
        norms = {reader.part.norm.module for reader in readers if reader.part.norm is not None}
        places = [*sites, *(Site(module, True, 0) for module in norms), last_site(self.model)]
        of_places = dict(zip(places, slopes(first, number, places, tokens), strict=True))
        with torch.no_grad():
            rows = [self._pulled(reader, of_places) for reader in readers]
        total = torch.stack([*rows, of_places[last_site(self.model)].slope.sum(0)])
        return total / len(points)

    def _pulled(self, reader: Reader, of_places: dict[Site, Slope]) -> Float[Tensor, "time d"]:
        parts = []
        for part, of_reader in reader.maps:
            slope = of_places[Site(part.module, False, 0)].slope
            parts.append(_selected(slope, part)[..., of_reader] @ part.weight()[of_reader])
        rows = torch.stack(parts).sum(0)
        if (norm := reader.part.norm) is not None:
            x = of_places[Site(norm.module, True, 0)].value
            # The secant between a point and itself is the derivative.
            rows = norm_secant(norm, x, x).pull(rows * norm.gain())
        return rows.sum(0)


class PartialRuns:
    """Runs on the first text in which only some nodes or edges have their values of it.

    Everything else has its values of the second text.

    Args:
        graph: parts and readers of the model.
        runs: the runs on both texts.
        number: the number that is measured.
    """

    def __init__(self, graph: EdgeGraph, runs: tuple[Run, Run], number: Number) -> None:
        self.graph, self.runs, self.number = graph, runs, number

    @torch.no_grad()
    def with_nodes(self, clean: Bool[Tensor, "rows sources"]) -> Float[Tensor, " rows"]:
        """Return the number of runs in which other heads and MLPs have their second outputs.

        The embedding is that of the first text in all of them.
        """
        first, second = self.runs
        keep = clean[:, 1:].unflatten(1, (self.graph.model.n_layers, -1)).to(second.tokens)
        sets = [mixture(second, shares) for shares in keep]
        return self.number(first.again(sets, kept=first_change(self.runs)))

    @torch.no_grad()
    def with_edges(self, clean: Bool[Tensor, "rows readers sources"]) -> Float[Tensor, " rows"]:
        """Return the number of runs in which other edges carry the output on the second text."""
        graph, second = self.graph, self.runs[1]
        shares = (clean & graph.exists).to(second.tokens)
        changes = second.tokens.new_zeros(len(clean), graph.n_sources, *second.tokens.shape)
        changes[:, 0] = self.runs[0].tokens - second.tokens
        of_layers: dict[Site, Any] = {}
        for layer in range(graph.model.n_layers):
            of_layers |= self._layer(layer, shares, changes)
        # The stream after the last layer follows from the outputs, which these collect.
        second.batch([0] * len(clean), of_layers)
        last = torch.einsum("rs,rstd->rtd", shares[:, -1], changes)
        return self.number(second.stream + last)

    @cached_property
    def _outputs(self) -> Tensor:
        return self.graph.outputs(self.runs[1])

    @cached_property
    def _streams(self) -> list[tuple[Tensor, Tensor]]:
        """The streams of the second run that the heads and the MLP of each layer read."""
        second, inputs = self.runs[1], []
        looks = {
            Site(layer.mlp.norm_or_module, True, 0): lambda x: inputs.append(x[0])
            for layer in self.graph.model.parts.layers
        }
        second.batch([0], looks)
        entries = [x[0] for x, _, _ in second.calls]
        return list(zip(entries, inputs, strict=True))

    def _layer(self, number: int, shares: Tensor, changes: Tensor) -> dict[Site, Any]:
        graph, layer = self.graph, self.graph.model.parts.layers[number]
        heads, mlp, start = layer.heads, layer.mlp, graph.source(number)
        end = start + heads.n_heads
        of_heads, of_mlp = self._streams[number]
        first, last = graph.first_reader(number), graph.first_reader(number + 1) - 1

        def read(reader: slice, base: Tensor, sources: int) -> Tensor:
            part = changes[:, :sources].flatten(2)
            rows = (shares[:, reader, :sources] @ part).unflatten(2, base.shape)
            return base + rows

        def linear(part: LinearMap, readers: slice) -> Any:
            count = readers.stop - readers.start
            weight, bias = part.weight().unflatten(0, (count, -1)), part.bias()

            def output(y: Tensor) -> Tensor:
                x = _normed(heads.norm, read(readers, of_heads, start))
                rows = torch.einsum("rgtd,gkd->rtgk", x, weight).flatten(2)
                rows = rows if bias is None else rows + bias
                y = y.clone()
                y[..., slice(None) if part.rows is None else part.rows] = rows
                return y

            return output

        def keep_heads(mixed: Tensor) -> None:
            written = graph.head_outputs(number, mixed)
            changes[:, start:end] = written - self._outputs[start:end]

        def replace_input(_: Tensor) -> Tensor:
            return read(slice(last, last + 1), of_mlp, end)[:, 0]

        def keep_mlp(y: Tensor) -> None:
            changes[:, end] = graph.mlp_output(number, y) - self._outputs[end]

        # Queries, keys and values may be one module, whose output is changed part by part.
        maps: dict[Site, list[Any]] = defaultdict(list)
        for query, key in heads.pairs:
            keys = slice(first + heads.n_heads, first + heads.n_heads + heads.n_kv_heads)
            maps[Site(query.module, False, 0)].append(linear(query, slice(first, keys.start)))
            maps[Site(key.module, False, 0)].append(linear(key, keys))
        of_values = linear(heads.value, slice(keys.stop, last))
        maps[Site(heads.value.module, False, 0)].append(of_values)
        return {
            **{site: partial(_in_turn, outputs) for site, outputs in maps.items()},
            Site(heads.out.module, True, 0): keep_heads,
            Site(mlp.norm_or_module, True, 0): replace_input,
            Site(mlp.module, False, 0): keep_mlp,
        }


def attributed_edges(
    graph: EdgeGraph,
    texts: tuple[str, str] | tuple[Tensor, Tensor],
    direction: TokenDirection | Tensor,
    number: Number,
) -> dict[str, Tensor]:
    """Return the attribution of each edge for two texts, (readers, parts), by each method."""
    model, (text, against) = graph.model, texts
    ids = model.ids(text)
    with torch.no_grad():
        runs = runs_of(model, ids, Other(model, ids, against))
        change = graph.outputs(runs[0]) - graph.outputs(runs[1])
        flows = {
            "contrastive flow": split(model, Question.of(text, direction, against=against)),
            "frozen flow (LRP)": split(model, Question.of(text, direction)),
        }
        reads = {name: graph.flow_reads(through) for name, through in flows.items()}
        direct = torch.zeros_like(reads["frozen flow (LRP)"])
        direct[-1:] = graph.logit_reads(flows["frozen flow (LRP)"])
    reads |= {name: graph.gradient_reads(runs, number, at) for name, at in GRADIENTS.items()}
    reads["direct logit attribution"] = direct
    return {name: graph.scores(change, rows).double() for name, rows in reads.items()}


def _block(part: LinearMap, number: int, count: int) -> slice:
    width = part.n_out // count
    return slice(number * width, (number + 1) * width)


def _by_head(reads: Reads) -> Float[Tensor, "heads time d_model"]:
    rows = (reads.weights.mT if reads.at_source else reads.weights) @ reads.partner
    heads, time, _ = rows.shape
    places = torch.cartesian_prod(torch.arange(heads), torch.arange(time)).to(rows.device)
    x, _ = reads.projection.pull(rows.flatten(0, 1), places[:, 0], places[:, 1])
    return x.unflatten(0, (heads, time))


def _selected(rows: Tensor, part: LinearMap) -> Tensor:
    return rows if part.rows is None else rows[..., part.rows]


def _normed(norm: Norm | None, x: Tensor) -> Tensor:
    return x if norm is None else norm.applied(norm.normalised(x))


def _in_turn(functions: Sequence[Any], x: Tensor) -> Tensor:
    for function in functions:
        x = function(x)
    return x
