"""Names of the nodes of a flow: tokens that they raise and lower, and tokens where they start."""

from collections.abc import Sequence

import torch
from jaxtyping import Float, Int
from torch import Tensor

from bilens.flows.graph import Flow
from bilens.flows.nodes import Node
from bilens.language.names import in_words, readable_tokens
from bilens.transformer import ResidualModel

LIKELY = 200
"""Most probable tokens that may be in a label."""
FOLLOWED = 60
"""Strongest nodes through which the flow of others is followed down to the tokens."""


Ends = tuple[Float[Tensor, "_ d_model"], Float[Tensor, "_ d_model"]]
"""Last streams at a position that predicts, in passes with a part and in passes without it.

Each is a row of each part, or one row for all of them.
"""


Runs = tuple[Float[Tensor, "_ time d_model"], Float[Tensor, "_ time d_model"]]
"""Streams after the last layer, in passes with a part and in passes without it; see `Ends`."""


def ends_of(runs: Runs, length: int) -> list[Ends]:
    """Return the ends of runs at each of the last `length` positions, which predict an answer."""
    present, absent = runs
    return [(present[:, place], absent[:, place]) for place in range(-length, 0)]


def token_scores(
    model: ResidualModel, present: Float[Tensor, "_ d_model"], absent: Float[Tensor, "_ d_model"]
) -> Float[Tensor, "parts vocab"]:
    """Return by how much each part raises each token.

    (log p1 - log p0) sqrt((p1 + p0) / 2), p1 and p0 the token's probabilities with the part and
    without it, if it is among the most probable ones of either run, else 0. Without the root the
    changes of tokens that nobody expects would be the largest; with p itself only one or two
    tokens would count. `present` and `absent` are `Ends`.
    """
    likely = min(LIKELY, model.vocab_size)
    logs = [model.places.logits(rows).log_softmax(-1) for rows in (present, absent)]
    log_1, log_0 = torch.broadcast_tensors(*logs)
    among = torch.zeros_like(log_1, dtype=torch.bool)
    for log in (log_1, log_0):
        among.scatter_(1, log.topk(likely).indices, True)
    weight = ((log_1.exp() + log_0.exp()) / 2).sqrt()
    return torch.where(among, (log_1 - log_0) * weight, 0)


def token_changes(
    model: ResidualModel, runs: Sequence[Ends], k: int
) -> list[tuple[Int[Tensor, " k"], Int[Tensor, " k"]]]:
    """Return the k tokens that each part raises most, and the k that it lowers most.

    `runs` are with and without the parts, in one or more ways, whose scores are added up.
    """
    count = max(len(rows) for ends in runs for rows in ends)
    changed: list[tuple[Tensor, Tensor]] = []
    at_once = 32  # runs whose logits are in memory
    for start in range(0, count, at_once):
        scores = torch.zeros((), device=model.device)
        for ends in runs:
            batch = (rows if len(rows) == 1 else rows[start : start + at_once] for rows in ends)
            scores = scores + token_scores(model, *batch)
        for row in scores:
            sides = [side.topk(min(k, model.vocab_size)) for side in (row, -row)]
            raised, lowered = (top.indices[top.values > 0] for top in sides)
            changed.append((raised, lowered))
    return changed


def token_words(model: ResidualModel, numbers: Int[Tensor, " n"], k: int) -> tuple[str, ...]:
    """Return the first k tokens that are text, without their spaces and without pieces of letters.

    Tokens that differ by a space only are one word.
    """
    texts = readable_tokens(model, numbers)
    return tuple(dict.fromkeys(in_words(text.strip() or text) for text in texts))[:k]


def sources(flow: Flow, nodes: Sequence[Node], k: int = 2) -> list[tuple[str, ...]]:
    """Return the tokens at which the flow of some nodes starts, at most k of each.

    A node's flow has the shares of its inflow, edge by edge, down to the tokens, on paths through
    the strongest nodes. Named are tokens with at least half of the largest share.
    """
    tokens = [node for node in flow.nodes if node.kind == "token"]
    through = [node for node in flow.nodes if node.kind in ("head", "mlp")][:FOLLOWED]
    picked = {node.place: node for node in (*nodes, *through, *tokens)}
    graph = flow.graph(list(picked.values()))
    shares = graph.edges.new_zeros(len(graph.nodes), len(flow.ids))
    for row in reversed(range(len(graph.nodes))):
        node = graph.nodes[row]
        if node.kind == "token":
            shares[row, node.position] = 1
        elif node.flow:
            shares[row] = graph.edges[row] @ shares / node.flow
    rows = {node.place: row for row, node in enumerate(graph.nodes)}
    named = []
    for node in nodes:
        largest = shares[rows[node.place]].abs().topk(min(k, len(flow.ids)))
        strong = (largest.values > 0) & (largest.values >= largest.values[0] / 2)
        positions = largest.indices[strong].tolist()
        names = [flow.tokens[position].strip() for position in positions]
        named.append(() if node.kind == "token" else tuple(names))
    return named
