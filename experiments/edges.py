"""Attributions of the edges between the parts of a transformer (`bilens.read.flow.edges`).

Source:
    Syed et al. 2023, "Attribution patching outperforms automated circuit discovery"; Hanna et al.
    2024 (arXiv 2403.17806).
"""

from collections.abc import Sequence
from dataclasses import replace

import torch
from jaxtyping import Float
from torch import Tensor

from bilens.read.flow.case import runs_of
from bilens.read.flow.edges import EdgeGraph, Reader
from bilens.read.flow.question import Other, Question
from bilens.read.flow.split import Split, split
from bilens.read.linear.projections import Reads
from bilens.read.linear.secants import norm_secant
from bilens.residual import Moment
from bilens.residual.interventions import Number, Run, Site, last_site, logit_of
from bilens.residual.parts import LinearMap
from experiments.patching import GRADIENTS, Slope, slopes


class AttributedEdges(EdgeGraph):
    """The parts and readers of a model, with attributions of the edges between them."""

    def outputs(self, run: Run) -> Float[Tensor, "sources time d_model"]:
        """Return the output of every part to the stream."""
        rows = [run.tokens[None]]
        for layer in range(self.model.n_layers):
            rows.append(self.head_outputs(layer, run.mixed[layer]))
            rows.append(self.mlp_output(layer, run.outputs[layer])[None])
        return torch.cat(rows)

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
            (heads,) = through.heads_maps(number)
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


def attributed_edges(graph: AttributedEdges, question: Question) -> dict[str, Tensor]:
    """Return the attribution of each edge for a question, (readers, parts), by each method."""
    model = graph.model
    ids, number = model.ids(question.text), logit_of(model, question.output_direction(model))
    with torch.no_grad():
        runs = runs_of(model, ids, Other(model, ids, question.against))
        change = graph.outputs(runs[0]) - graph.outputs(runs[1])
        flows = {
            "contrastive flow": split(model, question),
            "frozen flow (LRP)": split(model, replace(question, against="")),
        }
        reads = {name: graph.flow_reads(through) for name, through in flows.items()}
        direct = torch.zeros_like(reads["frozen flow (LRP)"])
        direct[-1:] = graph.logit_reads(flows["frozen flow (LRP)"])
    reads |= {name: graph.gradient_reads(runs, number, at) for name, at in GRADIENTS.items()}
    reads["direct logit attribution"] = direct
    return {name: graph.scores(change, rows).double() for name, rows in reads.items()}


def _by_head(reads: Reads) -> Float[Tensor, "heads time d_model"]:
    rows = (reads.weights.mT if reads.at_source else reads.weights) @ reads.partner
    heads, time, _ = rows.shape
    places = torch.cartesian_prod(torch.arange(heads), torch.arange(time)).to(rows.device)
    x, _ = reads.projection.pull(rows.flatten(0, 1), places[:, 0], places[:, 1])
    return x.unflatten(0, (heads, time))


def _selected(rows: Tensor, part: LinearMap) -> Tensor:
    return rows if part.rows is None else rows[..., part.rows]
