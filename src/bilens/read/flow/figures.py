"""The flow of a logit as a page to explore, as JSON, and as a tree of text."""

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import pandas as pd
from jaxtyping import Int
from rich.text import Text
from rich.tree import Tree
from torch import Tensor

from bilens.checks import checked
from bilens.errors import BilensError
from bilens.lazy_imports import go
from bilens.read.figures.style import BLUE, GREY, dress
from bilens.read.flow.ablation import Ablation
from bilens.read.flow.graph import Flow, FlowGraph
from bilens.read.language.names import token_names
from bilens.reading import FlowDrawing, Picture, Section, Table, signed
from bilens.residual import ResidualModel

SMALL = 1e-3
"""Edges below this share of the largest are left out of files."""
AT_FIRST, FEWEST = 0.5, 12
"""Share of the absolute flow, and nodes, that a page shows when it opens, if it has as many."""


def shown_tokens(model: ResidualModel, ids: Int[Tensor, " time"]) -> list[str]:
    """Return names of tokens, with spaces for the tokenizer's own marks of them."""
    return [name.replace("Ġ", " ").replace("▁", " ") for name in token_names(model, ids)]


@checked
def flow_data(flow: Flow, tokens: Sequence[str], *, direction: str, k: int) -> dict[str, Any]:
    """Return the k strongest nodes of a flow, their edges, and their share of it, for JSON.

    Nodes are ordered by |flow|, the logit first, so that the first n are the graph of the n - 1
    strongest. `shares` has a count of nodes, their share of the absolute flow, and the share of
    the logit that starts and stays in them.

    Args:
        flow: the flow.
        tokens: of its text, as they are shown.
        direction: name of the logit.
        k: how many nodes.

    Raises:
        BilensError: k is not positive, or the names are not as many as the tokens.
    """
    if len(tokens) != len(flow.ids):
        raise BilensError(f"tokens holds {len(tokens)} names, and the text {len(flow.ids)}")
    graph = flow.top(k)
    order = sorted(range(1, len(graph.nodes)), key=lambda i: -abs(graph.nodes[i].flow))
    place = {number: rank for rank, number in enumerate([0, *order])}
    large = graph.edges.abs() >= SMALL * float(graph.edges.abs().max())
    large &= graph.edges != 0
    edges = [(place[a], place[b], float(graph.edges[a, b])) for a, b in large.nonzero().tolist()]
    numbers = [graph.nodes[i] for i in [0, *order]]
    nodes = [
        {
            **asdict(node),
            "name": node.name(tokens),
            "removable": node.is_removable and flow.before is None,
        }
        for node in numbers
    ]
    shares = [(n, *_shares(flow, graph, order[:n])) for n in _counts(len(order))]
    return {
        "direction": direction,
        "tokens": list(tokens),
        "value": flow.value,
        "values": list(flow.values),
        "absolute": flow.absolute,
        "frozen": list(flow.frozen),
        "layers": len(flow.trace.layers),
        "n_nodes": sum(node.is_part for node in flow.nodes),
        "nodes": nodes,
        "edges": sorted(edges, key=lambda edge: -abs(edge[2])),
        "shares": shares,
        "start": next(
            (i for i, (n, held, _) in enumerate(shares) if n >= FEWEST and held >= AT_FIRST),
            len(shares) - 1,
        ),
    }


def _shares(flow: Flow, graph: FlowGraph, nodes_shown: Sequence[int]) -> tuple[float, float]:
    index = sorted([0, *nodes_shown])
    nodes = tuple(graph.nodes[i] for i in index)
    held = sum(abs(node.flow) for node in nodes[1:]) / (flow.absolute or 1.0)
    subgraph = FlowGraph(flow, (), nodes, graph.edges[index][:, index], held)
    return held, subgraph.share_of_logit


def _counts(most: int) -> list[int]:
    """Return counts that grow by 1.3 at each step, up to all."""
    counts = [1]
    while counts[-1] < most:
        counts.append(min(most, max(counts[-1] + 1, round(1.3 * counts[-1]))))
    return counts


def flow_tree(data: dict[str, Any], *, depth: int = 3, width: int = 4) -> Tree:
    """Return the strongest branches below the logit, to print.

    Below each node are the nodes that send most to it, with the edges.

    Args:
        data: see `flow_data`.
        depth: levels below the logit.
        width: nodes under each node.
    """
    nodes = data["nodes"]

    def line(value: float, name: str) -> Text:
        return Text(signed(value, "#.3g"), style="blue" if value > 0 else "red").append(
            f" {name}", style="default"
        )

    def grow(tree: Tree, above: int, level: int) -> None:
        below = [edge for edge in data["edges"] if edge[0] == above][:width]
        for _, number, value in below if level else ():
            grow(tree.add(line(value, nodes[number]["name"])), number, level - 1)

    tree = Tree(line(data["value"], data["direction"]))
    grow(tree, 0, depth)
    return tree


@checked
def ablation_figure(pairs: Sequence[tuple[str, str, Ablation]]) -> "go.Figure":
    """Plot predicted against actual change of the logit, for nodes that were removed.

    Args:
        pairs: kind and name of each node, and its ablation.
    """
    figure = dress(go.Figure(), height=420, title="One node removed")
    for kind in dict.fromkeys(kind for kind, _, _ in pairs):
        results = [(name, result) for of, name, result in pairs if of == kind]
        figure.add_scatter(
            x=[result.predicted for _, result in results],
            y=[result.actual for _, result in results],
            text=[name.replace("<", "&lt;") for name, _ in results],
            mode="markers",
            name=kind,
            hovertemplate="%{text}<br>predicted %{x:.3f}, actual %{y:.3f}<extra></extra>",
        )
    values = [x for _, _, r in pairs for x in (r.predicted, r.actual)]
    ends = [min(values, default=0), max(values, default=1)]
    figure.add_scatter(x=ends, y=ends, mode="lines", line_color=GREY, showlegend=False)
    figure.update_traces(marker={"size": 7}, selector={"mode": "markers"})
    figure.update_layout(colorway=[BLUE, "#b2182b", "#1b7837", "#762a83", "#bf812d"])
    figure.update_xaxes(title="predicted change of the logit")
    figure.update_yaxes(title="actual change")
    return figure


def flow_sections(
    data: dict[str, Any], ablated: Sequence[tuple[str, str, Ablation]]
) -> list[Section]:
    """Return the sections on a flow: its graph, its strongest nodes, and nodes removed.

    Args:
        data: See `flow_data`.
        ablated: See `ablation_figure`.
    """
    nodes = node_frame(data["nodes"][1:31])
    sections = [
        Section(
            "Graph",
            "Squares are heads, circles everything else; area is |flow|, blue raises the logit and "
            "red lowers it. Rest is not split further. Point at a node, touch it, or reach "
            "it with the Tab key, for its edges.",
            [[FlowDrawing(data)]],
        ),
        Section(
            "Strongest nodes",
            "Sorted by |flow|. Flows add up to the logit, or to its change. The estimated effect "
            "is the gradient times what the node writes, and does not add up. The measured effect "
            "is that of removing the node from the running model.",
            [[Table(nodes, "", dict.fromkeys(nodes.columns[1:], "+#.3g"))]],
        ),
    ]
    if ablated:
        text = (
            "Each node was removed from the running model, in which norms, patterns and gates "
            "then change; the flow of one text holds them fixed. Between two texts the node's "
            "change was exchanged instead, in both directions, and the mean is shown."
        )
        picture = Picture("interventions", ablation_figure(ablated))
        sections.append(Section("Interventions", text, [[picture, Table(ablation_frame(ablated))]]))
    return sections


def node_frame(nodes: Sequence[dict[str, Any]]) -> pd.DataFrame:
    """Return name, flow and effects of nodes; measured effects only if a node has one."""
    columns = {"node": "name", "flow": "flow"}
    for name, key in (("estimated effect", "estimated"), ("measured effect", "measured")):
        if any(node.get(key) is not None for node in nodes):
            columns[name] = key
    rows = [[node[key] for key in columns.values()] for node in nodes]
    return pd.DataFrame(rows, columns=list(columns))


def ablation_frame(ablated: Sequence[tuple[str, str, Ablation]]) -> pd.DataFrame:
    """Return the predicted and the actual change of the logit for each node that was removed."""
    rows = [(name, result.predicted, result.actual) for _, name, result in ablated]
    return pd.DataFrame(rows, columns=["node", "predicted", "actual"])
