"""Clicks on a flow, as handlers of the screen receive them, for four visitors."""

import json
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from html import escape

import pytest

from bilens.explore.flows import FlowRequest
from bilens.explore.pages import LanguagePage, LanguageState
from bilens.explore.screen import AT_ONCE, Screen, write_address
from bilens.flows import remove
from bilens.lazy_imports import gradio as gr
from tests.models import grammar_view, small_corpus

TEXTS = ["once lily ate", "tom ate", "lily ate lily", "once ben ate ben"]


@pytest.fixture(scope="module")
def screen() -> Screen:
    # Without a tensor there are no panels, which other tests open.
    page = LanguagePage(grammar_view(n_layers=2, mlp="swiglu"), small_corpus())
    page.start = replace(page.start, circuit=False)
    with gr.Blocks():
        return page.screen()


class Visitor:
    """A browser: values of the controls, the hidden state, and all values that are shown."""

    def __init__(self, screen: Screen) -> None:
        self.screen, self.shown = screen, {screen.seen: None}
        self.opens("")

    @property
    def state(self) -> LanguageState:
        """The state that the server keeps for this visitor."""
        return self.shown[self.screen.seen]

    def asks(self, text: str, token: str = "lily") -> set[str]:
        """Ask for the flow of a text without a second one."""
        return self.sets(flow_prompt=text, flow_token=token, flow_against="")

    def opens(self, query: str) -> None:
        """Open an address: its fields are set first, and then its view is computed from them."""
        fields = self.screen.on_address(query)
        values = (fields[c.component].get("value") for c in self.screen.controls.values())
        self._show(self.screen.on_change(self.state, *values))

    def _show(self, updates) -> None:
        values = {}
        for component, update in updates.items():
            if not isinstance(update, dict):
                values[component] = update
            elif "value" in update or "graph" in update:
                values[component] = update.get("value", update.get("graph"))
        self.shown |= values
        self.updated = {getattr(c, "elem_id", None) for c in values}

    def sets(self, **values) -> set[str]:
        """Set controls, and return the names of the components that get another value."""
        controls = self.screen.controls.items()
        given = {name: c.write(getattr(self.state, name)).get("value") for name, c in controls}
        self._show(self.screen.on_change(self.state, *(given | values).values()))
        return self.updated

    def page(self, name: str):
        """Return the value of a component, by its name on the page."""
        (value,) = (v for c, v in self.shown.items() if getattr(c, "elem_id", None) == name)
        return value


@pytest.fixture
def visitor(screen) -> Visitor:
    """Return a visitor who has asked for a flow."""
    visitor = Visitor(screen)
    visitor.asks(TEXTS[0])
    return visitor


def removable(graph: str) -> list[str]:
    return [node["name"] for node in json.loads(graph)["nodes"] if node["removable"]]


def test_a_click_on_a_node_removes_it_and_leaves_the_graph(screen, visitor):
    graph = visitor.page("flow")
    assert json.loads(graph)["number"] == '"lily"'
    name = next(name for name in removable(graph) if name.endswith(' "once"'))
    updated = visitor.sets(removed=json.dumps([name]))
    split = screen.view.flows.split(FlowRequest(TEXTS[0], "lily")).flow
    (node,) = (node for node in split.nodes if node.name(split.tokens) == name)
    result = remove(screen.view.model, split, [node])
    expected = f"without {escape(result.part)}: a change of {result.actual:+#.3g}."
    assert expected in visitor.page("flow-removed")
    assert not updated & {"flow", "flow-text"}
    # Another text has other nodes, and the sentence on the old one goes.
    assert {"flow", "flow-removed"} <= visitor.sets(flow_prompt=TEXTS[1])
    assert visitor.page("flow-removed") == ""
    assert [t for t in json.loads(visitor.page("flow"))["tokens"] if t != "[BOS]"] == ["tom", "ate"]


def test_a_click_that_cannot_be_followed_changes_nothing_but_its_message(visitor):
    before = visitor.state
    assert "flow" not in visitor.sets(flow_token="zebra")
    assert visitor.state == before
    assert visitor.sets(removed=json.dumps(["no such node"]))
    assert visitor.page("flow-removed") == ""


def test_an_address_restores_the_view_for_another_visitor(screen, visitor):
    query, left_out = write_address(visitor.state, screen.view.start)
    assert left_out == []
    other = Visitor(screen)
    other.opens(query)
    assert other.state == visitor.state
    assert other.page("flow") == visitor.page("flow")


@pytest.mark.slow
def test_four_visitors_at_once_see_each_their_own(screen):
    """Removing a node hooks modules: the pages are those of visitors who come one by one."""

    def clicks(text: str, meet) -> list[str]:
        visitor, pages = Visitor(screen), []
        for token in ("lily", "ate"):
            meet()
            visitor.asks(text, token)
            pages.append(visitor.page("flow"))
            for name in removable(pages[-1])[:2]:
                meet()
                visitor.sets(removed=json.dumps([name]))
                pages.append(visitor.page("flow-removed"))
            assert visitor.state == replace(visitor.state, flow_prompt=text, flow_token=token)
        return pages

    assert len(TEXTS) == AT_ONCE
    alone = [clicks(text, lambda: None) for text in TEXTS]
    for cache in (type(screen.view.flows).direction, type(screen.view.flows).split):
        cache.cache_clear()
    barrier = threading.Barrier(AT_ONCE, timeout=600)
    with ThreadPoolExecutor(AT_ONCE) as pool:
        together = list(pool.map(lambda text: clicks(text, barrier.wait), TEXTS))
    assert together == alone
    assert len({page for pages in alone for page in pages}) > 3 * AT_ONCE
