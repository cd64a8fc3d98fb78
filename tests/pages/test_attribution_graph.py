"""Attribution graphs have the fields that Neuronpedia and circuit-tracer ask for."""

import json
import re

import jsonschema
import pytest

from bilens.errors import BilensError
from bilens.pages.exporters import attribution_graph, write_viewer_files
from bilens.read.flow import flow
from bilens.read.flow.reading import flow_page
from bilens.residual import ResidualModel
from tests.models import random_model, random_text

STRING, INTEGER, NUMBER = ({"type": kind} for kind in ("string", "integer", "number"))


def record(required, **properties):
    return {"type": "object", "required": required.split(), "properties": properties}


NODE = record(
    "node_id feature layer ctx_idx feature_type jsNodeId clerp influence activation",
    node_id=STRING,
    feature={"type": ["integer", "null"]},
    layer={"type": ["string", "integer"]},
    ctx_idx=INTEGER,
    feature_type={"enum": ["cross layer transcoder", "lorsa", "embedding", "logit", "bias"]},
    jsNodeId=STRING,
    clerp=STRING,
    influence={"type": ["number", "null"]},
    activation={"type": ["number", "null"]},
)
# What Neuronpedia's validator asks for, and the letters that its server takes in names.
SCHEMA = record(
    "metadata qParams nodes links",
    metadata=record(
        "slug scan prompt_tokens prompt",
        slug={"type": "string", "pattern": "^[a-zA-Z0-9_.-]+$"},
        scan={"type": "string", "pattern": "^[a-zA-Z0-9_.-]+$"},
        prompt_tokens={"type": "array", "items": STRING},
        prompt=STRING,
        node_threshold=NUMBER,
        info=record("generator", generator=record("name version", name=STRING)),
    ),
    qParams=record("", pinnedIds={"type": "array", "items": STRING}, linkType=STRING),
    nodes={"type": "array", "items": NODE},
    links={
        "type": "array",
        "items": record("source target weight", source=STRING, target=STRING, weight=NUMBER),
    },
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
    view = ResidualModel(random_model(**model))
    flows = flow(view, random_text(), view.direction(3), **options)
    return flow_page(flows, number='a "b"', k=60)


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
    assert all(
        re.fullmatch(f"{node['layer']}_{node['feature']}_{node['ctx_idx']}", name)
        for name, node in nodes.items()
    )
    influences = [node["influence"] for node in graph["nodes"]]
    assert influences == sorted(influences)
    assert influences[-1] == pytest.approx(
        sum(abs(n.flow) for n in content.nodes[1:]) / content.absolute
    )


def test_links_are_the_edges(content):
    graph = graph_of(content)
    nodes = graph["nodes"]
    into = {(link["target"], link["source"]): link["weight"] for link in graph["links"]}
    assert into == {
        (nodes[a]["node_id"], nodes[b]["node_id"]): flow_ for a, b, flow_ in content.edges
    }


def test_a_folder_lists_each_graph_once(content, tmp_path):
    for slug in ("one", "two", "one"):
        graph = graph_of(content, slug)
        write_viewer_files(tmp_path, graph)
    listed = json.loads((tmp_path / "graph-metadata.json").read_text())["graphs"]
    assert [entry["slug"] for entry in listed] == ["two", "one"]
    assert json.loads((tmp_path / "one.json").read_text()) == graph


@pytest.mark.parametrize("text", ["{", "{}", "[]", '{"graphs": [1]}'])
def test_a_damaged_list_is_kept(content, tmp_path, text):
    (tmp_path / "graph-metadata.json").write_text(text)
    with pytest.raises(BilensError, match="is not a list of graphs as circuit-tracer writes it"):
        write_viewer_files(tmp_path, graph_of(content))
    assert (tmp_path / "graph-metadata.json").read_text() == text
