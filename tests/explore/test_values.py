"""Values that a browser may send: each control takes those of its kind and refuses others aloud."""

import math
from dataclasses import replace

import gradio as gr
import pytest

from bilens.explore.pages import ImagePage, LanguagePage
from bilens.explore.screen import Screen, StateError, write_address
from tests.models import digit_model, digits, grammar_view, small_corpus

NOTHING = (None, math.nan, math.inf, -math.inf, 10**400, b"a", (1,), object())
UNHASHABLE = ([3], [None], [["a"]], [math.nan], {}, {"path": "/etc/passwd"}, {1})
TEXTS = ("zebra", "x" * 10**5, "[" * 10**5, "\x00", "\ud800", "a\udfff", "1" * 5000)
"""Texts that are no token, and no word of the texts."""


@pytest.fixture(scope="module")
def screens() -> list[Screen]:
    texts = LanguagePage(grammar_view(n_layers=2), small_corpus())
    # Without a flow and a circuit, which take long.
    texts.start = replace(texts.start, circuit=False, flow_prompt="", flow_against="")
    with gr.Blocks():
        return [texts.screen(), ImagePage(digit_model(), digits()).screen()]


@pytest.fixture
def said(monkeypatch) -> list[str]:
    """Return the messages that are shown over the page."""
    messages: list[str] = []
    monkeypatch.setattr(gr, "Warning", messages.append)
    return messages


def sent(screen: Screen, field: str, value: object) -> tuple[object, str]:
    """Return the state after a control sent a value, and what was said beside it."""
    start = screen.view.start
    values = {n: c.write(getattr(start, n))["value"] for n, c in screen.controls.items()}
    updates = screen.on_change(start, *(values | {field: value}).values())
    beside = updates.get(screen.controls[field].component, {})
    return updates.get(screen.seen, start), beside.get("info") or beside.get("message") or ""


NUMBER, YES_OR_NO = (int, float), (bool,)
TAKEN = [(1e300, (float,)), (True, YES_OR_NO), (False, YES_OR_NO), (1, NUMBER), (0, NUMBER)]
VALUES = [*((value, ()) for value in (*NOTHING, *UNHASHABLE)), *TAKEN]


@pytest.mark.parametrize(("value", "kinds"), VALUES, ids=lambda value: f"{value!r:.20}")
def test_a_value_of_another_kind_is_refused_at_every_control(screens, said, value, kinds):
    """True is no number, and a number is not true."""
    for screen in screens:
        for field in screen.controls:
            said.clear()
            state, beside = sent(screen, field, value)
            taken = type(getattr(screen.view.start, field)) in kinds
            assert taken or state == screen.view.start, field
            assert taken or "is not" in " ".join([beside, *said]), field
            assert len(beside) < 300


@pytest.mark.parametrize("text", TEXTS, ids=lambda text: f"{text!r:.10}")
def test_a_text_that_names_nothing_is_refused_or_kept_in_the_address(screens, said, text):
    for screen in screens:
        for field, control in screen.controls.items():
            said.clear()
            # A choice of several sends a list.
            value = [text] if control.takes == (list,) else text
            state, beside = sent(screen, field, value)
            if state == screen.view.start:
                assert beside or said, field
            assert write_address(state, screen.view.start)
            assert len(beside) < 300


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"token": "lily", "minus": ("lily",)}, "minus"),
        ({"token": "lily", "minus": ("tom", "lily")}, "minus"),
        ({"flow_prompt": "tom ate", "flow_token": "lily", "flow_minus": ("lily",)}, "flow_minus"),
        ({"flow_prompt": "tom ate", "flow_minus": ("MOST LIKELY",)}, "flow_minus"),
    ],
)
def test_a_token_is_not_subtracted_from_itself(screens, changes, field):
    page = screens[0].view
    state = replace(page.start, **changes)
    if "MOST LIKELY" in state.flow_minus:
        likeliest = page.flows.direction(replace(state, flow_minus=()).flow).token
        state = replace(state, flow_minus=(likeliest,))
    with pytest.raises(StateError, match=f"^{field}: has the token '.*' itself, expected other"):
        page.checked(state)
