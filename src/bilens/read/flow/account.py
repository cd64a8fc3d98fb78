"""Three numbers of every node of a flow: its flow, its effect by gradients, its measured effect."""

from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import Annotated, Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from bilens.checks import full_precision
from bilens.errors import BilensError
from bilens.read.flow.ablation import Ablation, ablate, ablated_together, writer_of
from bilens.read.flow.contrast import embedded
from bilens.read.flow.graph import Flow
from bilens.read.flow.nodes import Node
from bilens.read.flow.patching import Number, StoredRun, last_stream, stored_run
from bilens.residual import Moment, ResidualModel
from bilens.settings import Between, Count

EMBEDDED = ("token", "position")
POINTS, TOKENS = 8, 512
"""Points between two texts at which gradients are taken, and tokens of those in one batch."""


@torch.no_grad()
@full_precision
def account(model: ResidualModel, flow: Flow, *, measured: Annotated[int, Between(0)] = 0) -> Flow:
    """Return a flow whose nodes have their effects by gradients, and the strongest measured ones.

    Args:
        model: the model of the flow.
        flow: the flow.
        measured: number of nodes with the largest |flow| whose effect is measured.

    Raises:
        BilensError: the model is not that of the flow.
    """
    strongest = sorted(range(len(flow.nodes)), key=lambda i: -abs(flow.nodes[i].flow))
    numbers = [i for i in strongest if is_measurable(flow, flow.nodes[i])][:measured]
    effects = dict(zip(numbers, measure(model, flow, numbers), strict=True))
    slopes = estimates(model, flow).tolist()
    nodes = [
        replace(node, estimated=slope, measured=-effects[i].actual if i in effects else None)
        for i, (node, slope) in enumerate(zip(flow.nodes, slopes, strict=True))
    ]
    return replace(flow, nodes=tuple(nodes))


def is_measurable(flow: Flow, node: Node) -> bool:
    """Return whether a node is one part of the model, whose effect `measure` returns."""
    return node.is_removable if flow.before is None else node.kind not in ("output", "rest")


@torch.no_grad()
@full_precision
def measure(
    model: ResidualModel, flow: Flow, numbers: Sequence[int], *, batch_size: Count = 16
) -> list[Ablation]:
    """Run the model without each of some nodes.

    On one text this is `ablate`. Between two texts the node's change is subtracted from the stream
    of the first text, and added to that of the second. The effect is the mean of both.
    Everything after the node runs as the model does.

    Args:
        model: the model of the flow.
        flow: the flow.
        numbers: numbers of the nodes.
        batch_size: nodes at once, each a text of its own.

    Raises:
        BilensError: a node is the logit or a remainder, or does not exist.
    """
    _check_measurable(flow, numbers)
    if flow.before is None:
        return ablate(model, flow, list(numbers), batch_size=batch_size)
    return _Patcher(model, flow, batch_size).effects(numbers)


@torch.no_grad()
@full_precision
def remove(model: ResidualModel, flow: Flow, numbers: Sequence[int]) -> Ablation:
    """Run the model without some nodes, all at once, as `measure` does without each of them.

    The predicted change is the flow that leaves the group: what its nodes send to each other counts
    once.

    Args:
        model: the model of the flow.
        flow: the flow.
        numbers: numbers of the nodes.

    Raises:
        BilensError: numbers is empty, or a node is the logit or a remainder, or does not exist.
    """
    numbers = sorted({*numbers})
    if not numbers:
        raise BilensError("numbers is empty, expected the numbers of nodes")
    _check_measurable(flow, numbers)
    inside = float(flow.edges_between([numbers])[0, 0])
    predicted = inside - sum(flow.nodes[i].flow for i in numbers)
    if flow.before is None:
        actual = ablated_together(model, flow, numbers)
    else:
        actual = _Patcher(model, flow, 1).together(numbers)
    names = [flow.nodes[i].name(flow.tokens) for i in numbers]
    return Ablation(predicted, actual, " and ".join(names), "group")


@full_precision
def estimates(model: ResidualModel, flow: Flow) -> Float[Tensor, " nodes"]:
    """Return each node's effect by gradients of the logit times its output.

    On one text this is the effect to first order. Between two texts the gradient is the mean of
    those at 8 points between the embeddings (integrated gradients). The estimates of nodes on
    one path do not add up to the logit. Those of the logit itself and of remainders are theirs too.
    """
    number, tokens = _number(model, flow), _tokens(model, flow)[None]
    if flow.before is not None:
        first, second = _both(model, flow)
        shares = (torch.arange(POINTS).to(first) + 0.5) / POINTS
        tokens = second + shares[:, None, None] * (first - second)
    at_once = max(1, TOKENS // tokens.shape[1])
    parts = [_slopes(model, flow, part, number) for part in tokens.split(at_once)]
    mean = torch.stack(parts).sum(0) / len(tokens)
    writes = flow.writes
    # The gradient by a write holds everything that later layers make of it. That by the embedding
    # also holds later moments at which it is mixed in again, whose rows must not count twice.
    embedding = torch.tensor([node.kind in EMBEDDED for node in flow.nodes])
    again = embedding.to(writes.node.device)[writes.node] & (writes.moment > 0)
    along = (mean[writes.moment, writes.position] * writes.vector).sum(-1).masked_fill(again, 0)
    result = along.new_zeros(len(flow.nodes)).index_add(0, writes.node, along)
    result[0] = flow.value
    return result


def _check_measurable(flow: Flow, numbers: Sequence[int]) -> None:
    for number in numbers:
        node = flow.node(number)
        if not is_measurable(flow, node):
            raise BilensError(f"number={number} is {node.kind}, expected one part of the model")


def _number(model: ResidualModel, flow: Flow) -> Number:
    return lambda x: model.parts.normalised(x.to(flow.direction)) @ flow.direction


def _tokens(model: ResidualModel, flow: Flow) -> Float[Tensor, "time d_model"]:
    return model.parts.embed.rows(flow.ids)


def _both(model: ResidualModel, flow: Flow) -> tuple[Tensor, Tensor]:
    """Return the token embeddings of both runs, which differ by the writes of the token nodes."""
    tokens, writes = _tokens(model, flow), flow.writes
    of_tokens = torch.tensor([node.kind == "token" for node in flow.nodes])
    start = of_tokens.to(writes.node.device)[writes.node] & (writes.moment == 0)
    change = torch.zeros_like(tokens)
    change.index_add_(0, writes.position[start], writes.vector[start])
    return tokens, tokens - change


def _slopes(
    model: ResidualModel, flow: Flow, tokens: Float[Tensor, "runs time d_model"], number: Number
) -> Float[Tensor, "moments time d_model"]:
    """Return the gradients by the writes at each moment and position, summed over some runs."""
    outputs: list[tuple[Moment, Tensor]] = []
    with torch.enable_grad(), ExitStack() as stack:
        given = tokens.detach().clone().requires_grad_()
        stack.enter_context(embedded(model, given))
        for number_of_layer, layer in enumerate(model.parts.layers):
            for moment, part in (
                (Moment.attention(number_of_layer), layer.heads),
                (Moment.mlp(number_of_layer), layer.mlp),
            ):

                def keep(_: Any, __: Any, y: Tensor, moment: Moment = moment) -> None:
                    outputs.append((moment, y))

                stack.enter_context(writer_of(part).register_forward_hook(keep))
        value = number(last_stream(model, flow.ids.expand(len(tokens), -1))).sum()
        slopes = torch.autograd.grad(value, [given, *(y for _, y in outputs)])
    result = tokens.new_zeros(Moment.count(model.n_layers), *tokens.shape[1:])
    result[Moment.embedding()] = slopes[0].sum(0)
    for (moment, _), slope in zip(outputs, slopes[1:], strict=True):
        # The stream receives the module's output times the factor of all writes.
        result[moment] = slope.sum(0) / model.parts.layers[0].mlp.residual_scale
    return result


def exchanged(
    runs: Sequence[StoredRun],
    number: Number,
    layer: int,
    part: str,
    rows: Float[Tensor, "batch time d_model"],
) -> Float[Tensor, " batch"]:
    """Return effects of exchanging changes of a part's output between two runs.

    Rows are subtracted from the output in the first run and added to it in the second. An effect is
    the mean of the number's fall in the first and rise in the second.

    Args:
        runs: both runs.
        number: the number.
        layer: number of the layer.
        part: attention or mlp.
        rows: changes of the part's output in the stream, one run each.
    """
    of_layer = runs[0].model.parts.layers[layer]
    writer = writer_of(of_layer.heads if part == "attention" else of_layer.mlp)
    rows = rows / of_layer.mlp.residual_scale

    def changed(run: int, sign: int) -> Tensor:
        hook = (writer, False, partial(_add_rows, sign * rows))
        return number(runs[run].run_from(layer, len(rows), [hook]))

    return _mean_effect(changed, [float(number(run.stream[None])[0]) for run in runs])


def _mean_effect(
    changed: Callable[[int, int], Float[Tensor, " batch"]], ends: Sequence[float]
) -> Float[Tensor, " batch"]:
    """Return the mean of a number's fall in the first run and its rise in the second.

    Args:
        changed: the number when a change is added with a sign, given the run and the sign.
        ends: the number in both runs.
    """
    fall, rise = (changed(run, sign).double().cpu() for run, sign in ((0, -1), (1, 1)))
    return (rise - ends[1] - (fall - ends[0])) / 2


class _Patcher:
    """Runs of both texts in which the writes of nodes are exchanged."""

    def __init__(self, model: ResidualModel, flow: Flow, batch_size: int) -> None:
        self.model, self.flow, self.batch_size = model, flow, batch_size
        self.number = _number(model, flow)
        self.tokens = _both(model, flow)
        self.runs = [stored_run(model, flow.ids, tokens) for tokens in self.tokens]
        self.ends = [float(self.number(run.stream[None])[0]) for run in self.runs]

    def effects(self, numbers: Sequence[int]) -> list[Ablation]:
        """Return the predicted and the actual fall of the logit, the mean of both directions."""
        actual: dict[int, float] = {}
        for (layer, part), group in self._by_place(numbers).items():
            for start in range(0, len(group), self.batch_size):
                batch = group[start : start + self.batch_size]
                rows = self._rows(batch, start_only=layer is None)
                if layer is None or part is None:
                    effects = self._embedded(rows)
                else:
                    effects = exchanged(self.runs, self.number, layer, part, rows)
                actual |= dict(zip(batch, (-effects).tolist(), strict=True))
        return [
            Ablation(-node.flow, actual[i], node.name(self.flow.tokens), node.kind)
            for i, node in ((i, self.flow.nodes[i]) for i in numbers)
        ]

    def together(self, numbers: Sequence[int]) -> float:
        """Return the change of the logit, the mean of both directions, without all the nodes."""

        def changed(run: int, sign: int) -> Tensor:
            with ExitStack() as stack:
                tokens = self.tokens[run]
                for (layer, part), group in self._by_place(numbers).items():
                    rows = sign * self._rows(group, start_only=layer is None).sum(0)
                    if layer is None:
                        tokens = tokens + rows
                    else:
                        scale = self.model.parts.layers[layer].mlp.residual_scale
                        hook = partial(_add_rows, rows / scale)
                        stack.enter_context(self._writer(layer, part).register_forward_hook(hook))
                stack.enter_context(embedded(self.model, tokens))
                return self.number(last_stream(self.model, self.flow.ids[None]))

        return -float(_mean_effect(changed, self.ends))

    def _by_place(self, numbers: Sequence[int]) -> dict[tuple[int | None, str | None], list[int]]:
        """Return the nodes of each part of each layer."""
        places: dict[tuple[int | None, str | None], list[int]] = defaultdict(list)
        for i in numbers:
            node = self.flow.nodes[i]
            places[node.layer, node.part].append(i)
        return places

    def _writer(self, layer: int, part: str | None) -> nn.Module:
        of_layer = self.model.parts.layers[layer]
        return writer_of(of_layer.heads if part == "attention" else of_layer.mlp)

    def _rows(self, batch: Sequence[int], start_only: bool) -> Float[Tensor, "batch time d_model"]:
        writes = self.flow.writes
        rows = self.tokens[0].new_zeros(len(batch), *self.tokens[0].shape)
        for place, number in enumerate(batch):
            of_node = writes.node == number
            if start_only:
                of_node &= writes.moment == 0
            rows[place].index_add_(0, writes.position[of_node], writes.vector[of_node])
        return rows

    def _embedded(self, rows: Float[Tensor, "batch time d_model"]) -> Float[Tensor, " batch"]:
        """Return effects of exchanging changes of the embeddings, as `exchanged` does."""

        def changed(run: int, sign: int) -> Tensor:
            with embedded(self.model, self.tokens[run] + sign * rows):
                return self.number(last_stream(self.model, self.flow.ids.expand(len(rows), -1)))

        return _mean_effect(changed, self.ends)


def _add_rows(rows: Tensor, _: nn.Module, __: Any, y: Tensor) -> Tensor:
    return y + rows.to(y)
