"""The page of a flow holds the graph, says what is in it, and escapes all text."""

import json
import re

import pytest
import torch

from bilens.errors import BilensError
from bilens.read.flow import Ablation, flow
from bilens.read.flow.figures import ablation_figure, flow_data, flow_sections, flow_tree
from bilens.report import write_page
from bilens.residual import ResidualModel
from tests.language import random_model, random_text

TOKENS = [f"w{i}" for i in range(8)] + ["</script><b>"]


@pytest.fixture(scope="module")
def split_flow():
    view = ResidualModel(random_model(n_layers=2, bias=True))
    return flow(view, random_text(), view.direction(3), m=3, threshold=0)


@pytest.fixture(scope="module")
def data(split_flow):
    return flow_data(split_flow, TOKENS, direction="t3 minus t4", k=25)


def test_nodes_stand_by_strength_with_what_they_hold(split_flow, data):
    flows = [abs(node["flow"]) for node in data["nodes"]]
    assert data["nodes"][0]["kind"] == "output"
    assert len(flows) == 26
    assert flows[1:] == sorted(flows[1:], reverse=True)
    for count, of_flow, of_logit in data["shares"]:
        graph = split_flow.top(count)
        assert of_flow == pytest.approx(graph.share_of_flow)
        assert of_logit == pytest.approx(graph.share_of_logit)
    assert data["shares"][-1][0] == 25


def test_a_page_opens_with_a_graph_rather_than_its_strongest_node(data):
    counts = [count for count, _, _ in data["shares"]]
    assert 12 <= counts[data["start"]] <= 25


def test_edges_are_those_of_the_graph(split_flow, data):
    graph = split_flow.top(25)
    order = sorted(range(26), key=lambda i: (i > 0, -abs(graph.nodes[i].flow)))
    dense = torch.zeros(26, 26, dtype=torch.float64)
    for a, b, value in data["edges"]:
        dense[a, b] = value
    largest = float(graph.edges.abs().max())
    torch.testing.assert_close(dense, graph.edges[order][:, order], rtol=0, atol=1e-3 * largest)
    assert json.loads(json.dumps(data))["edges"]


def test_the_tree_goes_down_from_the_logit(data):
    tree = flow_tree(data, depth=2, width=3)
    assert str(tree.label) == f"{data['value']:+#.3g} t3 minus t4"
    into = [edge for edge in data["edges"] if edge[0] == 0]
    first = data["nodes"][into[0][1]]["name"]
    assert str(tree.children[0].label) == f"{into[0][2]:+#.3g} {first}"
    assert len(tree.children) == 3
    assert not any(leaf.children for child in tree.children for leaf in child.children)


def test_the_page_holds_everything_and_escapes_it(data, tmp_path):
    ablated = [("head", "head <0>", Ablation(0.5, 0.4)), ("token", "t", Ablation(-1.0, -0.9))]
    write_page(tmp_path / "flow.html", "<i>a</i>", "", [], flow_sections(data, ablated))
    page = (tmp_path / "flow.html").read_text()
    [packed] = re.findall(r'<div class="flow"><script type="application/json">(.*?)</script>', page)
    assert json.loads(packed)["nodes"] == json.loads(json.dumps(data))["nodes"]
    assert "</script><b>" not in page
    assert "<i>a</i>" not in page
    assert "Interventions" in page
    assert not re.search(r'src="https?:', page)


def test_interventions_are_drawn_by_kind():
    pairs = [("head", "<h>", Ablation(0.5, 0.4)), ("head", "i", Ablation(1, 1.5))]
    figure = ablation_figure([*pairs, ("token", "t", Ablation(-1.0, -0.9))])
    head, token, line = figure.data
    assert (list(head.x), list(head.y)) == ([0.5, 1], [0.4, 1.5])
    assert head.text[0] == "&lt;h>"
    assert token.name == "token"
    assert list(line.x) == list(line.y) == [-1.0, 1.5]


def test_every_token_has_a_name(split_flow):
    with pytest.raises(BilensError, match="tokens holds 2 names, and the text 9"):
        flow_data(split_flow, ["a", "b"], direction="t3", k=5)
