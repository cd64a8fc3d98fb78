"""Flows as attribution graphs, in the format of Neuronpedia and of circuit-tracer's viewer."""

import json
import re
from collections import defaultdict
from importlib.metadata import version
from pathlib import Path
from typing import Any

from bilens.errors import BilensError
from bilens.files import write_json
from bilens.reading import signed

METADATA = "graph-metadata.json"
KINDS = {
    "head": "lorsa",
    "direction": "cross layer transcoder",
    "mlp": "cross layer transcoder",
    "token": "embedding",
    "position": "embedding",
    "bias": "bias",
    "output": "logit",
}
DESCRIPTION = (
    "An exact flow: nothing is replaced by transcoders, so that there are no error nodes. Heads "
    "are drawn as lorsa nodes and directions of MLPs as transcoder features. Nodes with little "
    "flow are left out."
)


def attribution_graph(
    data: dict[str, Any], *, slug: str, prompt: str, probability: float, scan: str = "bilens"
) -> dict[str, Any]:
    """Return a flow as an attribution graph: its nodes and links, for JSON.

    A node's influence is the share of the absolute flow that it and all stronger nodes hold. A
    viewer's threshold thus prunes as `Flow.covering` does. Layers are numbered from 1. Queries
    and keys of heads between two texts have the nodes that they read as `qk_tracing_results`.

    Args:
        data: see `bilens.read.flow.reading.flow_data`.
        slug: name of the graph and of its file.
        prompt: the text.
        probability: of the token that the flow is about.
        scan: the model's name; Neuronpedia takes names of models that it knows.

    Source:
        hijohnnylin/neuronpedia, `apps/webapp/app/api/graph/graph-schema.json`;
        safety-research/circuit-tracer, `circuit_tracer/frontend/graph_models.py`.
    """
    nodes, held = [], 0.0
    for number, node in enumerate(data["nodes"]):
        held += abs(node["flow"]) if number else 0.0
        nodes.append(_node(data, number, node, held / (data["absolute"] or 1.0), probability))
    _trace_queries_and_keys(data, nodes)
    return {
        "metadata": {
            "slug": _plain(slug),
            "scan": _plain(scan),
            "transcoder_list": [],
            "prompt_tokens": data["tokens"],
            "prompt": prompt,
            "node_threshold": 1.0,
            "info": {
                "description": DESCRIPTION,
                "generator": {"name": "bilens", "version": version("bilens")},
            },
            "generation_settings": {
                "max_feature_nodes": len(nodes) - 1,
                "value": data["value"],
                "values": data["values"],
                "absolute_flow": data["absolute"],
                "held_fixed": data["frozen"],
            },
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


def _plain(name: str) -> str:
    """Return a name of the letters that Neuronpedia takes."""
    return re.sub(r"[^a-zA-Z0-9_.-]+", "-", name).strip("-") or "bilens"


def _node(
    data: dict[str, Any], number: int, node: dict[str, Any], held: float, probability: float
) -> dict[str, Any]:
    kind = KINDS[node["kind"]]
    # Neuronpedia refuses graphs whose highest layer is 0, so that layers count from 1.
    layer = "E" if node["layer"] is None else str(node["layer"] + 1)
    name = f"{node['name']} ({signed(node['flow'])})"
    if kind == "logit":
        # Viewers take the token from between quotes and the probability from after "(p=".
        token = data["direction"].replace('"', "'")
        layer = str(data["layers"] + 1)
        name = f'Output "{token}" (p={probability:.3f})'
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


def _trace_queries_and_keys(data: dict[str, Any], nodes: list[dict[str, Any]]) -> None:
    """Give each head that reads by queries or keys the nodes that they read, strongest first."""
    reads: dict[tuple[Any, ...], dict[str, list[list[Any]]]] = defaultdict(
        lambda: {"queries": [], "keys": []}
    )
    for above, below, flow in data["edges"]:
        node = data["nodes"][above]
        if node.get("role") in ("queries", "keys"):
            reads[_pair(node)][node["role"]].append([nodes[below]["node_id"], flow])
    for node, drawn in zip(data["nodes"], nodes, strict=True):
        if node["kind"] == "head" and _pair(node) in reads:
            of_pair = reads[_pair(node)]
            drawn["qk_tracing_results"] = {
                "pair_wise_contributors": [],
                "top_q_marginal_contributors": of_pair["queries"],
                "top_k_marginal_contributors": of_pair["keys"],
            }


def _pair(node: dict[str, Any]) -> tuple[Any, ...]:
    return node["layer"], node["number"], node["position"], node["source"]


def write_viewer_files(folder: Path, graph: dict[str, Any]) -> None:
    """Write SLUG.json, and enter it in the folder's list of graphs.

    Args:
        folder: the argument of `circuit-tracer start-server --graph_file_dir`.
        graph: see `attribution_graph`.

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
