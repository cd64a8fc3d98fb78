"""The nodes of a flow, collected layer by layer."""

from collections import defaultdict
from functools import partialmethod
from typing import Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn import functional

from bilens.read.flow.graph import Flow
from bilens.read.flow.nodes import Node, Rows
from bilens.read.language.names import shown_tokens
from bilens.residual import Moment, ResidualModel, Trace

Sublayer = Literal["attention", "mlp"]


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
