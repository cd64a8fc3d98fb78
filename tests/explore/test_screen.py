"""The state of a screen: requests are shown, and refusals appear beside the request."""

from dataclasses import asdict, dataclass
from typing import Any

import gradio as gr
import pytest

from bilens.explore.screen import LONGEST, Screen, StateError, check_ranges


@dataclass(frozen=True)
class State:
    saved: int = 3
    class_: int = 0
    word: str = "a"


class View:
    start = State()

    def checked(self, state: State) -> State:
        check_ranges(state, saved=(1, 9), class_=(0, 1))
        if state.word == "low" and state.saved > 5:
            raise StateError("saved", "low words take up to 5")
        return state


class Page:
    """A screen without a browser, and the contents of its components."""

    def __init__(self) -> None:
        self.shown: list[str] = []
        with gr.Blocks():
            self.screen = Screen(View())
            self.saved, self.word = gr.Slider(1, 9), gr.Textbox()
            self.number, self.all = gr.HTML(), gr.HTML()
            self.screen.control("saved", self.saved)
            self.class_ = self.screen.choice("class_", ["zero", "one"], label="Class")
            self.screen.control("word", self.word)
            self.screen.part("saved", [self.number], lambda s: [self._show(f"number {s.saved}")])
            self.screen.part("saved class_ word", [self.all], lambda s: [self._show(str(s))])
            self.screen.connect()

    def _show(self, text: str) -> str:
        self.shown.append(text)
        return text

    def change(self, seen: State, **asked: Any) -> dict[Any, Any]:
        return self.screen.on_change(seen, *(asdict(seen) | asked).values())


@pytest.fixture
def page() -> Page:
    return Page()


def test_only_what_depends_on_a_change_is_shown_again(page):
    updates = page.change(State(), word="b")
    assert page.shown == [str(State(word="b"))]
    assert updates[page.screen.seen] == State(word="b")
    assert updates[page.screen.bar]["value"] == "word=b"
    assert page.number not in updates
    page.change(State(), saved=5)
    assert page.shown[1:] == ["number 5", str(State(5))]
    assert page.change(State(4)) == {}
    assert len(page.shown) == 3


@pytest.mark.parametrize("saved", [0, 10, 2.5, True, {"path": "/etc/passwd"}])
def test_a_box_that_is_refused_goes_back_and_says_why(page, saved):
    reason = f"{saved} is not a whole number{' from 1 to 9' if type(saved) is int else ''}"
    assert page.change(State(4), saved=saved)[page.saved] == gr.update(value=4, info=reason)
    assert page.shown == []


def test_an_empty_box_is_left_to_be_filled(page):
    box = page.change(State(4), saved=None)[page.saved]
    assert box == gr.update(info="An empty box is not a whole number")


def test_one_refusal_does_not_hold_back_the_others(page):
    updates = page.change(State(), saved=99, class_="banana", word="b")
    assert updates[page.screen.seen] == State(word="b")
    assert updates[page.saved]["value"] == 3
    # What was typed stays, to be put right.
    assert "value" not in updates[page.class_]
    assert "banana is not one of the choices" in updates[page.class_]["info"]
    # What was said goes away with the next good value.
    assert page.change(State(), saved=5)[page.saved] == gr.update(info="")


def test_a_change_that_does_not_fit_another_field_is_refused(page):
    """The check names the field that has not changed, and the changed one says why."""
    updates = page.change(State(8), word="low")
    assert updates[page.word] == gr.update(info="low words take up to 5")
    assert page.screen.seen not in updates


def test_fields_that_belong_together_wait_for_each_other(page):
    page.screen.group = frozenset(("saved", "word"))
    updates = page.change(State(4), word="low", saved=8, class_=1)
    # One is refused, and the other one waits; a third field changes.
    assert updates[page.screen.seen] == State(4, 1)
    assert updates[page.saved] == gr.update(value=4, info="low words take up to 5")
    assert updates[page.word] == gr.update(info="Waits until the other boxes fit.")
    updates = page.change(State(4), word="low", saved=5)
    assert updates[page.screen.seen] == State(5, 0, "low")
    assert updates[page.word] == gr.update(info="")
    # What was said goes, too, where a box holds again what is shown.
    assert page.change(State(4))[page.word] == gr.update(info="")


def test_a_choice_is_known_by_its_name(page):
    assert page.change(State(), word=["b"])[page.word]["info"].endswith("is not a text")
    assert page.change(State(), class_="one")[page.screen.seen] == State(class_=1)


def test_an_address_sets_every_control(page):
    updates = page.screen.on_address("saved=7&class_=1&utm=x")
    controls = page.saved, page.class_, page.word
    assert [updates[control]["value"] for control in controls] == [7, 1, "a"]
    # Its parts are computed by the change that follows.
    assert page.shown == []
    assert page.screen.restored in updates
    page.change(State(), saved=7, class_=1)
    assert page.shown == ["number 7", str(State(7, 1))]


def test_the_first_view_is_computed_although_nothing_has_changed(page):
    updates = page.screen.on_change(None, 3, 0, "a")
    assert page.shown == ["number 3", str(State())]
    assert updates[page.screen.seen] == State()
    assert "value" not in updates[page.word]


def test_an_address_that_makes_no_sense_opens_the_first_view(page, monkeypatch):
    message = []
    monkeypatch.setattr(gr, "Warning", message.append)
    updates = page.screen.on_address("saved=<b>")
    assert updates[page.saved]["value"] == State().saved
    reason = "saved: &#x27;&lt;b&gt;&#x27; is not a whole number"
    assert message == [f"The address cannot be shown. {reason}"]


def test_what_is_too_long_for_an_address_is_left_out_and_said(page):
    state, bar = State(5, word="x" * (LONGEST + 1)), page.screen.bar
    update = page.change(State(), word=state.word, saved=5)[bar]
    assert update["value"] == "saved=5"
    assert update["note"] == "Too long for an address, and left out of it: word."
    assert page.change(state, word="b")[bar]["note"] == ""
