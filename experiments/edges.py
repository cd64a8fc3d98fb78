"""Attributions of the edges between the parts of a transformer (`bilens.circuits.edges`).

Source:
    Syed et al. 2023, "Attribution patching outperforms automated circuit discovery"; Hanna et al.
    2024 (arXiv 2403.17806).
"""

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from bilens.circuits import Cases, EdgeGraph
from bilens.flows import Question, adjoints_of
from bilens.transformer import Pass, token_site
from experiments.patching import GRADIENTS

Record = dict[nn.Module, tuple[Tensor, Tensor]]
"""Input and output of modules in the graph of a pass."""


class AttributedEdges(EdgeGraph):
    """The parts and readers of a model, with attributions of the edges between them."""

    def outputs(self, run: Pass) -> Float[Tensor, "sources time d_model"]:
        """Return the output of every part to the stream."""
        rows = [run.tokens]
        for layer in range(self.model.n_layers):
            rows.append(self.head_outputs(layer, run.mixed[layer][0]))
            rows.append(self.mlp_output(layer, run.outputs[layer]))
        return torch.cat(rows)

    def scores(
        self, change: Float[Tensor, "sources time d"], reads: Float[Tensor, "readers time d"]
    ) -> Float[Tensor, "readers sources"]:
        """Return the product of each part's change with each reader's direction; 0 if no edge."""
        return (reads.flatten(1) @ change.flatten(1).T) * self.exists.to(change)

    def recording(self, record: Record) -> ExitStack:
        """Record inputs and outputs of all maps and norms that read the stream."""

        def keep(module: nn.Module, args: tuple[Any, ...], _: Any, output: Tensor) -> None:
            record[module] = args[0], output

        modules: dict[nn.Module, Any] = {}
        for reader in self.readers[:-1]:
            modules |= dict.fromkeys((part.module for part, _ in reader.maps), keep)
            if (norm := reader.part.norm) is not None:
                modules[norm.module] = keep
        hooks = ExitStack()
        for module, hook in modules.items():
            hooks.enter_context(module.register_forward_hook(hook, with_kwargs=True))
        return hooks

    def flow_reads(self, question: Question) -> Float[Tensor, "readers time d_model"]:
        """Return the direction of the stream that each reader reads in a flow."""
        record: Record = {}
        with self.recording(record):
            adjoints = adjoints_of(self.model, [question])
        slopes: dict[nn.Module, Tensor] = {}
        for number, layer in adjoints.layers():
            for reader in self.readers[self.first_reader(number) : self.first_reader(number + 1)]:
                heads, mlp = (layer.heads, layer.of_heads), (layer.mlp, layer.of_mlp)
                cut, w = heads if reader.role else mlp
                outputs = {part.module: record[part.module][1] for part, _ in reader.maps}
                assert cut is not None
                assert w is not None
                slopes |= _gradients(cut.value, outputs, w)
        rows = [_pulled(reader, record, slopes)[0] for reader in self.readers[:-1]]
        # Some models normalise the last position only.
        last = torch.zeros_like(rows[0])
        last[-1] = adjoints.of_last[0, -1]
        return torch.stack([*rows, last])

    def gradient_reads(
        self, runs: tuple[Pass, Pass], number: Callable[[Tensor], Tensor], points: Sequence[float]
    ) -> Float[Tensor, "readers time d_model"]:
        """Return the mean gradient by each reader's input at points between the embeddings."""
        first, second = runs
        shares = first.tokens.new_tensor(points)[:, None, None]
        tokens = second.tokens + shares * (first.tokens - second.tokens)
        at = Pass.of(self.model, first.ids.expand(len(tokens), -1), tokens)
        record: Record = {}
        with torch.enable_grad(), self.recording(record):
            given = (token_site(self.model), lambda x: x.requires_grad_())
            stream = at.changed([[given]])[0]
            value = number(stream)
        outputs = {
            part.module: record[part.module][1]
            for reader in self.readers[:-1]
            for part, _ in reader.maps
        }
        ones = torch.ones_like(value)
        slopes = _gradients(value, outputs, ones)
        (last,) = torch.autograd.grad(value, stream, ones, retain_graph=True)
        rows = [_pulled(reader, record, slopes).sum(0) for reader in self.readers[:-1]]
        return torch.stack([*rows, last.sum(0)]) / len(points)


def attributed_edges(graph: AttributedEdges, question: Question) -> dict[str, Tensor]:
    """Return the attribution of each edge for a question, (readers, parts), by each method."""
    model = graph.model
    (case,) = Cases.of(model, [question]).cases
    number, runs = case.score, case.alone
    with torch.no_grad():
        change = graph.outputs(runs[0]) - graph.outputs(runs[1])
        reads = {
            "contrastive flow": graph.flow_reads(question),
            "frozen flow (LRP)": graph.flow_reads(replace(question, against="")),
        }
    direct = torch.zeros_like(reads["frozen flow (LRP)"])
    direct[-1] = reads["frozen flow (LRP)"][-1]
    reads |= {name: graph.gradient_reads(runs, number, at) for name, at in GRADIENTS.items()}
    reads["direct logit attribution"] = direct
    return {name: graph.scores(change, rows).double() for name, rows in reads.items()}


def _gradients(
    value: Tensor, outputs: dict[nn.Module, Tensor], adjoint: Tensor
) -> dict[nn.Module, Tensor]:
    """Pull an adjoint back to the outputs of some modules."""
    inputs = [*outputs.values()]
    # With frozen patterns queries and keys have none.
    rows = torch.autograd.grad(value, inputs, adjoint, retain_graph=True, materialize_grads=True)
    return dict(zip(outputs, rows, strict=True))


def _pulled(
    reader: Any, record: Record, slopes: dict[nn.Module, Tensor]
) -> Float[Tensor, "runs time d_model"]:
    """Return what a reader reads of the stream, given the slopes at the outputs of its maps."""
    rows = []
    for part, of_reader in reader.maps:
        slope = _selected(slopes[part.module], part)[..., of_reader]
        rows.append(slope @ part.weight()[of_reader])
    total = torch.stack(rows).sum(0)
    if reader.part.norm is None:
        return total
    x, y = record[reader.part.norm.module]
    return torch.autograd.grad(y, x, total, retain_graph=True)[0]


def _selected(rows: Tensor, part: Any) -> Tensor:
    return rows if part.rows is None else rows[..., part.rows]
