"""The page of a flow holds the graph and its description, adds up, and escapes all text."""

import json
import re
from dataclasses import asdict, replace

import pytest
import torch

from bilens.figures.sheet import own_style
from bilens.flows import flow
from bilens.flows.ablation import Ablation
from bilens.flows.question import Question
from bilens.flows.reading import FlowReading, flow_page
from bilens.language.names import token_text
from bilens.pages import save_figure, write_report
from bilens.pages.flows import ablation_figure, node_table, start_table
from bilens.transformer.parts import Part
from tests.explore.browser import DRAWN, visiting
from tests.models import random_text, view_of
from tests.pages.test_figures import texts_of

TOKENS = (*(f" w{i}" for i in range(8)), "</script><b>")
OTHER = "t1 t4 t7 t2 t2 t9 t3 t8 t1"


@pytest.fixture(scope="module")
def split_flow():
    view = view_of(n_layers=2, bias=True)
    return replace(flow(view, random_text(), "t3", minus="t4", ablate=20), tokens=TOKENS)


@pytest.fixture(scope="module")
def content(split_flow):
    return flow_page(split_flow.top(25), metric="t3 minus t4")


def test_nodes_stand_by_strength_with_what_they_hold(split_flow, content):
    output, *nodes = content.nodes
    assert output.kind == "output"
    assert [node.flow for node in nodes] == [node.flow for node in split_flow.nodes[:25]]
    flows = [abs(node.flow) for node in nodes]
    assert flows == sorted(flows, reverse=True)
    for count, share in content.shares:
        assert share == pytest.approx(split_flow.top(count).share_of_logit)
    assert content.shares[-1][0] == 25
    # A page opens with the nodes of a picture.
    assert content.shares[content.start][0] == 20
    assert content.n_nodes == len(split_flow.nodes) > 25


def test_edges_are_those_of_the_graph(split_flow, content):
    graph = split_flow.top(25)
    order = sorted(range(26), key=lambda i: (i > 0, -abs(graph.nodes[i].flow)))
    dense = torch.zeros(26, 26, dtype=torch.float64)
    for a, b, value in content.edges:
        dense[a, b] = value
    largest = float(graph.edges.abs().max())
    torch.testing.assert_close(dense, graph.edges[order][:, order], rtol=0, atol=1e-3 * largest)
    assert json.loads(json.dumps(asdict(content)))["edges"]


def test_labels_are_explained_only_where_nodes_have_them(split_flow, content):
    """Those of texts of unlike length have none."""
    for effect in ("raises a", ""):
        nodes = tuple(replace(node, effect=effect) for node in content.nodes)
        sections = reading_of(split_flow, replace(content, nodes=nodes)).sections()
        assert any("(raises)" in section.text for section in sections) is bool(effect)


def test_every_table_adds_up(split_flow, content):
    total = sum(node.flow for node in split_flow.nodes)
    assert node_table(split_flow, content)["flow"].sum() == pytest.approx(total)
    starts = start_table(content)["flow"].tolist()
    assert sum(starts[:-1]) == pytest.approx(starts[-1]) == pytest.approx(split_flow.value)


def test_names_are_addresses_with_tokens_in_quotes(content):
    heads = [node.name for node in content.nodes if node.name.startswith("head.")]
    assert heads
    assert all(re.fullmatch(r'head\.\d\.\d@\d "[^"]+" → "[^"]+"', name) for name in heads)


def reading_of(split, content):
    question, parts = Question("<i>a</i>", "t3", ("t4",), "b"), (Part("mlp", 0), Part("mlp", 1))
    return FlowReading(split, question, content, 0.1, parts, -0.9, ("t4", "t4"))


def test_the_page_begins_with_the_question_and_its_answer(split_flow, content):
    first, holds, *others = reading_of(split_flow, content).sections()
    assert first.title == 'What changes "t3" minus "t4" from “b” to “<i>a</i>”?'
    assert len(f"{first.title} {first.text}".split()) <= 55
    first_value, second_value = (f"{-value:.3g}" for value in split_flow.values)
    preference = f'The model prefers "t4" after both texts, by {first_value} and {second_value}; '
    assert first.text.startswith(preference)
    value = split_flow.value
    left = (
        f"with the 2 strongest parts exchanged the change is {value - 0.9:+.3g}, not {value:+.3g}."
    )
    assert first.text.endswith(left)
    assert "With all 2 heads and MLPs of the picture at once" in holds.text
    assert holds.text.endswith(f"the change is {value - 0.9:+.3g}.")
    assert all(section.folded for section in others)


def test_the_page_holds_everything_and_escapes_it(split_flow, content, tmp_path):
    reading, path = reading_of(split_flow, content), tmp_path / "flow.html"
    write_report(path, [reading], title=reading.title)
    page = path.read_text()
    [packed] = re.findall(r'<div class="flow"><script type="application/json">(.*?)</script>', page)
    assert json.loads(packed)["nodes"] == json.loads(json.dumps(asdict(content)))["nodes"]
    assert "</script><b>" not in page
    assert "<i>a</i>" not in page
    assert "How well it holds" in page
    assert not re.search(r'src="https?:', page)


def test_interventions_are_drawn_by_kind():
    """With the flow and the effect of a part: minus the changes without it."""
    results = [Ablation(-0.5, -0.4, "<h>", "head"), Ablation(-1, -1.5, "i", "head")]
    figure = ablation_figure([*results, Ablation(1.0, 0.9, "t", "token")])
    (axes,) = figure.axes
    assert (axes.get_xlabel(), axes.get_ylabel()) == ("flow", "measured effect")
    line, head, token = axes.lines
    assert head.get_xydata().tolist() == [[0.5, 0.4], [1, 1.5]]
    assert "<h>" in texts_of(figure)
    assert token.get_label() == "token"
    assert line.get_xydata().tolist() == [[-1.0, -1.0], [1.5, 1.5]]
    expected = torch.tensor([[0.5, 1, -1], [0.4, 1.5, -0.9]]).corrcoef()[0, 1]
    assert f"correlation {float(expected):.2f}" in figure.get_suptitle()


def test_labels_of_interventions_do_not_overlap():
    near = [Ablation(-1 - i / 100, -1.0, f"head.0.{i}@3 a", "head") for i in range(5)]
    figure = ablation_figure([*near, Ablation(1.0, 0.9, "token@1 b", "token")])
    # At the left of all but the first are others, so that labels are above and below. The strongest
    # has the side that the line does not cross.
    sides = {text.get_text(): (text.get_ha(), text.get_va()) for text in figure.axes[0].texts}
    assert sides == {
        "head.0.0@3": ("right", "center"),
        "head.0.3@3": ("right", "top"),
        "head.0.4@3": ("right", "bottom"),
        "token@1": ("left", "center"),
    }
    assert len(ablation_figure([]).axes[0].lines) == 1


def test_the_figure_has_heads_as_lines_and_all_labels(split_flow):
    graph = split_flow.top(25)
    figure = graph.plot()
    moving = [n for n in graph.nodes if n.kind == "head" and n.source != n.position]
    (axes,) = figure.axes
    lines = [line for line in axes.lines if len(line.get_xdata()) == 2]
    assert len(lines) == len(moving) > 0
    assert len(axes.lines) == len(lines) + 26
    assert len(axes.texts) == 21
    # Tokens without a node are marked.
    used = {p for node in graph.nodes for p in (node.position, node.source)} - {None}
    names = [label.get_text() for label in axes.get_xticklabels()]
    assert len([name for name in names if name != "⋯"]) == len(used)
    assert ("⋯" in names) == (len(used) < len(split_flow.tokens))


@pytest.mark.parametrize("points", [240, 500])
@pytest.mark.parametrize("count", [3, 12, 25])
def test_labels_have_room_and_can_be_read(split_flow, points, count):
    pixels = round(points * 96 / 72)
    words, strongest = ("understanding", "the"), split_flow.strongest(count)
    named = tuple(replace(node, raises=words, measured=node.flow) for node in strongest)
    graph = replace(split_flow, named=named).top(count)
    with own_style():
        (axes,) = graph.plot(width=pixels).axes
        labels = [text for text in axes.texts if text.get_text()]
        boxes = [text.get_window_extent() for text in labels]
    assert len(labels) == min(count, 20) + 1
    assert min(text.get_fontsize() for text in [*labels, *axes.get_xticklabels()]) >= 6
    assert all(0 <= box.x0 <= box.x1 <= pixels for box in boxes)
    marks = [line for line in axes.lines if len(line.get_xdata()) == 1]
    marks = axes.transData.transform([line.get_xydata()[0] for line in marks])
    for i, box in enumerate(boxes):
        assert not any(box.overlaps(other) for other in boxes[:i])
        # A label is beside its own node, and covers none.
        assert not any(box.contains(x, y) for x, y in marks)


def test_the_figure_is_a_file(split_flow, tmp_path):
    split = replace(split_flow, tokens=(token_text("\x0b"), *TOKENS[1:]))
    save_figure(split.top(9).plot(), tmp_path / "flow.svg")
    assert "&lt;/script&gt;&lt;b&gt;" in (tmp_path / "flow.svg").read_text()


def test_names_of_tokens_are_text():
    names = ["Ġkeys", "▁keys", "Ċ", "\x0b", "âĢĵ", "Ã", "plain"]
    expected = [" keys", " keys", "\\n", "\\x0b", "–", "Ã", "plain"]
    assert [token_text(name) for name in names] == expected


GAPS = """[...document.querySelectorAll('.moves line')]
    .map((line) => line.x1.baseVal.value - line.x2.baseVal.value)"""
CROSSED = """[...document.querySelectorAll('.graph .label')].flatMap((label, i, labels) => {
    const at = label.getBBox(), middle = at.y + at.height / 2;
    const over = (x, end, y, by) => x < at.x + at.width && end > at.x && Math.abs(y - middle) < by;
    const lines = [...document.querySelectorAll('.moves line')].map((l) => l.getBBox());
    const others = labels.slice(0, i).map((other) => other.getBBox());
    return [...lines.filter((l) => over(l.x, l.x + l.width, l.y, 4)),
        ...others.filter((o) => over(o.x, o.x + o.width, o.y + o.height / 2, 12))]
        .map(() => label.textContent);
})"""
READY, CELLS = ".flow svg .node", ".list tbody tr:not(.sum) td"


@pytest.fixture(scope="module")
def page_of_two_texts(view, tmp_path_factory):
    split = flow(view, random_text(), "t3", minus="t4", against=OTHER, ablate=20)
    content = flow_page(split.top(40), metric="t3 minus t4")
    path = tmp_path_factory.mktemp("page") / "flow.html"
    write_report(path, [reading_of(split, content)], title="a")
    return split, path.as_uri()


@pytest.fixture
def visit(page_of_two_texts, browser):
    with visiting(browser, width=1400) as visit:
        visit.open(page_of_two_texts[1], READY)
        yield visit


def test_lists_on_the_page_add_up_and_are_sorted(page_of_two_texts, visit):
    page = visit.page
    visit.open_details()
    values = page.locator(".panel table").first.locator("td:first-child").all()
    *parts, total = [float(cell.text_content()) for cell in values]
    # Numbers have three digits.
    assert sum(parts) == pytest.approx(total, abs=0.01 * sum(map(abs, parts)))
    assert total == pytest.approx(page_of_two_texts[0].value, rel=0.01)
    page.locator(".list th button", has_text="node").click()
    names = page.locator(f"{CELLS}:first-child").all_text_contents()
    assert names == page.evaluate("(names) => names.sort((a, b) => a.localeCompare(b))", names)
    page.locator(".list th button", has_text="flow").click()
    flows = page.locator(f"{CELLS}:nth-child(2)").all_text_contents()
    sizes = [abs(float(value)) for value in flows]
    assert len(sizes) > 10
    assert sizes == sorted(sizes, reverse=True)
    assert "sorted by |flow|" in page.locator(".list caption").text_content()
    visit.fits()


def test_the_graph_shows_movement_and_nothing_covers_it(visit):
    page = visit.page
    visit.open_details()
    graph, panel = (page.locator(f".flow .{part}").bounding_box() for part in ("graph", "panel"))
    assert graph["x"] + graph["width"] <= panel["x"]
    gaps = page.evaluate(GAPS)
    assert gaps
    assert all(gaps)
    assert page.locator(".ways path").count() > 5
    assert page.locator(".graph .label").count() == 21
    # Also where labels of nodes at one position are many.
    page.locator("input[type=range]").press("End")
    for number in range(30):
        page.locator(".list tr[data-node]").nth(number).click()
        page.locator("[data-do=pin]").click()
    assert page.locator(".graph .label").count() > 25
    assert page.evaluate(CROSSED) == []
    scale = page.locator(".graph svg > g").first.get_attribute("transform")
    page.locator("[data-do=in]").click()
    assert page.locator(".graph svg > g").first.get_attribute("transform") != scale
    with page.expect_download() as download:
        page.locator("[data-do=svg]").click()
    assert "stroke-width" in download.value.path().read_text()
    visit.fits_a_phone()


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1280, 390])
def test_no_text_is_covered_cut_off_or_hard_to_read(page_of_two_texts, browser, width, scheme):
    """Wherever the slider is, and with all sections and the table open."""
    with visiting(browser, width, scheme) as visit:
        page = visit.open(page_of_two_texts[1], READY)
        for place in ("Home", "End"):
            page.locator("input[type=range]").press(place)
            assert visit.faults() == []
        page.locator(".list tr[data-node]").first.evaluate("(row) => row.click()")
        visit.open_details()
        page.wait_for_selector(DRAWN)
        page.wait_for_timeout(500)
        assert visit.faults() == []


PAPER = """() => {
    const main = document.querySelector("main"), end = main.getBoundingClientRect().right;
    const all = [...main.querySelectorAll("svg")].filter((e) => e.checkVisibility());
    return all.every((e) => e.getBoundingClientRect().right <= end + 1) ? end : -1;
}"""


def test_on_paper_everything_is_open_and_as_wide_as_paper(visit):
    page = visit.page
    page.wait_for_selector(DRAWN, state="attached")
    page.evaluate("dispatchEvent(new Event('beforeprint'))")
    assert page.locator("section > details:not([open])").count() == 0
    assert page.evaluate(PAPER) == 680
    page.evaluate("dispatchEvent(new Event('afterprint'))")
    assert page.locator("section > details[open]").count() == 0
    assert page.locator("main").bounding_box()["width"] > 1000


def test_nodes_are_pinned_grouped_and_searched(page_of_two_texts, visit):
    split, page = page_of_two_texts[0], visit.page
    visit.open_details()
    page.on("dialog", lambda dialog: dialog.accept("both of them"))
    page.locator("input[type=range]").press("End")
    for _ in range(2):
        page.locator(".list tr[data-node]:not(.done)").first.click()
        page.locator("[data-do=pin]").click()
        page.evaluate("document.querySelectorAll('.list tr.chosen').forEach((t) => t.remove())")
    page.locator("[data-do=group]").click()
    page.wait_for_selector(".node.group", state="attached")
    page.locator(".node.group").click()
    message = page.locator(".panel h3").text_content()
    assert "both of them" in message
    names = re.search(r"group of (.*)", page.locator(".panel").inner_text())[1].split("; ")
    pair = [node for node in split.nodes if node.name(split.tokens, split.second) in names]
    assert len(pair) == 2
    # A group's flow is that which leaves it.
    expected = sum(node.flow for node in pair) - float(split.edges(pair).sum())
    assert float(message.split()[0]) == pytest.approx(expected, rel=0.01, abs=1e-4)
    page.locator("[data-do=only]").click()
    assert page.locator(".graph .node").count() == 2  # the group and the logit
    page.locator("[data-do=clear]").click()
    page.locator("input[type=search]").fill("head.")
    missed, heads = (page.locator(f".graph {which}").count() for which in (".missed", ".head"))
    assert heads
    assert missed + heads == page.locator(".graph .node").count()
