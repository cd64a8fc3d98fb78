"""Six pages, wide and narrow, light and dark, closed and open: no fault of any text."""

import pytest
import torch

from bilens.analyses import language
from bilens.circuits import circuit
from bilens.flows import Question
from bilens.flows.summary import read_summary
from bilens.images import read_bonds
from bilens.language.names import shown_tokens
from bilens.pages import write_report
from tests.explore.browser import DRAWN, NODE, visiting
from tests.models import digits, grammar_view, small_corpus, small_model, view_of

ABOUT = "bilens circuit model.gguf --questions questions.tsv --level parts · 26 November 2026"


def flow_of_a_text():
    text = "t3 t4 t7 t5 t9 t8 t6 t3 t4 t7"
    asked = {"prompt": text, "token": "t8", "minus": "t9", "replace": "t5=t6"}
    return language.flow(view_of(n_layers=3), **asked)


def asked(task: str) -> list[Question]:
    words = [f"t{number}" for number in range(3, 10)]
    pairs = [(f"t3 {a} {b} t4", f"t3 {b} {a} t4") for a in words for b in words[:2] if a != b]
    return [Question(text, "t5", ("t6",), against, task=task) for text, against in pairs]


def circuit_of_tasks():
    model = view_of(n_layers=2)
    questions = []
    for task, token in (("agreement of number", "t7"), ("capitals", "t8"), ("gender", "t9")):
        for question in asked(task):
            # A circuit leaves out what the model answers otherwise.
            least = int(model.logits(model.ids(question.text)[None])[0, -1].argmin())
            (minus,) = shown_tokens(model, torch.tensor([least]))
            questions.append(Question(question.text, token, (minus,), question.against, task=task))
    return circuit(model, questions)


PAGES = {
    "flow": flow_of_a_text,
    "circuit": lambda: circuit(view_of(n_layers=2), asked("")),
    "tasks": circuit_of_tasks,
    "summary": lambda: read_summary(grammar_view(n_layers=2), small_corpus()),
    "classifier": lambda: read_bonds(small_model(2), digits()),
}
WINDOWS = [(1280, "light"), (1280, "dark"), (390, "light"), (390, "dark")]


@pytest.fixture(scope="module", params=PAGES)
def address(request, tmp_path_factory):
    path = tmp_path_factory.mktemp("pages") / f"{request.param}.html"
    write_report(path, [PAGES[request.param]()], title=ABOUT)
    return path.as_uri()


def faults(browser, address: str, ready: str, *buttons: str) -> list[str]:
    """Return what is wrong in every window, before and after buttons and sections are opened."""
    found = []
    for width, scheme in WINDOWS:
        with visiting(browser, width, scheme) as visit:
            page = visit.open(address, ready)
            page.wait_for_timeout(700)
            found += [f"{width} {scheme} closed: {fault}" for fault in visit.faults()]
            for button in buttons:
                page.get_by_role("button", name=button).click()
            visit.open_details()
            page.wait_for_timeout(700)
            found += [f"{width} {scheme} open: {fault}" for fault in visit.faults()]
    return found


def test_pages_have_no_faults(address, browser):
    assert faults(browser, address, f".flow svg .node, {DRAWN}") == []


def test_the_explorer_has_no_faults(language_site, browser):
    assert faults(browser, language_site, NODE, "Show") == []
