"""Effects of the nodes of a flow, measured in the running model."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Annotated

import pandas as pd
import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional

from bilens.analysis import Reading
from bilens.checks import checked
from bilens.errors import BilensError
from bilens.read.flow.graph import Flow
from bilens.read.flow.labels import Ends, last_normalised, sources, token_changes, token_words
from bilens.read.flow.nodes import Node
from bilens.read.linear.heads import FrozenHeads
from bilens.read.linear.mlp import LinearMLP
from bilens.residual import Moment, ResidualModel
from bilens.residual.interventions import (
    EMBEDDING,
    Change,
    Run,
    Site,
    adding,
    last_site,
    mixed_site,
    token_site,
    written_site,
)
from bilens.sections import Fact, signed
from bilens.settings import Between, NotNegative

FlowPart = int | tuple[int, int]
"""The number of a node, or numbers of the ends of an edge."""


@dataclass(frozen=True, repr=False)
class Ablation(Reading):
    """The change of a logit when a part of the model is removed, scaled or exchanged.

    Attributes:
        predicted: the change by the flow through the part.
        actual: the change when the model runs so; between two texts the mean of both directions.
        part: name of the part.
        kind: kind of the part, as nodes have it; edge for an edge.
        raises: next tokens that are more likely with the part than without it, the most first.
        lowers: next tokens that are less likely with it.
    """

    predicted: float
    actual: float
    part: str = ""
    kind: str = ""
    raises: tuple[str, ...] = ()
    lowers: tuple[str, ...] = ()

    def facts(self) -> list[Fact]:
        part = [("without", self.part)] if self.part else []
        return [*part, ("predicted", signed(self.predicted)), ("actual", signed(self.actual))]

    def frame(self) -> pd.DataFrame:
        """Return one row with the part and both changes."""
        row = (self.part, self.predicted, self.actual)
        return pd.DataFrame([row], columns=["without", "predicted", "actual"])


@torch.no_grad()
@checked
def measure(
    model: ResidualModel,
    flow: Flow,
    parts: Sequence[FlowPart],
    *,
    scale: NotNegative = 0.0,
    tokens: Annotated[int, Between(1)] = 4,
) -> list[Ablation]:
    """Run a model without each of some parts of a flow, or with their flow scaled.

    Everything after the part runs as the model does, so that norms, patterns and gates may change.
    On one text the change depends on the part:

    - a head: the entry of its pattern is scaled;
    - an MLP at its position, or a direction of it: its output;
    - a token or position: its vector;
    - an edge from b to a: the part of a's input that b writes, for a only.

    Between two texts the parts are nodes. A node's change is subtracted from the stream of the
    first text, and added to that of the second; the effect is the mean of both.

    Args:
        model: that of the flow.
        flow: on one text or between two.
        parts: numbers of nodes, or pairs of numbers (above, below) for edges.
        scale: factor of the flow of a node, or of the input along an edge.
        tokens: most tokens that a part is said to raise, and to lower.

    Raises:
        BilensError: a node or edge does not exist, or is the logit, a remainder or, on one text, a
            bias. Or an edge is asked for between two texts.
    """
    measured = _measurement(model, flow, scale)
    planned = [measured.plan(part) for part in parts]
    runs = measured.run([changes for _, changes in planned])
    results = []
    for part, (predicted, _), actual, (raised, lowered) in zip(
        parts, planned, _changes(flow, runs), token_changes(model, runs, tokens), strict=True
    ):
        words = (token_words(model, numbers, tokens) for numbers in (raised, lowered))
        results.append(Ablation(predicted, actual, *_name(flow, part), *words))
    return results


def named_by_measurement(model: ResidualModel, flow: Flow, strongest: int | list[int]) -> Flow:
    """Return a flow whose nodes have measured effects and names.

    Names are the tokens whose probability a node changes, and those at which its flow starts. Named
    are the strongest nodes, by their number, or nodes with some numbers.
    """
    numbers = strongest
    if isinstance(numbers, int):
        parts = [i for i in flow.strongest() if is_measurable(flow, flow.nodes[i])]
        numbers = parts[:numbers]
    if not numbers:
        return flow
    nodes = list(flow.nodes)
    effects = measure(model, flow, numbers)
    for number, effect, starts in zip(numbers, effects, sources(flow, numbers), strict=True):
        nodes[number] = replace(
            nodes[number],
            measured=-effect.actual,
            raises=effect.raises,
            lowers=effect.lowers,
            sources=starts,
        )
    return replace(flow, nodes=tuple(nodes))


@torch.no_grad()
@checked
def remove(model: ResidualModel, flow: Flow, numbers: Sequence[int]) -> Ablation:
    """Run the model without some nodes, all at once, as `measure` does without each of them.

    The predicted change is the flow that leaves the group: what its nodes send to each other counts
    once.

    Raises:
        BilensError: numbers is empty, or a node is the logit or a remainder, or does not exist.
    """
    numbers = sorted({*numbers})
    if not numbers:
        raise BilensError("numbers is empty, expected the numbers of nodes")
    measured = _measurement(model, flow, 0.0)
    together = [change for number in numbers for change in measured.plan(number)[1]]
    inside = float(flow.edges_between([numbers])[0, 0])
    predicted = inside - sum(flow.nodes[i].flow for i in numbers)
    names = [flow.nodes[i].name(flow.tokens) for i in numbers]
    (actual,) = _changes(flow, measured.run([together]))
    return Ablation(predicted, actual, " and ".join(names), "group")


def without_written(
    model: ResidualModel, flow: Flow, layer: int, written: Float[Tensor, "sets time d_model"]
) -> list[float]:
    """Measure the change of the logit without some of what an MLP writes, for each set of rows.

    `written` is a part of its output, or of its change, as the stream receives it.
    """
    # On one text it is removed; between two it is added to the second run, and taken off the first.
    scale = (-1 if flow.before is None else 1) / model.parts.layers[layer].mlp.residual_scale
    site = written_site(model, layer, "mlp")
    sets = [[Change(site, adding(scale * x))] for x in written]
    return _changes(flow, _measurement(model, flow, 0.0).run(sets))


def _changes(flow: Flow, runs: Sequence[Ends]) -> list[float]:
    """Return the change of the logit without each part, the mean over the ways of measuring it."""
    changes = [(ends.absent - ends.present) @ flow.direction for ends in runs]
    return torch.stack(changes).double().mean(0).tolist()


def is_measurable(flow: Flow, node: Node) -> bool:
    """Return whether a node is one part of the model, whose effect `measure` returns."""
    return node.is_removable if flow.before is None else node.is_part


def _measurement(model: ResidualModel, flow: Flow, scale: float) -> "_Removals | _Exchanges":
    return (_Removals if flow.before is None else _Exchanges)(model, flow, scale)


def _name(flow: Flow, part: FlowPart) -> tuple[str, str]:
    """Return the name of a part, and its kind."""
    if isinstance(part, tuple):
        above, below = (flow.node(number).name(flow.tokens) for number in part)
        return f"edge from {below} to {above}", "edge"
    node = flow.node(part)
    return node.name(flow.tokens), node.kind


class _Exchanges:
    """Exchanges of the changes of nodes between the two texts of a flow.

    The changes of a set are those of the second run; the first has the opposite.
    """

    def __init__(self, model: ResidualModel, flow: Flow, scale: float) -> None:
        self.model, self.flow, self.less = model, flow, 1 - scale
        tokens, writes = model.parts.embed.rows(flow.ids), flow.writes
        # The embeddings of both runs differ by the writes of the token nodes.
        of_tokens = torch.tensor([node.kind == "token" for node in flow.nodes])
        start = of_tokens.to(writes.node.device)[writes.node] & (writes.moment == 0)
        change = torch.zeros_like(tokens)
        change.index_add_(0, writes.position[start], writes.vector[start])
        self.runs = [Run.of(model, flow.ids, rows) for rows in (tokens, tokens - change)]

    def plan(self, part: FlowPart) -> tuple[float, list[Change]]:
        """Return the predicted change and the changes of the second run for a node."""
        if not isinstance(part, int):
            raise BilensError(
                f"{_name(self.flow, part)[0]} between two texts; expected the number of a node"
            )
        node = self.flow.node(part)
        if not node.is_part:
            raise BilensError(f"number={part} is {node.kind}, expected one part of the model")
        writes = self.flow.writes
        of_node = writes.node == part
        if node.layer is None or node.part is None:
            site, scale = token_site(self.model), 1.0
            of_node &= writes.moment == 0
        else:
            site = written_site(self.model, node.layer, node.part)
            scale = self.model.parts.layers[node.layer].mlp.residual_scale
        rows = torch.zeros_like(self.flow.trace.stream)
        rows.index_add_(0, writes.position[of_node], writes.vector[of_node])
        return -self.less * node.flow, [Change(site, adding(self.less / scale * rows))]

    def run(self, sets: Sequence[Sequence[Change]]) -> list[Ends]:
        """Return both texts' last streams with the part of each set of changes and without it."""
        opposite = [[*map(_opposite, changes)] for changes in sets]
        first, second = (
            last_normalised(self.model, run.again([[], *of_run]))
            for run, of_run in zip(self.runs, (opposite, sets), strict=True)
        )
        return [Ends(first[:1], first[1:]), Ends(second[1:], second[:1])]


class _Removals:
    """Removals of parts of a flow of one text."""

    def __init__(self, model: ResidualModel, flow: Flow, scale: float) -> None:
        self.model, self.flow, self.scale = model, flow, scale
        self.heads: dict[int, FrozenHeads] = {}

    def plan(self, part: FlowPart) -> tuple[float, list[Change]]:
        """Return the predicted change and the changes of a run for a part."""
        return self._edge(*part) if isinstance(part, tuple) else self._node(part)

    def _node(self, number: int) -> tuple[float, list[Change]]:
        node = self.flow.node(number)
        predicted = (self.scale - 1) * node.flow
        match node.kind:
            case "head":
                return predicted, self._head(node, self.scale * self._value(node))
            case "mlp" | "direction":
                return predicted, self._written(number, self.scale)
            case "token" | "position":
                return predicted, self._scaled(node)
        raise BilensError(
            f"number={number} is {node.kind}, which is not one part of the model to remove; "
            "expected a token, position, head, MLP or direction"
        )

    def _edge(self, above: int, below: int) -> tuple[float, list[Change]]:
        a, b = self.flow.node(above), self.flow.node(below)
        through = float(self.flow.edges([above, below])[0, 1])
        if b.kind == "bias" or above >= below:
            raise BilensError(
                f"edge=({above}, {below}), expected a node and one below it that is not a bias"
            )
        predicted, layer = (self.scale - 1) * through, a.layer or 0
        if a.kind == "mlp":
            mlp = LinearMLP.frozen(self.model, self.flow.trace, layer)
            arriving = mlp.norm.push(self._arriving(below, self.model.parts.mlp_moment(layer)))
            rows = mlp.write(functional.pad(arriving, (0, int(mlp.constant))))
            return predicted, self._added(a, (self.scale - 1) * rows)
        if a.kind == "direction":
            # The direction's output is linear in its input, with everything frozen.
            return predicted, self._written(above, 1 + predicted / a.flow)
        if a.kind == "output":
            less = (1 - self.scale) * self._arriving(below, Moment.mlp(self.model.n_layers - 1))
            only_last = torch.zeros_like(less)
            only_last[-1] = -less[-1]
            return predicted, [Change(last_site(self.model), adding(only_last))]
        if a.kind == "head" and "patterns of attention" in self.flow.frozen:
            value = self._value(a)
            for part in self._heads(layer).sources:
                n = part.stream.push(self._arriving(below, part.moment))[a.source]
                less = part.weight[a.number] @ n
                value = value - (1 - self.scale) * less
            return predicted, self._head(a, value)
        raise BilensError(
            f"edge=({above}, {below}) ends in a node of kind {a.kind}; expected the logit, a "
            "direction, or a head whose patterns are held fixed"
        )

    def run(self, sets: Sequence[Sequence[Change]]) -> list[Ends]:
        """Return the last streams with all parts, and without those of each set."""
        n = last_normalised(self.model, Run.of(self.model, self.flow.ids).again([[], *sets]))
        return [Ends(n[:1], n[1:])]

    def _heads(self, layer: int) -> FrozenHeads:
        if layer not in self.heads:
            self.heads[layer] = FrozenHeads(self.model, self.flow.trace, layer)
        return self.heads[layer]

    def _value(self, node: Node) -> Tensor:
        return self._heads(node.layer or 0).values[node.number or 0, node.source]

    def _head(self, node: Node, value: Tensor) -> list[Change]:
        """Let a head take another value from one position to one."""
        layer, number = node.layer or 0, node.number or 0
        start = number * len(value)
        weight = self.flow.trace.layers[layer].pattern[number, node.position, node.source]
        rows = torch.zeros(len(self.flow.ids), self.model.n_heads * len(value)).to(value)
        rows[node.position, start : start + len(value)] = weight * (value - self._value(node))
        return [Change(mixed_site(self.model, layer), adding(rows))]

    def _written(self, number: int, scale: float) -> list[Change]:
        """Scale the output of a direction at its position."""
        node = self.flow.node(number)
        rows = self._arriving(number, Moment.mlp(node.layer or 0))
        return self._added(node, (scale - 1) * rows)

    def _added(self, node: Node, rows: Tensor) -> list[Change]:
        """Add to the output of an MLP at the position of a node."""
        layer, only = node.layer or 0, torch.zeros_like(rows)
        only[node.position] = rows[node.position]
        rows = only / self.model.parts.layers[layer].mlp.residual_scale
        return [Change(written_site(self.model, layer, "mlp"), adding(rows))]

    def _scaled(self, node: Node) -> list[Change]:
        position, scale, positions = node.position, self.scale, self.model.parts.positions

        def scaled(x: Tensor) -> Tensor:
            x = x.clone()
            x[position] *= scale
            return x

        if node.kind == "token" or positions is None:
            return [Change(token_site(self.model), scaled)]
        return [Change(Site(positions.module, False, EMBEDDING), scaled)]

    def _arriving(self, number: int, moment: int) -> Tensor:
        """Return the output of a node in the stream of a moment, at each position."""
        writes = self.flow.writes
        of_node = writes.node == number
        shares = self.flow.mixing[moment, writes.moment[of_node], None]
        x = torch.zeros_like(self.flow.trace.stream)
        return x.index_add(0, writes.position[of_node], shares * writes.vector[of_node])


def _opposite(change: Change) -> Change:
    return Change(change.site, lambda x: 2 * x - change.function(x))
