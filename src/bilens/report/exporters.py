"""Readings in the files that other projects' viewers open."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from bilens.checks import checked
from bilens.errors import BilensError
from bilens.files import write_json
from bilens.read.flow.reading import FlowReading
from bilens.read.language import DirectionReading, token_names
from bilens.reading import Reading, signed
from bilens.residual import ResidualModel

HISTOGRAM = 50
UNUSED = ("neuron_alignment", "correlated_neurons", "correlated_features")
"""Neighbours of a feature among neurons and features, which eigenvectors have none of."""


@torch.no_grad()
@checked
def feature_batch(
    model: ResidualModel, reading: DirectionReading, *, name: str, data: str, k: int = 10
) -> dict[str, Any]:
    """The eigenvectors of a reading as features: the content of a file batch-0.json.

        activation (v . z)^2,   logits W_U B(v, v)

    so that activation times logits is what the layer adds to the logits along v, exactly but for
    the last norm. Eigenvectors are active everywhere: `frac_nonzero` is 1, and there is no
    histogram of frequencies. The converter asks for the names of the source set and of its author.

    Args:
        model: that the reading is of.
        reading: see `bilens.read.language.read_direction`.
        name: of the model.
        data: name of the texts.
        k: tokens that a feature raises and lowers most.

    Source:
        decoderesearch/SAEDashboard, `sae_dashboard/neuronpedia/neuronpedia_dashboard.py`;
        hijohnnylin/neuronpedia, `convert-saedashboard-to-neuronpedia-export.py`.
    """
    tensor, W_U = model.mlp(reading.layer), model.W_U
    features = []
    for number, (v, found) in enumerate(
        zip(reading.spectrum.vectors, reading.contexts, strict=True)
    ):
        written = tensor.out @ ((tensor.left @ v) * (tensor.right @ v))
        logits = written @ W_U
        most = min(k, model.vocab_size)
        high, low = logits.topk(most), logits.topk(most, largest=False)
        counts, edges = torch.histogram(logits.float().cpu(), HISTOGRAM)
        texts = torch.stack([some.context.ids for some in found])
        read = model.mlp_inputs(texts, reading.layer)
        width = read.shape[-1]
        active = (read @ v[:width] + v[width:].sum()).square()
        features.append(
            {
                "feature_index": number,
                **{f"{what}_indices": [] for what in UNUSED},
                **{f"{what}_l1": [] for what in UNUSED},
                "neuron_alignment_values": [],
                "correlated_neurons_pearson": [],
                "correlated_features_pearson": [],
                "neg_str": _words(model, low.indices),
                "neg_values": low.values.tolist(),
                "pos_str": _words(model, high.indices),
                "pos_values": high.values.tolist(),
                "frac_nonzero": 1.0,
                "freq_hist_data_bar_values": [],
                "freq_hist_data_bar_heights": [],
                "logits_hist_data_bar_heights": counts.tolist(),
                "logits_hist_data_bar_values": ((edges[1:] + edges[:-1]) / 2).tolist(),
                "n_prompts_total": len(texts),
                "n_tokens_in_prompt": texts.shape[1],
                "dataset": data,
                "decoder_weights_dist": [],
                "vector": written.tolist(),
                "activations": [
                    {
                        "tokens": _words(model, some.context.ids),
                        "values": values.tolist(),
                        "qualifying_token_index": some.context.position,
                        "bin_min": -1.0,
                        "bin_max": float(active.max()),
                        "bin_contains": -1.0,
                    }
                    for some, values in zip(found, active, strict=True)
                ],
            }
        )
    return {
        "model_id": name,
        "layer": reading.layer,
        "sae_set": "bilens",
        "sae_id_suffix": None,
        "features": features,
    }


def _words(model: ResidualModel, ids: torch.Tensor) -> list[str]:
    """Tokens as they are written, with spaces for the marks of tokenizers."""
    return [name.replace("Ġ", " ").replace("▁", " ") for name in token_names(model, ids)]


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
        data: see `bilens.read.figures.flow.flow_data`.
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


@dataclass(frozen=True)
class Exporter:
    """A way to write readings of one kind for another project.

    Attributes:
        name: Of the option that asks for the folder.
        help: A sentence about it.
        write: Write a reading to a folder, under a name.
    """

    name: str
    help: str
    write: Callable[[Any, Path, str], None]


def _write_neuronpedia(reading: DirectionReading, folder: Path, name: str) -> None:
    batch = feature_batch(reading.model, reading, name=name, data=reading.data)
    write_json(folder / "batch-0.json", batch)


def _write_viewer(reading: FlowReading, folder: Path, name: str) -> None:
    graph = viewer_graph(
        reading.data, slug=name, prompt=reading.prompt, probability=reading.probability
    )
    write_viewer_files(folder, graph)


EXPORTERS: dict[type[Reading], Exporter] = {
    DirectionReading: Exporter(
        "neuronpedia",
        "Folder to also write the eigenvectors to, as features for Neuronpedia's dashboards.",
        _write_neuronpedia,
    ),
    FlowReading: Exporter(
        "viewer",
        "Folder to also write the graph to, in the files that circuit-tracer's viewer reads.",
        _write_viewer,
    ),
}
"""By the kind of reading."""
