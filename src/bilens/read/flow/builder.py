"""Collects the nodes of a flow layer by layer."""

from collections import defaultdict

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn import functional

from bilens.read.flow.graph import Flow, Node, Rows
from bilens.residual import ResidualModel, Trace

__all__ = ["FlowBuilder"]

Part = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


class FlowBuilder:
    """A flow in the making; nodes come in from the logit downwards.

    Args:
        model: the model.
        trace: it on the text.
    """

    def __init__(self, model: ResidualModel, trace: Trace) -> None:
        self.model, self.trace = model, trace
        self.nodes: list[Node] = []
        self.constants: list[Tensor] = []
        self.vectors: list[Tensor] = []
        self.rows: dict[str, list[Part]] = {"reads": [], "writes": []}

    def add(
        self,
        nodes: list[Node],
        constants: Float[Tensor, " n"],
        vectors: Float[Tensor, "n n_in"] | None = None,
    ) -> Int[Tensor, " n"]:
        """Add nodes, with what biases of their own add in each; gives their numbers."""
        first = len(self.nodes)
        self.nodes += nodes
        self.constants.append(constants)
        if vectors is not None:
            missing = self.model.d_model + 1 - vectors.shape[1]
            self.vectors.append(functional.pad(vectors, (0, missing)))
        return torch.arange(first, len(self.nodes), device=constants.device)

    def read(
        self, nodes: Int[Tensor, " n"], position: Tensor, moment: int, vectors: Tensor
    ) -> None:
        """What nodes read at some positions."""
        self._row("reads", nodes, position, moment, vectors)

    def write(
        self, nodes: Int[Tensor, " n"], position: Tensor, moment: int, vectors: Tensor
    ) -> None:
        """What nodes write at some positions."""
        self._row("writes", nodes, position, moment, vectors)

    def add_biases(self, above: dict[int, Float[Tensor, "time d_model"]]) -> None:
        """The last nodes: what biases add, of each layer's attention, MLP, and the unembedding."""
        added: dict[tuple[int | None, str | None], float] = defaultdict(float)
        constants = torch.cat(self.constants).tolist()
        for node, constant in zip(self.nodes, constants, strict=True):
            if constant and node.kind not in ("token", "position"):
                added[node.layer, node.part] += constant
        outs = {}
        for layer in range(self.model.n_layers):
            bias = self.model.heads(layer).out_bias
            if bias.any():
                outs[layer] = self.trace.layers[layer].attn_out_scale[:, None] * bias
                through = (outs[layer] * above[3 * layer + 2]).sum()
                added[layer, "attention"] += float(through)
        for (layer, part), flow in added.items():
            number = self.add([Node("bias", flow, layer, part)], above[0].new_zeros(1))
            if part == "attention" and layer in outs:
                places = torch.arange(len(outs[layer]), device=number.device)
                self.write(number.expand(len(places)), places, 3 * layer + 2, outs[layer])

    def flow(self, u: Float[Tensor, " d_model"], value: float, frozen: tuple[str, ...]) -> Flow:
        """What was collected."""
        reads, writes = (
            Rows(*(torch.cat(part) for part in zip(*self.rows[name], strict=True)))
            for name in ("reads", "writes")
        )
        vectors = u.new_zeros(0, self.model.d_model + 1)
        return Flow(
            ids=self.trace.ids,
            position=len(self.trace.ids) - 1,
            direction=u,
            value=value,
            nodes=tuple(self.nodes),
            reads=reads,
            writes=writes,
            constants=torch.cat(self.constants),
            mixing=self._mixing(u),
            vectors=torch.cat([vectors, *self.vectors]),
            frozen=frozen,
        )

    def _row(
        self, name: str, nodes: Tensor, position: Tensor, moment: int, vectors: Tensor
    ) -> None:
        self.rows[name].append((nodes, position, torch.full_like(nodes, moment), vectors))

    def _mixing(self, like: Tensor) -> Float[Tensor, "moments moments"]:
        """1 where a read sees a write, times what the layers between them multiply the stream by."""
        found = like.new_ones(3 * self.model.n_layers + 1, 3 * self.model.n_layers + 1).tril()
        for layer in range(self.model.n_layers):
            mix = self.model.layer(layer).residual_mix
            if mix is not None:
                found[3 * layer + 1 :, : 3 * layer + 1] *= mix[0].detach().to(like)
        return found
