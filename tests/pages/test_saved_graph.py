"""A saved graph is opened as it was, shown, and continued with pins; bad files are named."""

import copy
import json

import pytest
import torch

import bilens
from bilens.cli import main
from bilens.convert import save_model
from bilens.errors import BilensError, CheckpointError
from bilens.flows import measure
from bilens.flows.question import Question
from bilens.flows.reading import answer_question
from bilens.pages import report
from bilens.pages.exporters import write_save_graph
from tests.families import family_view, tiny
from tests.models import TOKENS
from tests.refusals import refused

ASKED = Question("t3 t4 t5 t9", "t5", ("t6",), "t3 t7 t5 t9")


@pytest.fixture(scope="module")
def view():
    return family_view("gemma2")


@pytest.fixture(scope="module")
def reading(view):
    return answer_question(view, ASKED, shown=30, ablate=3)


@pytest.fixture(scope="module")
def path(reading, tmp_path_factory):
    path = tmp_path_factory.mktemp("graphs") / "graph.json"
    write_save_graph(reading, path, model="tiny")
    return path


def test_it_is_opened_as_it_was_saved(reading, path):
    graph = bilens.load_graph(path)
    live = reading.flow.top(30)
    assert {x.place: x.flow for x in graph.nodes} == {x.place: x.flow for x in live.nodes}
    kept = [
        (x.raises, x.measured, x.name(reading.flow.tokens, reading.flow.second))
        for x in reading.flow.nodes
    ]
    for node in graph.nodes[1:]:
        assert (node.raises, node.measured, node.name(graph.page.tokens, graph.page.second)) in kept
    # Edges below a thousandth of the largest are in no file.
    order = [[x.place for x in live.nodes].index(graph.nodes[i].place) for i in graph.shown]
    expected = live.edges[order][:, order]
    smallest = 1e-3 * float(live.edges.abs().max())
    assert float((graph.edges - expected).abs().max()) < smallest
    assert graph.page.value == reading.flow.value
    assert graph.frame()["flow"].abs().is_monotonic_decreasing


def test_pins_are_kept_and_are_nodes_of_the_model(view, reading, path, tmp_path):
    graph = bilens.load_graph(path)
    addresses = [node.address for node in graph.nodes[1:] if node.part][:3]
    graph.pin(*addresses[:2]).pin(addresses[2]).save(tmp_path / "pinned.json")
    pinned = bilens.load_graph(tmp_path / "pinned.json")
    assert {*pinned.pinned} == {*addresses}
    assert {pinned.nodes[i].address for i in pinned.shown[1:]} == {*addresses}
    nodes = [pinned.nodes[i] for i in pinned.shown[1:]]
    effects = measure(view, reading.flow, nodes)
    assert [x.predicted for x in effects] == [-node.flow for node in nodes]
    first, second = (json.loads(x.read_text()) for x in (path, tmp_path / "pinned.json"))
    ids = second["qParams"].pop("pinnedIds")
    assert {x["node_id"] for x in second["nodes"]} > {*ids} > set()
    assert first["qParams"].pop("pinnedIds") == []
    assert first == second


def test_a_command_shows_and_pins(tmp_path, capsys):
    save_model(tmp_path / "model", tiny("llama", dtype=torch.float32), TOKENS)
    saved, pinned = tmp_path / "graph.json", tmp_path / "pinned.json"
    asked = ["--prompt", "t3 t4 t5", "--token", "t5", "--against", "t3 t7 t5"]
    main(["flow", str(tmp_path / "model"), *asked, "--save-graph", str(saved)])
    address = bilens.load_graph(saved).nodes[1].address
    page, picture = tmp_path / "page.html", tmp_path / "graph.svg"
    outputs = ["--output", str(page), "--figure", str(picture), "--save-graph", str(pinned)]
    capsys.readouterr()
    main(["graph", str(saved), "--pin", address, *outputs])
    assert f"pinned {address}" in capsys.readouterr().out
    assert "Pinned nodes" in page.read_text()
    assert address in picture.read_text()
    assert bilens.load_graph(pinned).pinned == (address,)
    assert "<svg" in report([bilens.load_graph(pinned)], tmp_path / "own.html").read_text()


def changed(content, *keys, value):
    """Return a file of which one entry is another; None drops it."""
    content = copy.deepcopy(content)
    place = content
    for key in keys[:-1]:
        place = place[key]
    if value is None:
        del place[keys[-1]]
    else:
        place[keys[-1]] = value
    return content


PAGE = ("metadata", "generation_settings", "flow")
BAD = [
    (("nodes",), None),
    (PAGE, None),
    ((*PAGE, "nodes", 1, "flow"), "large"),
    ((*PAGE, "nodes", 1, "flow"), float("nan")),
    ((*PAGE, "nodes", 1, "kind"), "neuron"),
    ((*PAGE, "nodes", 1, "position"), 99),
    ((*PAGE, "nodes", 1, "further"), 1),
    ((*PAGE, "nodes"), []),
    ((*PAGE, "edges"), [[0, 999, 1.0]]),
    ((*PAGE, "tokens"), [1, 2]),
    (("qParams", "pinnedIds"), ["nowhere"]),
    (("qParams",), []),
]


@pytest.mark.parametrize(("keys", "value"), BAD)
def test_a_bad_file_is_named(keys, value, path, tmp_path):
    content = changed(json.loads(path.read_text()), *keys, value=value)
    (tmp_path / "bad.json").write_text(json.dumps(content))
    with pytest.raises(CheckpointError, match=r"bad\.json"):
        bilens.load_graph(tmp_path / "bad.json")


test_what_is_refused = refused(
    {
        "pin='mlp.9@9' is no node of the graph; expected one such as": lambda path: (
            bilens.load_graph(path).pin("mlp.9@9")
        ),
        "nowhere.json": lambda: bilens.load_graph("nowhere.json"),
    },
    BilensError,
)
