"""Effects of the nodes of a flow, measured in the running model."""

from collections import defaultdict
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Annotated

import pandas as pd
import torch
from jaxtyping import Float
from torch import Tensor

from bilens.analysis import Reading
from bilens.checks import checked
from bilens.errors import BilensError
from bilens.read.flow.case import both_passes
from bilens.read.flow.graph import Flow
from bilens.read.flow.labels import Ends, sources, token_changes, token_words
from bilens.read.flow.nodes import Node
from bilens.read.flow.question import Score
from bilens.residual import ResidualModel
from bilens.residual.changes import (
    EMBEDDING,
    Change,
    Part,
    Site,
    adding,
    mixed_site,
    mlp_site,
    token_site,
)
from bilens.residual.choices import taking
from bilens.residual.exchanges import exchanged
from bilens.residual.passes import Pass
from bilens.sections import Fact, signed
from bilens.settings import Between, NotNegative


@dataclass(frozen=True, repr=False)
class Ablation(Reading):
    """The change of a logit when a part of the model is removed, scaled or exchanged.

    Attributes:
        predicted: the change by the flow through the part.
        actual: the change when the model runs so; between two texts the mean of both directions.
        part: name of the part.
        kind: kind of the part, as nodes have it.
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
    nodes: Sequence[Node],
    *,
    scale: NotNegative = 0.0,
    tokens: Annotated[int, Between(1)] = 4,
) -> list[Ablation]:
    """Run a model without each of some nodes of a flow, or with their output scaled.

    Everything after a node runs as the model does, so that norms, patterns and gates may change. On
    one text the output of a node is removed: what a head moves from one position to another, the
    output of an MLP at its position, or the vector of a token or position. Between two texts the
    change of the output is subtracted in the run of the first text, and added in that of the
    second; the effect is the mean of both. A choice, such as that of experts, is exchanged: each
    text has the choice of the other one.

    Args:
        model: that of the flow.
        flow: on one text or between two.
        nodes: nodes of the flow.
        scale: factor of the output, or of its change.
        tokens: most tokens that a part is said to raise, and to lower.

    Raises:
        BilensError: a node is the logit or a bias, or a choice is scaled.
    """
    if scale and any(node.kind == "choice" for node in nodes):
        raise BilensError(f"scale={scale} of a choice, which is exchanged as a whole; leave it out")
    changes = [
        (site, None if rows is None else (1 - scale) * rows)
        for site, rows in _outputs(model, flow, nodes)
    ]
    runs = _run_without(model, flow, [[each] for each in changes])
    results = []
    for node, actual, (raised, lowered) in zip(
        nodes, _changes(model, flow, runs), token_changes(model, runs, tokens), strict=True
    ):
        words = (token_words(model, numbers, tokens) for numbers in (raised, lowered))
        predicted = (scale - 1) * node.flow
        results.append(Ablation(predicted, actual, node.name(flow.tokens), node.kind, *words))
    return results


def measurable(model: ResidualModel, flow: Flow) -> list[Node]:
    """Return the nodes of a flow that can be removed from any run of the model."""
    # The vectors of positions are a module of their own in known families only.
    known = model.places.parts is not None
    kinds = {"head", "mlp", "token", *(["position"] if known else [])}
    return [node for node in flow.nodes if node.kind in kinds]


def named_by_measurement(model: ResidualModel, flow: Flow, nodes: Sequence[Node]) -> Flow:
    """Return a flow in which some nodes have measured effects and names.

    Names are the tokens whose probability a node changes, and those at which its flow starts.
    """
    if not nodes:
        return flow
    named = []
    effects = measure(model, flow, nodes)
    for node, effect, starts in zip(nodes, effects, sources(flow, nodes), strict=True):
        named.append(
            replace(
                node,
                measured=-effect.actual,
                raises=effect.raises,
                lowers=effect.lowers,
                sources=starts,
            )
        )
    return replace(flow, named=(*flow.named, *named))


@torch.no_grad()
@checked
def remove(model: ResidualModel, flow: Flow, nodes: Sequence[Node]) -> Ablation:
    """Run the model without some nodes, all at once, as `measure` does without each of them.

    The predicted change is the flow that leaves the group: what its nodes send to each other counts
    once.

    Raises:
        BilensError: nodes is empty, or a node is the logit or a bias.
    """
    nodes = list({node.place: node for node in nodes}.values())
    if not nodes:
        raise BilensError("nodes is empty, expected nodes of the flow")
    inside = float(flow.edges(nodes).sum())
    predicted = inside - sum(node.flow for node in nodes)
    names = [node.name(flow.tokens) for node in nodes]
    runs = _run_without(model, flow, [_outputs(model, flow, nodes)])
    (actual,) = _changes(model, flow, runs)
    return Ablation(predicted, actual, " and ".join(names), "group")


@torch.no_grad()
def without_parts(model: ResidualModel, flow: Flow, parts: Collection[Part]) -> float:
    """Return the change of the number without heads and MLPs, all at once, at their positions.

    Their output is removed, a head's from all sources. Between two texts each has its value of the
    other text; the change is the mean of both directions.
    """
    kept = min(part.position or 0 for part in parts)

    def changed(start: Pass, other: Pass, scale: float) -> Tensor:
        changes = [exchanged(part, other, scale) for part in parts]
        return start.changed([changes], kept=kept)[:, 0, -1]

    if flow.two_texts:
        first, second = both_passes(model, [flow.question.both_texts(model)])
        ends = [
            (first.stream[:, -1], changed(first, second, 1)),
            (changed(second, first, 1), second.stream[:, -1]),
        ]
    else:
        alone = Pass.of(model, flow.ids[None])
        ends = [(alone.stream[:, -1], changed(alone, alone, 0))]
    return _changes(model, flow, ends)[0]


def _changes(model: ResidualModel, flow: Flow, runs: Sequence[Ends]) -> list[float]:
    """Return the change of the number without each part, the mean over the ways of measuring it."""
    score = Score(model, flow.question)
    changes = [score(absent) - score(present) for present, absent in runs]
    return torch.stack(changes).double().mean(0).tolist()


def without_output(
    model: ResidualModel, flow: Flow, node: Node, outputs: Float[Tensor, "sets width"]
) -> list[float]:
    """Return the change of the number without some parts of a node's output, or of its change."""
    groups = [[_rows(model, flow, node, output)] for output in outputs]
    return _changes(model, flow, _run_without(model, flow, groups))


Rows = tuple[Site, Tensor | None]
"""A place in the model, and what is taken from it at each position; None of a choice."""


def _run_without(model: ResidualModel, flow: Flow, groups: Sequence[Sequence[Rows]]) -> list[Ends]:
    """Return both texts' last streams with all parts, and without those of each group.

    In the run of the second text the changes of parts are added in place of being removed.
    """
    if not flow.two_texts:
        alone = Pass.of(model, flow.ids[None])
        return [_with_changes(alone, alone, groups, -1)]
    first, second = both_passes(model, [flow.question.both_texts(model)])
    absent, present = _with_changes(second, first, groups, 1)
    return [_with_changes(first, second, groups, -1), (present, absent)]


def _with_changes(
    start: Pass, other: Pass, groups: Sequence[Sequence[Rows]], sign: int
) -> tuple[Float[Tensor, "1 d_model"], Float[Tensor, "groups d_model"]]:
    """Return the end of a pass, and the ends of passes with the changes of each group."""
    # Positions before the first change stay as they are.
    by_first: dict[int, list[int]] = defaultdict(list)
    for number, group in enumerate(groups):
        firsts = [0 if rows is None else int(rows.any(-1).int().argmax()) for _, rows in group]
        by_first[min(firsts)].append(number)

    def change(site: Site, rows: Tensor | None) -> Change:
        if rows is not None:
            return site, adding(sign * rows)
        return site, taking(other.choices(site.layer), len(other.ids))

    ends = start.stream[:, -1].repeat(len(groups), 1)
    for first, numbers in by_first.items():
        sets = []
        for number in numbers:
            sets.append([change(*each) for each in groups[number]])
        ends[numbers] = start.changed(sets, kept=first)[:, 0, -1]
    return start.stream[:, -1], ends


def _outputs(model: ResidualModel, flow: Flow, nodes: Sequence[Node]) -> list[Rows]:
    """Return the output of each node in rows of all positions, with its place in the model."""
    for node in nodes:
        if not node.is_removable or (node.kind == "choice" and not flow.two_texts):
            raise BilensError(
                f"{node.name(flow.tokens)} is no part that can be removed; expected heads, MLPs, "
                "tokens, positions, or choices between two texts"
            )
    written = iter(flow.written([node for node in nodes if node.kind != "choice"]))
    outputs: list[Rows] = []
    for node in nodes:
        if node.kind == "choice":
            layer = node.layer or 0
            site = Site(model.places.layers[layer].module, "choice", layer)
            outputs.append((site, None))
        else:
            outputs.append(_rows(model, flow, node, next(written)))
    return outputs


def _rows(model: ResidualModel, flow: Flow, node: Node, output: Tensor) -> Rows:
    layer, columns, width = node.layer or 0, slice(None), len(output)
    match node.kind:
        case "head":
            site, number = mixed_site(model, layer), node.number or 0
            columns = slice(number * width, (number + 1) * width)
            width *= model.n_heads
        case "mlp":
            site = mlp_site(model, layer)
        case "position" if (positions := model.parts.positions) is not None:
            site = Site(positions.module, "output", EMBEDDING)
            place = torch.tensor([node.position], device=output.device)
            output = positions.rows(place)[0]
        case _:
            site = token_site(model)
    rows = output.new_zeros(len(flow.ids), width)
    rows[node.position, columns] = output
    return site, rows
