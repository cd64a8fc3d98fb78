"""Visitors of one explorer at once: no click fails, and none shows what another has asked."""

import random
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from html import unescape
from itertools import product
from urllib.parse import urlencode

import pytest

from bilens.explore import explorer
from bilens.explore.app import Explorer
from bilens.explore.model_pages import ModelPages
from tests.explore.browser import served
from tests.explore.test_request_guard import ask
from tests.models import grammar_view

pytestmark = pytest.mark.long

VISITORS, CLICKS = 4, 40
TEXTS = (
    ("once lily ate", "once tom ate"),
    ("tom ate", "ben ate"),
    ("lily ate the kite", "ben ate the kite"),
    ("once ben saw", ""),
)
"""Of several lengths, so that what belongs to another text has another shape too."""
QUESTIONS = [
    {"prompt": prompt, "against": against, "token": token, "minus": "", "ablate": "2"}
    for (prompt, against), token in product(TEXTS, ("kite", "rice"))
]


def pages_of_a_model() -> ModelPages:
    return ModelPages(grammar_view(n_layers=2), None, (), {})


def clicks_of(site: ModelPages, question: dict[str, str]) -> list[str]:
    """Return what can be clicked of a question: its page, and removals of pinned nodes."""
    flow = site._read("flow", question.items()).flow
    names = [node.name(flow.tokens, flow.second) for node in flow.strongest(6) if node.is_removable]
    query = urlencode(question)
    pinned = [names[:1], names[1:2], names[:3]]
    removals = [f"{query}&{urlencode({'node': nodes}, doseq=True)}" for nodes in pinned]
    return [f"flow/page?{query}", *(f"flow/removed?{removal}" for removal in removals)]


def expected_of(site: ModelPages) -> dict[str, str]:
    """Return what each click shows, of a site that nobody else visits."""
    with served(Explorer(site, "alone")) as address:
        clicks = [click for question in QUESTIONS for click in clicks_of(site, question)]
        return {click: answered(address, click) for click in clicks}


def answered(address: str, click: str) -> str:
    status, text = ask(address, click)
    return unescape(text) if status == 200 else f"{status} {text}"


def wrong_clicks(site: ModelPages, expected: dict[str, str], n: int = CLICKS) -> list[str]:
    """Let visitors click side by side; return clicks that fail or show what another has asked."""

    def visit(number: int) -> list[str]:
        chosen = random.Random(number)
        # They begin together, with one question that nobody has asked yet.
        walk = [next(iter(expected)), *chosen.choices(list(expected), k=n - 1)]
        return [click for click in walk if answered(address, click) != expected[click]]

    with served(Explorer(site, "shared")) as address, ThreadPoolExecutor(VISITORS) as visitors:
        return [click for clicks in visitors.map(visit, range(VISITORS)) for click in clicks]


@pytest.fixture(scope="module")
def expected() -> dict[str, str]:
    return expected_of(pages_of_a_model())


def test_what_is_clicked_is_answered(expected):
    assert len(expected) == len(QUESTIONS) * 4
    assert len({*expected.values()}) == len(expected)
    assert not [answer for answer in expected.values() if answer[:1].isdigit()]


@pytest.mark.parametrize(("is_cached", "n"), [(True, CLICKS), (False, 5)])
def test_four_visitors_never_see_each_other(expected, is_cached, n, monkeypatch):
    if not is_cached:
        monkeypatch.setattr(ModelPages, "_reading", ModelPages._reading.__wrapped__)
    assert wrong_clicks(pages_of_a_model(), expected, n) == []


def test_a_slow_reading_does_not_hold_up_another_visitor(image_run):
    with closing(explorer(image_run)) as app:
        address = app.launch(wait=False)
        # Three of four places are taken.
        for _ in range(3):
            assert app.pages._free.acquire(timeout=1)
        assert ask(address, "explain/page?image=test-3")[0] == 200
