"""The lens: the change of every logit by a part that changes between two texts, and its labels."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from bilens.checks import ROUNDING, detached
from bilens.errors import BilensError
from bilens.flows.ablation import measurable
from bilens.flows.graph import Flow
from bilens.flows.labels import both_sides, token_scores
from bilens.flows.nodes import WRITING, Node
from bilens.flows.secants import UnknownOperationError
from bilens.flows.tangents import Start, Tangents
from bilens.progress import logger
from bilens.settings import Said
from bilens.transformer import ResidualModel
from bilens.transformer.places import Places

WORDS = 4
"""Most tokens that a node is said to raise, and to lower."""


class LogitChanges(NamedTuple):
    """Changes of all logits before a soft cap by some parts, at each position that predicts.

    Attributes:
        logits: those of both texts.
        changes: of each part.
    """

    logits: Float[Tensor, "positions 2 vocab"]
    changes: Float[Tensor, "positions parts vocab"]

    def scores(self, places: Places) -> Float[Tensor, "parts vocab"]:
        """Return by how much each part raises each token; see `token_scores`.

        It is taken from the first text, and put into the second one.
        """
        total = torch.zeros(())
        cap = (lambda z: z) if places.modules is None else places.modules.capped
        for (first, second), changes in zip(self.logits, self.changes, strict=True):
            total = total + token_scores(cap(first[None]), cap(first - changes)).cpu()
            total = total + token_scores(cap(second + changes), cap(second[None])).cpu()
        return total


@detached
def lens(
    flow: Annotated[Flow, Said("a Flow; read_lens takes a model and texts")], node: Node
) -> Float[Tensor, " vocab"]:
    """Return the change of every logit, before a soft cap, by a node of a flow.

    The change of the node's output between the texts is carried forward by the secants of all that
    follows. Over nodes that cut the model, such as all tokens, these changes add up to that of the
    logits. At the answer it is the flow of the node.

        flow = bilens.flow(model, "The keys", " are", minus=" is", against="The key")
        bilens.lens(flow, flow.nodes[0]).topk(5)

    Args:
        flow: a flow between two texts, of `bilens.flow`.
        node: a head, an MLP or a token of it.

    Raises:
        BilensError: it is none of these, or layers of the model read more than the stream.
    """
    nodes, changes = logit_changes(flow, [node])
    if not nodes:
        raise UnknownOperationError(
            f"{node.address} is read otherwise than from the stream, expected a node of which "
            "all later layers read the stream"
        )
    return changes.changes[0, 0]


def logit_changes(flow: Flow, nodes: Sequence[Node]) -> tuple[list[Node], LogitChanges]:
    """Return the changes of all logits by each of some nodes, and the nodes; see `lens`.

    Those are left out which later layers read otherwise than from the stream.

    Raises:
        UnknownOperationError: an operation has no rule.
    """
    for node in nodes:
        if node.kind not in WRITING:
            raise BilensError(f"node is {node.address}, expected a head, an MLP or a token")
    tangents = Tangents(flow.adjoints)
    carried = tangents.carry(starts_of(flow, nodes, tangents))
    # What reaches the answer is the flow of the node.
    tolerance = ROUNDING * (flow.absolute + flow.rounded)
    arrivals = tangents.at_answer(carried).tolist()
    rows = [i for i, node in enumerate(nodes) if abs(arrivals[i] - node.flow) <= tolerance]
    logits = tangents.logits(carried[rows], len(flow.fitted.spoken) or 1)
    return [nodes[i] for i in rows], LogitChanges(*logits)


def starts_of(flow: Flow, nodes: Sequence[Node], tangents: Tangents) -> list[Start]:
    """Return the changes of the outputs of nodes, at their places."""
    starts = []
    for node, change in zip(nodes, flow.written(nodes), strict=True):
        position = node.position or 0
        if node.kind == "token":
            starts.append(tangents.of_token(position, change))
            continue
        first = (node.number or 0) * len(change) if node.kind == "head" else 0
        place = "heads" if node.kind == "head" else "mlp"
        starts.append(Start(node.layer or 0, place, position, change, first))
    return starts


def labelled(model: ResidualModel, flow: Flow, count: int) -> Flow:
    """Return a flow whose strongest nodes have the tokens that they raise and lower.

    Nodes have none that later layers read otherwise than from the stream.
    """
    nodes = measurable(flow)[:count]
    if not nodes:
        return flow
    try:
        exact, changes = logit_changes(flow, nodes)
    except UnknownOperationError as error:
        logger.warning("nodes have no tokens that they raise and lower: %s", error)
        return flow
    labels: list[Node] = []
    for node, of_node in zip(exact, changes.scores(model.places) if exact else (), strict=True):
        raises, lowers = both_sides(model, of_node, WORDS)
        labels.append(replace(node, raises=raises, lowers=lowers))
    return replace(flow, named=tuple(labels))
