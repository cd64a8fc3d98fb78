"""Files for circuit-tracer's viewer have its fields, and one node for each of the flow."""

import json

import pytest

from bilens.errors import BilensError
from bilens.read.figures.flow import flow_data
from bilens.read.flow import flow
from bilens.report.exporters import viewer_graph, write_viewer_files
from bilens.residual import ResidualModel
from tests.language import random_model, random_text

NODE = {"node_id", "feature", "layer", "ctx_idx", "feature_type", "token_prob", "is_target_logit"}
NODE |= {"run_idx", "reverse_ctx_idx", "jsNodeId", "clerp", "influence", "activation"}


@pytest.fixture(scope="module")
def data():
    view = ResidualModel(random_model(n_layers=2, bias=True))
    found = flow(view, random_text(), view.direction(3), m=3, threshold=0)
    return flow_data(found, [f"w{i}" for i in range(9)], direction='a "b"', k=60)


def test_a_graph_has_all_nodes_and_links(data):
    graph = viewer_graph(data, slug="one", prompt="w", probability=0.25)
    nodes = graph["nodes"]
    assert all(set(node) == NODE for node in nodes)
    assert len({node["node_id"] for node in nodes}) == len(nodes) == 61
    assert nodes[0]["feature_type"] == "logit"
    assert nodes[0]["clerp"] == "Output \"a 'b'\" (p=0.250)"
    assert {node["layer"] for node in nodes} == {"0", "1", "3", "E"}
    assert [node["influence"] for node in nodes][-1] == pytest.approx(data["shares"][-1][1])
    into = {link["source"]: link["weight"] for link in graph["links"] if link["target"] == "3_0_8"}
    assert into == {nodes[b]["node_id"]: flow for a, b, flow in data["edges"] if a == 0}


def test_a_folder_lists_each_graph_once(data, tmp_path):
    for slug in ("one", "two", "one"):
        graph = viewer_graph(data, slug=slug, prompt="w", probability=0.25)
        write_viewer_files(tmp_path, graph)
    listed = json.loads((tmp_path / "graph-metadata.json").read_text())["graphs"]
    assert [entry["slug"] for entry in listed] == ["two", "one"]
    assert json.loads((tmp_path / "one.json").read_text()) == graph


@pytest.mark.parametrize("text", ["{", "{}", "[]", '{"graphs": [1]}'])
def test_a_damaged_list_is_kept(data, tmp_path, text):
    (tmp_path / "graph-metadata.json").write_text(text)
    with pytest.raises(BilensError, match="is not a list of graphs as circuit-tracer writes it"):
        write_viewer_files(tmp_path, viewer_graph(data, slug="a", prompt="w", probability=0.2))
    assert (tmp_path / "graph-metadata.json").read_text() == text
