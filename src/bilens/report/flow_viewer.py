"""The graph of a flow in the files that circuit-tracer's viewer of attribution graphs reads."""

import json
from pathlib import Path
from typing import Any

from bilens.errors import BilensError
from bilens.files import write_json
from bilens.reading import signed

__all__ = ["viewer_graph", "write_viewer_files"]

METADATA = "graph-metadata.json"


def viewer_graph(
    data: dict[str, Any], *, slug: str, prompt: str, probability: float
) -> dict[str, Any]:
    """A flow as the viewer's graph: nodes with their links, for JSON.

    Heads and directions take the place of transcoder features, and carry their names. A node's
    influence is the share of the absolute flow that it and all stronger ones hold, so that the
    viewer's threshold prunes as `Flow.covering` does. There are no error nodes; what is not shown
    is left out.

    Args:
        data: see `bilens.report.flow.flow_data`.
        slug: name of the graph and of its file.
        prompt: the text.
        probability: of the token that the flow is about.

    Source:
        safety-research/circuit-tracer, `circuit_tracer/frontend/graph_models.py`.
    """
    nodes, held = [], 0.0
    for number, node in enumerate(data["nodes"]):
        held += abs(node["flow"]) if number else 0.0
        nodes.append(_node(data, number, node, held / (data["absolute"] or 1.0), probability))
    return {
        "metadata": {
            "slug": slug,
            "scan": "bilens",
            "transcoder_list": [],
            "prompt_tokens": data["tokens"],
            "prompt": prompt,
            "node_threshold": 1.0,
        },
        "qParams": {
            "pinnedIds": [],
            "supernodes": [],
            "linkType": "both",
            "clickedId": "",
            "sg_pos": "",
        },
        "nodes": nodes,
        "links": [
            {"source": nodes[b]["node_id"], "target": nodes[a]["node_id"], "weight": flow}
            for a, b, flow in data["edges"]
        ],
    }


def _node(
    data: dict[str, Any], number: int, node: dict[str, Any], held: float, probability: float
) -> dict[str, Any]:
    kind, layer = "cross layer transcoder", str(node["layer"])
    name = f"{node['name']} ({signed(node['flow'])})"
    if node["kind"] == "output":
        # The viewer takes the token from between quotes and the probability from behind them.
        token = data["direction"].replace('"', "'")
        kind, layer = "logit", str(data["layers"] + 1)
        name = f'Output "{token}" (p={probability:.3f})'
    elif node["layer"] is None:
        kind, layer = "embedding", "E"
    position = 0 if node["position"] is None else node["position"]
    return {
        "node_id": f"{layer}_{number}_{position}",
        "feature": number,
        "layer": layer,
        "ctx_idx": position,
        "feature_type": kind,
        "token_prob": probability if kind == "logit" else 0.0,
        "is_target_logit": kind == "logit",
        "run_idx": 0,
        "reverse_ctx_idx": 0,
        "jsNodeId": f"{layer}_{number}-0",
        "clerp": name,
        "influence": held,
        "activation": node["flow"],
    }


def write_viewer_files(folder: Path, graph: dict[str, Any]) -> None:
    """Write SLUG.json, and enter it in the folder's list of graphs.

    Args:
        folder: what `circuit-tracer start-server --graph_file_dir` is given.
        graph: see `viewer_graph`.

    Raises:
        BilensError: the folder's list of graphs is damaged.
    """
    path, about = folder / METADATA, graph["metadata"]
    try:
        known = json.loads(path.read_text(encoding="utf-8"))["graphs"] if path.exists() else []
        others = [other for other in known if other["slug"] != about["slug"]]
    except (ValueError, KeyError, TypeError) as error:
        raise BilensError(
            f"{path} is not a list of graphs as circuit-tracer writes it: {error!r}. Choose "
            "another folder"
        ) from error
    write_json(folder / f"{about['slug']}.json", graph)
    write_json(path, {"graphs": [*others, about]})
