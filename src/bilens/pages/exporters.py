"""Readings as files of arrays, and in the files that other projects' viewers open."""

import json
import re
from pathlib import Path
from typing import Any

from bilens.analysis import Reading
from bilens.circuits.reading import CircuitReading, cuts_said
from bilens.circuits.stages import Stages
from bilens.errors import BilensError
from bilens.figures.sheet import save_figure
from bilens.files import write_json, write_safetensors
from bilens.flows.reading import FlowPage, FlowReading
from bilens.flows.saved import PAGE_KEY
from bilens.images.bonds import BONDS_NAME, BondReading
from bilens.images.classifier import ClassifierReading
from bilens.images.deep import DeepReading
from bilens.sections import plain
from bilens.train.run_directory import TRAINING_NAME
from bilens.version import __version__


def attribution_graph(
    page: FlowPage, *, slug: str, prompt: str, probability: float, scan: str = "bilens"
) -> dict[str, Any]:
    """Return a flow as an attribution graph: its nodes and links, for JSON.

    A node's influence is the share of the absolute flow that it and all stronger nodes hold, so
    that a viewer's threshold keeps the strongest. Layers are numbered from 1.

    `slug` is the name of the graph and of its file, and `probability` that of the token that the
    flow is about. `scan` is the model's name; Neuronpedia takes names of models that it knows.

    Source: hijohnnylin/neuronpedia, `apps/webapp/app/api/graph/graph-schema.json`;
        safety-research/circuit-tracer, `circuit_tracer/frontend/graph_models.py`.
    """
    nodes, total = [], 0.0
    for i, node in enumerate(page.nodes):
        total += abs(node.flow) if i else 0.0
        nodes.append(_node(page, i, total / (page.absolute or 1.0), probability))
    description = (
        "An exact flow: nothing is replaced by transcoders, so that there are no error nodes. "
        "Heads are drawn as lorsa nodes, MLPs at a position as transcoder features. Nodes with "
        "little flow are left out."
    )
    return {
        "metadata": {
            "slug": _plain(slug),
            "scan": _plain(scan),
            "transcoder_list": [],
            "prompt_tokens": list(page.tokens),
            "prompt": prompt,
            "node_threshold": 1.0,
            "info": {
                "description": description,
                "generator": {"name": "bilens", "version": __version__},
            },
            "generation_settings": {"max_feature_nodes": len(nodes) - 1, PAGE_KEY: plain(page)},
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
            for a, b, flow in page.edges
        ],
    }


def _plain(name: str) -> str:
    """Return a name of the letters that Neuronpedia takes."""
    return re.sub(r"[^a-zA-Z0-9_.-]+", "-", name).strip("-") or "bilens"


def _node(page: FlowPage, i: int, influence: float, probability: float) -> dict[str, Any]:
    node = page.nodes[i]
    kinds = {
        "head": "lorsa",
        "mlp": "cross layer transcoder",
        "choice": "cross layer transcoder",
        "token": "embedding",
        "output": "logit",
    }
    kind = kinds[node.kind]
    # Neuronpedia refuses graphs whose highest layer is 0, so that layers count from 1.
    layer = "E" if node.layer is None else str(node.layer + 1)
    starts = f"from {', '.join(node.sources)}" if node.sources else ""
    name = ", ".join(filter(None, [node.name, node.effect, starts]))
    if kind == "logit":
        # Viewers take the token from between quotes and the probability from after "(p=".
        token = page.metric.replace('"', "'")
        layer = str(page.layers + 1)
        name = f'Output "{token}" (p={probability:.3f})'
    position = node.position or 0
    return {
        "node_id": f"{layer}_{i}_{position}",
        "feature": i,
        "layer": layer,
        "ctx_idx": position,
        "feature_type": kind,
        "token_prob": probability if kind == "logit" else 0.0,
        "is_target_logit": kind == "logit",
        "run_idx": 0,
        "reverse_ctx_idx": 0,
        "jsNodeId": f"{layer}_{i}-0",
        "clerp": name,
        "influence": influence,
        "activation": node.flow,
    }


def write_viewer_files(folder: Path, graph: dict[str, Any]) -> None:
    """Write an `attribution_graph` as SLUG.json, and enter it in the folder's list of graphs.

    The folder is the argument of `circuit-tracer start-server --graph_file_dir`.

    Raises:
        BilensError: the folder's list of graphs is damaged.
    """
    path, metadata = folder / "graph-metadata.json", graph["metadata"]
    try:
        entries = json.loads(path.read_text(encoding="utf-8"))["graphs"] if path.exists() else []
        others = [other for other in entries if other["slug"] != metadata["slug"]]
    except (ValueError, KeyError, TypeError) as error:
        raise BilensError(
            f"{path} is not a list of graphs as circuit-tracer writes it: {error!r}. Choose "
            "another folder"
        ) from error
    write_json(folder / f"{metadata['slug']}.json", graph)
    write_json(path, {"graphs": [*others, metadata]})


def _graph(reading: FlowReading, slug: str, model: str) -> dict[str, Any]:
    return attribution_graph(
        reading.page,
        slug=slug,
        prompt=str(reading.question.text),
        probability=reading.probability,
        scan=model,
    )


# Writers for options of commands, which have their names: of a reading, to a path, with the name of
# the model, a name of the page and a width of figures.


def write_viewer(reading: FlowReading, path: Path, *, model: str, name: str, **_: Any) -> None:
    """Write the graph in the viewer's files."""
    write_viewer_files(path, _graph(reading, name, model))


def write_save_graph(reading: FlowReading, path: Path, *, model: str, **_: Any) -> None:
    """Write the attribution graph."""
    write_json(path, _graph(reading, path.stem, model))


def write_figure(
    reading: Reading, path: Path, *, model: str, width: int | None = None, **_: Any
) -> None:
    """Draw the picture of a reading, with a width in points."""
    pixels = None if width is None else round(width * 96 / 72)
    options: dict[str, Any] = {} if pixels is None else {"width": pixels}
    if isinstance(reading, FlowReading | CircuitReading):
        options["model"] = model
    figure = reading.plot(**options)
    save_figure(figure, path)


def write_directions(reading: CircuitReading, path: Path, **_: Any) -> None:
    """Write the directions of the stream at both cuts of each task that carry its change.

    A vector to steer with is `end.written`: it is added to the stream before `end.layer`, which
    stands beside it, as does `restored`, the share of the change through both cuts.

    Raises:
        BilensError: the reading has no stages, or no directions carry a change.
    """
    tensors, notes, reasons = dict[str, Any](), dict[str, str](), list[str]()
    for answer in reading.circuits:
        if not isinstance(answer, Stages) or answer.cuts is None:
            raise BilensError("directions are of stages; leave out level='parts' or the directions")
        start, cuts = f"{answer.task}." if len(reading.circuits) > 1 else "", answer.cuts
        if cuts.width is None or (cuts.apart and cuts.since is None):
            reasons.append(cuts_said(cuts, {})[-1])
            continue
        notes[f"{start}restored"] = f"{cuts.through[cuts.width]:z.2f}"
        for place, directions in cuts.directions.items():
            tensors[f"{start}{place}.written"] = directions.written.contiguous()
            tensors[f"{start}{place}.read"] = directions.read.contiguous()
            notes[f"{start}{place}.layer"] = str(cuts.layers[place])
    if not tensors:
        raise BilensError(
            f"directions: none carry the change, and {path} is not written. {' '.join(reasons)}"
        )
    write_safetensors(path, tensors, notes)


def write_arrays(reading: Any, path: Path, *, model: str, **_: Any) -> None:
    """Write the spectra of all classes, the paths, or the bonds with the cut as a run.

    Raises:
        CheckpointError: the folder holds the spectra of something else.
    """
    if isinstance(reading, BondReading):
        _write_bonds(reading, path, model)
        return
    if isinstance(reading, ClassifierReading):
        reading.spectrum.save(path / "spectra.safetensors")
    elif isinstance(reading, DeepReading):
        paths = reading.paths
        names = ("directions", "roots", "indices", "eigenvalues", "effective", "vectors")
        arrays = {name: getattr(paths, name) for name in names}
        write_safetensors(path / "paths.safetensors", arrays, {"constant": str(paths.constant)})
    write_json(path / "decomposition.json", reading.record())


def _write_bonds(reading: BondReading, folder: Path, model: str) -> None:
    tensors = {
        f"{name}.{i}": getattr(bond, name)
        for i, bond in enumerate(reading.bonds.bonds)
        for name in ("shares", "read", "write")
    }
    write_safetensors(folder / "bonds.safetensors", tensors)
    write_json(folder / BONDS_NAME, reading.record())
    # The smallest cut that keeps the accuracy is a run like any other.
    reading.cut_model().save_files(folder / "cut")
    record = {name: getattr(reading, name) for name in ("metric", "drop", "kind")}
    record |= {"cut_of": model, "ranks": list(reading.cut.ranks), **reading.data.provenance}
    write_json(folder / "cut" / TRAINING_NAME, record)
