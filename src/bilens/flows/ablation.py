"""Effects of the nodes of a flow, measured in the running model."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float
from torch import Tensor

from bilens.analysis import Reading
from bilens.checks import detached
from bilens.errors import BilensError
from bilens.flows.fitted import Score
from bilens.flows.graph import Flow
from bilens.flows.nodes import WRITING, Node
from bilens.sections import Columns, Fact, signed
from bilens.transformer import ResidualModel
from bilens.transformer.exchange import exchange_parts
from bilens.transformer.parts import Part
from bilens.transformer.passes import Pass

Runs = tuple[Float[Tensor, "_ time d_model"], Float[Tensor, "_ time d_model"]]
"""Streams after the last layer, in passes with a part and in passes without it.

Each is a row of each part, or one row for all of them.
"""


@dataclass(frozen=True, repr=False)
class Ablation(Reading):
    """The change of a logit when a part of the model is removed or exchanged.

    Attributes:
        predicted: the change by the flow through the part.
        actual: the change when the model runs so, the mean of both directions.
        part: name of the part.
        kind: kind of the part, as nodes have it.
    """

    predicted: float
    actual: float
    part: str = ""
    kind: str = ""

    def facts(self) -> list[Fact]:
        part = [("without", self.part)] if self.part else []
        return [*part, ("predicted", signed(self.predicted)), ("actual", signed(self.actual))]

    def columns(self) -> Columns:
        """Return one row with the part and both changes."""
        return {"without": [self.part], "predicted": [self.predicted], "actual": [self.actual]}


@detached
def measure(model: ResidualModel, flow: Flow, nodes: Sequence[Node]) -> list[Ablation]:
    """Run a model without each of some nodes of a flow.

    Everything after a node runs as the model does, so that norms, patterns and gates may change.
    Each text has the node's output of the other one: what a head moves from one position to
    another, the output of an MLP at its position, or the vector of a token. The effect is the mean
    of both.

    Args:
        model: that of the flow.
        flow: its flow.
        nodes: nodes of the flow.

    Raises:
        BilensError: a node is the logit or a choice.
    """
    groups = [[part] for part in _parts(flow, nodes)]
    effects = _changes(Score(model, flow.fitted), run_without(model, flow, groups))
    return [
        Ablation(-node.flow, actual, flow.name(node), node.kind)
        for node, actual in zip(nodes, effects, strict=True)
    ]


def measurable(flow: Flow) -> list[Node]:
    """Return the nodes of a flow that can be exchanged in any run of the model."""
    if flow.changes_stream or any(flow.fitted.starts):
        return []
    return [node for node in flow.nodes if node.kind in WRITING]


def with_effects(model: ResidualModel, flow: Flow, count: int) -> Flow:
    """Return a flow whose strongest nodes have measured effects."""
    nodes = measurable(flow)[:count]
    if not nodes:
        return flow
    effects = measure(model, flow, nodes)
    updates = {
        node.place: replace(node, measured=-effect.actual)
        for node, effect in zip(nodes, effects, strict=True)
    }
    nodes_at = {node.place: node for node in flow.named}
    return replace(flow, named=tuple((nodes_at | updates).values()))


@detached
def remove(model: ResidualModel, flow: Flow, nodes: Sequence[Node]) -> Ablation:
    """Run the model without some nodes, all at once in one run, as `measure` does without each.

    A node is not changed a second time by those before it: whatever they do to it, it has its
    output of the other text. The predicted change is the flow that leaves the
    group: what its nodes send to each other counts once.

    Raises:
        BilensError: nodes is empty, or a node is the logit.
    """
    nodes = list({node.place: node for node in nodes}.values())
    if not nodes:
        raise BilensError("nodes is empty, expected nodes of the flow")
    actual = without_parts(model, flow, _parts(flow, nodes))
    inside = float(flow.edges(nodes).sum())
    prediction = inside - sum(node.flow for node in nodes)
    names = [flow.name(node) for node in nodes]
    return Ablation(prediction, actual, " and ".join(names), "group")


@torch.no_grad()
def without_parts(model: ResidualModel, flow: Flow, parts: Sequence[Part]) -> float:
    """Return the change of the number without some parts, all at once in one run; see `remove`."""
    runs = run_without(model, flow, [parts])
    (change,) = _changes(Score(model, flow.fitted), runs)
    return change


def _changes(score: Score, runs: Sequence[Runs]) -> list[float]:
    """Return the change of the number without each part, the mean over the ways of measuring it."""
    changes = [score(absent) - score(present) for present, absent in runs]
    return torch.stack(changes).cpu().double().mean(0).tolist()


def run_without(model: ResidualModel, flow: Flow, groups: Sequence[Sequence[Part]]) -> list[Runs]:
    """Return both texts' last streams with all parts, and without those of each group.

    Each text has the values of the other one for them.
    """
    texts = _both_texts(model, flow)
    streams, own = exchange_parts(texts, texts.some([1, 0]), groups), texts.stream[:, None]
    return [(own[0], streams[:, 0]), (streams[:, 1], own[1])]


def _both_texts(model: ResidualModel, flow: Flow) -> Pass:
    """Return the pass of both texts of a flow side by side."""
    flow.check_model(model)
    if any(flow.fitted.starts):
        raise BilensError(
            "the texts of the flow have unlike numbers of tokens, expected equally many, whose "
            "parts can be exchanged one by one; patch and circuit take such texts"
        )
    ids = torch.stack(flow.fitted.rows)
    rows = model.places.rows(ids)
    if flow.fitted.embeddings is not None:
        rows[1] = flow.fitted.embeddings
    return Pass.of(model, ids, rows, parts=True)


def _parts(flow: Flow, nodes: Sequence[Node]) -> list[Part]:
    """Return the parts of the model that nodes are, and that can be removed."""
    flow.check_nodes(nodes)
    for node in nodes:
        if not node.is_removable:
            raise BilensError(
                f"{node.address} is no part that can be removed; expected heads, MLPs, experts or "
                "tokens"
            )
    return [node.where for node in nodes]
