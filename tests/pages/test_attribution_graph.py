"""Attribution graphs have the fields that Neuronpedia and circuit-tracer ask for."""

import json

import jsonschema
import pytest

from bilens.errors import BilensError
from bilens.flows import flow
from bilens.flows.reading import flow_page
from bilens.pages.exporters import attribution_graph, write_viewer_files
from tests.models import random_text, view_of

STRING, INTEGER, NUMBER = ({"type": kind} for kind in ("string", "integer", "number"))
NUMBER_OR_NULL = {"type": ["number", "null"]}
NAME = {"type": "string", "pattern": "^[a-zA-Z0-9_.-]+$"}


def record(optional="", **properties):
    required = [name for name in properties if name not in optional.split()]
    return {"type": "object", "required": required, "properties": properties}


def list_of(items):
    return {"type": "array", "items": items}


NODE = record(
    **dict.fromkeys(["node_id", "jsNodeId", "clerp"], STRING),
    **dict.fromkeys(["influence", "activation"], NUMBER_OR_NULL),
    feature={"type": ["integer", "null"]},
    layer={"type": ["string", "integer"]},
    ctx_idx=INTEGER,
    feature_type={"enum": ["cross layer transcoder", "lorsa", "embedding", "logit", "bias"]},
)
# What Neuronpedia's validator asks for, and the letters that its server takes in names.
SCHEMA = record(
    metadata=record(
        "node_threshold info",
        slug=NAME,
        scan=NAME,
        prompt_tokens=list_of(STRING),
        prompt=STRING,
        node_threshold=NUMBER,
        info=record(generator=record(name=STRING, version={})),
    ),
    qParams=record("pinnedIds linkType", pinnedIds=list_of(STRING), linkType=STRING),
    nodes=list_of(NODE),
    links=list_of(record(source=STRING, target=STRING, weight=NUMBER)),
)
# Those of circuit-tracer's own model, which is stricter.
TRACER = {"token_prob", "is_target_logit", "run_idx", "reverse_ctx_idx", *NODE["required"]}
KINDS = {
    "one text": ({"n_layers": 2, "bias": True}, {}),
    "two texts": ({"n_layers": 2, "positions": "learned"}, {"against": random_text(seed=1)}),
    "one layer": ({"n_layers": 1, "mlp": "gelu"}, {"against": random_text(seed=1)}),
}


@pytest.fixture(scope="module", params=KINDS)
def content(request):
    model, options = KINDS[request.param]
    flows = flow(view_of(**model), random_text(), "t3", **options)
    return flow_page(flows.top(60), metric='a "b"')


def graph_of(content, slug="one"):
    return attribution_graph(content, slug=slug, prompt="w", probability=0.25, scan="a/b c.gguf")


def test_a_graph_is_valid_and_opens(content):
    graph = graph_of(content)
    jsonschema.validate(json.loads(json.dumps(graph)), SCHEMA)
    nodes = {node["node_id"]: node for node in graph["nodes"]}
    assert len(nodes) == len(content.nodes)
    assert all(set(node) >= TRACER for node in nodes.values())
    assert graph["metadata"]["scan"] == "a-b-c.gguf"
    # A viewer splits the logit's label, and refuses graphs whose highest layer is 0.
    (logit,) = [node for node in nodes.values() if node["feature_type"] == "logit"]
    assert float(logit["clerp"].split("(p=")[1].split(")")[0]) == 0.25
    layers = {int(n["layer"]) for n in nodes.values() if n["layer"] != "E" and n is not logit}
    assert min(layers) == 1
    assert max(layers) < int(logit["layer"]) == content.layers + 1
    for name, node in nodes.items():
        assert name == f"{node['layer']}_{node['feature']}_{node['ctx_idx']}"
    influences = [node["influence"] for node in graph["nodes"]]
    assert influences == sorted(influences)
    shown = sum(abs(node.flow) for node in content.nodes[1:])
    assert influences[-1] == pytest.approx(shown / content.absolute)


def test_links_are_the_edges(content):
    graph = graph_of(content)
    links = {(link["target"], link["source"]): link["weight"] for link in graph["links"]}
    names = [node["node_id"] for node in graph["nodes"]]
    assert links == {(names[a], names[b]): value for a, b, value in content.edges}


def test_a_folder_lists_each_graph_once(content, tmp_path):
    for slug in ("one", "two", "one"):
        write_viewer_files(tmp_path, graph := graph_of(content, slug))
    listed = json.loads((tmp_path / "graph-metadata.json").read_text())["graphs"]
    assert [entry["slug"] for entry in listed] == ["two", "one"]
    assert json.loads((tmp_path / "one.json").read_text()) == graph


@pytest.mark.parametrize("text", ["{", "{}", "[]", '{"graphs": [1]}'])
def test_a_damaged_list_is_kept(content, tmp_path, text):
    (tmp_path / "graph-metadata.json").write_text(text)
    with pytest.raises(BilensError, match="is not a list of graphs as circuit-tracer writes it"):
        write_viewer_files(tmp_path, graph_of(content))
    assert (tmp_path / "graph-metadata.json").read_text() == text
