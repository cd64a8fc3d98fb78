"""The flow of a logit in the explorer: its split, its errors, and a browser."""

import json
import re
import threading

import pytest
import torch

from bilens.explore.flows import LARGEST, FlowRequest, FlowView, _minus
from bilens.explore.screen import StateError
from bilens.flows import flow, remove
from bilens.language import TokenDirection
from bilens.sections import signed
from tests.explore.browser import NODE, box, submit
from tests.models import grammar_view

TEXT = "once lily ate"


def test_the_graph_is_that_of_the_flow(flows):
    text, graph = flows.page(FlowRequest(TEXT, "lily", ("tom", "ben")))
    expected = flow(flows.model, TEXT, TokenDirection("lily", ("tom", "ben")))
    assert json.loads(graph)["value"] == pytest.approx(expected.value)
    assert "Of &quot;lily&quot;, &quot;tom&quot; and &quot;ben&quot; the model prefers " in text
    difference = f"&quot;lily&quot; minus the mean of the others is {expected.value:+.3g}"
    assert f"{difference}. The value starts" in text
    assert "Held fixed: " in text


def test_tokens_to_subtract_are_written_and_read_as_on_the_command_line():
    texts = 'tom,","', ",", ""
    assert [_minus(text) for text in texts] == [("tom", ","), (",",), ()]
    with pytest.raises(StateError, match="flow_minus: 'tom,,' has an empty name"):
        _minus("tom,,")


@pytest.mark.parametrize(
    ("options", "against"),
    [
        ({"against": "once tom ate"}, "once tom ate"),
        ({"replace": "lily=tom"}, "once tom ate"),
        ({"against": "once tom ate|once ben ate"}, ["once tom ate", "once ben ate"]),
        ({"mean": True}, None),
        ({"against": "once tom ate", "target": "log-probability"}, "once tom ate"),
        ({"replace": "lily=tom", "target": "probability"}, "once tom ate"),
    ],
)
def test_the_second_run_is_given_in_the_ways_of_the_command(flows, options, against):
    of = FlowRequest(TEXT, "lily", ("tom",), **options)
    flows.check(of)
    text, graph = flows.page(of)
    against = flows.model.W_E.mean(0) if against is None else against
    target = options.get("target", "logit")
    expected = flow(flows.model, TEXT, "lily", minus="tom", against=against, target=target)
    content = json.loads(graph)
    assert content["value"] == pytest.approx(expected.value)
    assert content["values"] == pytest.approx(expected.values)
    assert content["number"].startswith(target) == (target != "logit")
    assert re.search(r"The model prefers .* by \S+ and .*; the difference changes by", text)
    assert next(node for node in content["nodes"] if node["kind"] == "head")["removable"]


def test_the_mean_is_that_of_the_texts():
    texts = [torch.tensor([3, 4, 5]), torch.tensor([6, 7])]
    view = FlowView(grammar_view(n_layers=2), TEXT, texts)
    _, graph = view.page(FlowRequest(TEXT, "lily", mean=True))
    mean = view.model.W_E[3:8].mean(0)
    expected = flow(view.model, TEXT, view.direction(FlowRequest(TEXT, "lily")), against=mean)
    assert json.loads(graph)["value"] == pytest.approx(expected.value)


def test_without_tokens_it_is_the_likeliest_minus_the_next(flows):
    _, graph = flows.page(FlowRequest(TEXT))
    best = flows.model.logits(flows.model.ids(TEXT)[None])[0, -1].topk(2)
    names = flows.model.tokenizer.convert_ids_to_tokens(best.indices.tolist())
    assert json.loads(graph)["number"] == f'"{names[0]}" minus "{names[1]}"'
    assert json.loads(graph)["value"] == pytest.approx(float(best.values[0] - best.values[1]))


@pytest.mark.parametrize(("count", "against"), [(1, ""), (3, "once tom ate")])
def test_nodes_are_removed_from_the_running_model(flows, count, against):
    of = FlowRequest(TEXT, "lily", against=against)
    reading = flows.split(of)
    names = tuple([node.name for node in reading.page.nodes if node.removable][:count])
    removed = [node for node in reading.flow.nodes if node.name(reading.flow.tokens) in names]
    result = remove(flows.model, reading.flow, removed)
    message = flows.removed(of, names)
    assert f"a change of {result.actual:+#.3g}. The flow" in message
    assert f"predicts {result.predicted:+#.3g}" in message
    if count > 1:
        assert f"and {signed(reading.flow.value + result.actual, '#.3g')} without" in message
    logit = reading.page.nodes[0].name
    assert flows.removed(of, ("no such node",)) == flows.removed(of, (logit,)) == ""
    assert flows.removed(FlowRequest("", "lily"), names[:1]) == ""


def test_tokens_that_come_twice_are_told_apart(flows):
    names = [node.name for node in flows.split(FlowRequest("lily ate lily ate", "kite")).page.nodes]
    assert len({*names}) == len(names)
    expected = {f'token@{number} "{name}"' for number, name in enumerate(["lily", "ate"] * 2)}
    assert {name for name in names if name.startswith("token@")} == expected


def test_what_would_take_minutes_is_refused(flows, monkeypatch):
    n = len(flows.model.ids(TEXT))
    assert flows.start == TEXT
    monkeypatch.setattr(flows, "cost", LARGEST / (n - 1))
    message = rf"{n} tokens would take minutes: .* width 16 up to {n - 1} are split here"
    with pytest.raises(StateError, match=message):
        flows.check(FlowRequest(TEXT))
    flows.check(FlowRequest(""))
    assert "press Enter" in flows.page(FlowRequest(""))[0]
    with pytest.raises(StateError, match=r"second 2 tokens \|once\|lily\|\. The"):
        flows.check(FlowRequest(TEXT, against="once lily"))


def test_a_large_model_waits_for_a_text(flows, monkeypatch):
    monkeypatch.setattr("bilens.explore.flows.AT_ONCE", 1.0)
    assert FlowView(flows.model, TEXT).start == ""


def test_a_flow_is_followed_in_the_browser(language_site, visit):
    page = visit.open(language_site, NODE)
    submit(box(page, "token"), "kite")
    visit.shows("#flow-text", "kite")
    # The second text of the example has another length.
    box(page, "against").fill("")
    submit(box(page, "prompt"), "once lily lost the kite and ate")
    visit.wait(f"{LAST} === '\"ate\"'")
    visit.open_details()
    visit.shows("#flow .list", "kite")
    # Screen readers find the nodes by what they are called.
    page.locator("#flow svg").get_by_role("button").nth(1).focus()
    page.get_by_role("button", name="remove and run the model").click()
    visit.shows("#flow-removed", "a change of")
    # Several nodes are pinned, and removed together.
    for row in (0, 1):
        page.locator("#flow .list tr[data-node]").nth(row).click()
        page.locator("#flow [data-do=pin]").click()
    page.get_by_role("button", name="remove pinned and run the model").click()
    visit.shows("#flow-removed", " and ")
    # The second run has words replaced, or is a mean, and its probability is split.
    page.get_by_role("button", name="Other second runs").click()
    submit(box(page, "replace"), "kite=ball")
    visit.shows("#flow-text", "and changes by")
    page.locator("#flow-target input").click()
    page.get_by_role("option", name="probability", exact=True).click()
    visit.shows("#flow-text", "probability")
    page.locator("#flow-mean input").check()
    visit.shows("#flow-mean", "each name")
    # What is not a token is said where it was typed, and the graph stays.
    submit(box(page, "token"), "zebra")
    visit.shows("#flow-token", "single token")
    assert "kite" in page.locator("#flow-text").inner_text()
    assert box(page, "token").input_value() == "zebra"
    visit.fits_a_phone()


@pytest.fixture
def gate(monkeypatch):
    """Return two events: a flow has begun, and flows may end."""
    plain, begun, may_end = FlowView.page, threading.Event(), threading.Event()

    def slow(view, of):
        begun.set()
        assert may_end.wait(60)
        return plain(view, of)

    monkeypatch.setattr(FlowView, "page", slow)
    may_end.set()
    yield begun, may_end
    may_end.set()


LAST = "[...document.querySelectorAll('#flow text.token')].at(-1)?.firstChild?.textContent"
ASKED = "new URLSearchParams(location.search).get('flow_prompt')"


def test_text_that_is_typed_during_a_computation_stays(language_site, visit, gate):
    begun, may_end = gate
    page = visit.open(language_site + "?flow_against=", NODE)
    prompt, against = box(page, "prompt"), box(page, "against")
    begun.clear(), may_end.clear()
    submit(prompt, TEXT)
    assert begun.wait(30)
    prompt.type(" the")
    against.fill("once tom")
    may_end.set()
    visit.wait(f"{ASKED} === {TEXT!r}")
    page.wait_for_timeout(500)
    assert (prompt.input_value(), against.input_value()) == (f"{TEXT} the", "once tom")


def test_back_and_a_reload_set_the_fields_before_the_flow_is_computed(language_site, visit, gate):
    begun, may_end = gate
    page = visit.open(language_site + "?flow_token=kite&flow_against=", NODE)
    prompt, token = box(page, "prompt"), box(page, "token")
    start = prompt.input_value()
    submit(prompt, TEXT)
    visit.wait(f"{ASKED} === {TEXT!r}")
    for step in (page.go_back, page.reload):
        begun.clear(), may_end.clear()
        step()
        visit.wait(f"document.querySelector('#flow-prompt textarea')?.value === {start!r}")
        assert begun.wait(30)
        assert token.input_value() == "kite"
        token.fill("lily")
        may_end.set()
        visit.wait(f"{LAST} === '\"{start.split()[-1]}\"'")
        page.wait_for_timeout(500)
        assert token.input_value() == "lily"
    token.press("Enter")
    visit.shows("#flow-text", "lily")


def test_pinned_nodes_are_pinned_after_a_reload(language_site, visit):
    page = visit.open(language_site, NODE)
    visit.open_details()
    page.locator("#flow .list tr[data-node]").nth(1).click()
    page.locator("#flow [data-do=pin]").click()
    (name,) = page.locator("#flow .pinned title").all_text_contents()
    page.reload()
    page.wait_for_selector("#flow svg .pinned")
    assert page.locator("#flow .pinned title").all_text_contents() == [name]
    page.locator("#flow [data-do=clear]").click()
    page.reload()
    page.wait_for_selector(NODE)
    assert page.locator("#flow svg .pinned").count() == 0
