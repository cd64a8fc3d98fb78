"""What people type into the explorer, in a browser: it stays, and is shown when it fits."""

import threading
from typing import Any

import pytest

from bilens.explore.model_pages import ModelPages
from tests.explore.browser import NODE, box, submit

START = "flow?prompt=once+lily+ate&against=once+tom+ate&token=kite&minus=ball"
FIRST = {"prompt": "once lily ate", "against": "once tom ate", "token": "kite", "minus": "ball"}
QUESTION = "document.querySelector('main h1')?.innerText ?? ''"
LONG, SECOND = "once lily saw the kite", "once tom saw the kite"


def texts(page: Any) -> dict[str, str]:
    return {name: box(page, name).input_value() for name in FIRST}


def test_what_does_not_fit_stays_with_its_reason_and_the_picture_waits(language_site, visit):
    page = visit.open(language_site + START, NODE)
    for name, text, reason in (("token", "zebra", "token='zebra', expected a single token"),):
        before = page.inner_text("main h1")
        submit(box(page, name), text)
        visit.shows(".message", reason)
        assert texts(page) == FIRST | {name: text}
        assert page.inner_text("main h1") == before
        assert box(page, reason.partition(" ")[0].partition("=")[0]).get_attribute("aria-invalid")
        submit(box(page, name), FIRST[name])
        visit.wait("document.querySelector('.message').innerText === ''")
    submit(box(page, "prompt"), LONG)
    submit(box(page, "against"), SECOND)
    visit.wait(f"({QUESTION}).includes({SECOND!r})")
    assert texts(page) == FIRST | {"prompt": LONG, "against": SECOND}


def test_several_tokens_are_typed_with_commas(language_site, visit):
    page = visit.open(language_site + START, NODE)
    submit(box(page, "token"), "kite,rice")
    visit.wait(f"({QUESTION}).includes('rice')")


def test_texts_come_from_an_input_method_and_the_clipboard(language_site, visit):
    page = visit.open(language_site + START, NODE)
    box(page, "prompt").click()
    page.keyboard.press("Control+A")
    session = page.context.new_cdp_session(page)
    for state in ("on", "once be"):
        ends = {"selectionStart": len(state), "selectionEnd": len(state)}
        session.send("Input.imeSetComposition", {"text": state, **ends})
    session.send("Input.insertText", {"text": "once ben ate"})
    page.keyboard.press("Enter")
    visit.wait(f"({QUESTION}).includes('once ben ate')")
    box(page, "against").click()
    page.keyboard.press("Control+A")
    page.keyboard.insert_text("once the ate")
    page.get_by_role("button", name="Show", exact=True).click()
    visit.wait(f"({QUESTION}).includes('once the ate')")


@pytest.fixture
def gate(monkeypatch):
    """Return two events: a page has begun, and pages may end."""
    plain, begun, may_end = ModelPages.page, threading.Event(), threading.Event()

    def slow(site: ModelPages, *asked: Any) -> str:
        begun.set()
        assert may_end.wait(60)
        return plain(site, *asked)

    monkeypatch.setattr(ModelPages, "page", slow)
    may_end.set()
    yield begun, may_end
    may_end.set()


def test_text_that_is_typed_during_a_computation_stays(language_site, visit, gate):
    begun, may_end = gate
    page = visit.open(language_site + START, NODE)
    begun.clear(), may_end.clear()
    submit(box(page, "prompt"), "once ben ate")
    assert begun.wait(30)
    box(page, "prompt").type(" the")
    box(page, "against").fill("once")
    may_end.set()
    visit.wait(f"({QUESTION}).includes('once ben ate')")
    assert (box(page, "prompt").input_value(), box(page, "against").input_value()) == (
        "once ben ate the",
        "once",
    )


def test_the_last_of_several_requests_is_shown(language_site, visit, gate):
    begun, may_end = gate
    page = visit.open(language_site + START, NODE)
    begun.clear(), may_end.clear()
    submit(box(page, "token"), "rice")
    assert begun.wait(30)
    submit(box(page, "token"), "the")
    may_end.set()
    visit.wait(f"({QUESTION}).includes('\"the\"')")
    page.wait_for_timeout(500)
    assert '"the"' in page.inner_text("main h1")
    assert "token=the" in page.url


def test_back_a_reload_and_an_address_set_the_boxes(language_site, visit):
    page = visit.open(language_site + START, NODE)
    page.get_by_text("More options").click()
    submit(box(page, "replace"), "lily=ben")
    visit.shows(".message", "each name the second run")
    box(page, "against").fill("")
    submit(box(page, "replace"), "lily=ben")
    visit.wait("location.search.includes('replace=lily')")
    page.reload()
    page.wait_for_selector(NODE)
    assert box(page, "replace").input_value() == "lily=ben"
    assert box(page, "against").input_value() == ""
    box(page, "target").select_option("probability")
    visit.wait("location.search.includes('target=probability')")
    page.go_back()
    page.go_back()
    visit.wait(f"({QUESTION}).includes('once tom ate')")
    assert texts(page) == FIRST
    assert box(page, "target").input_value() == "logit"
    assert page.url.endswith(START)


def test_nodes_are_pinned_and_removed_and_pins_stay(language_site, visit):
    page = visit.open(language_site + START, NODE)
    visit.open_details()
    page.locator("main .flow svg").get_by_role("button").nth(1).focus()
    page.get_by_role("button", name="remove and run the model").click()
    visit.shows(".removed", "a change of")
    for row in (0, 1):
        page.locator(".list tr[data-node]").nth(row).click()
        page.locator("[data-do=pin]").click()
    page.get_by_role("button", name="remove pinned and run the model").click()
    visit.shows(".removed", " and ")
    pinned = page.locator(".flow .pinned title").all_text_contents()
    page.reload()
    page.wait_for_selector(".flow svg .pinned")
    assert page.locator(".flow .pinned title").all_text_contents() == pinned


def test_the_first_screen_is_one_question_with_boxes_in_a_line(language_site, visit):
    page = visit.open(language_site, NODE)
    places = [box(page, name).bounding_box() for name in FIRST]
    places.append(page.get_by_role("button", name="Show", exact=True).bounding_box())
    assert len({round(place["y"] + place["height"]) for place in places}) == 1
    left = page.locator("main h1").bounding_box()["x"]
    assert places[0]["x"] == pytest.approx(left, abs=1)
    assert page.locator("h1").count() == 1
    visit.fits_a_phone()
    assert page.locator("main h1").bounding_box()["y"] < 844


def test_a_reading_of_weights_has_its_own_address(language_site, visit):
    page = visit.open(language_site + "ngrams", "main table")
    submit(box(page, "token"), "kite")
    visit.wait(f"({QUESTION}).includes('kite')")
    assert page.url.endswith("/ngrams?token=kite")
    page.get_by_role("link", name="flow").click()
    page.wait_for_selector(NODE)
