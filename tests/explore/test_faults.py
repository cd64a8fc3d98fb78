"""Six pages, wide and narrow, light and dark, closed and open: no fault of any text."""

from pathlib import Path

import pytest
import torch

from bilens.pages import write_report
from bilens.read import read_bonds
from bilens.read.flow import Question, circuit, read_flow
from bilens.read.language import TokenDirection
from bilens.read.language.names import shown_tokens
from bilens.read.summary import read_summary
from tests.explore.browser import visiting
from tests.models import digits, grammar_view, small_corpus, small_model, view_of

ABOUT = "bilens circuit model.gguf --questions questions.tsv --level parts · 26 November 2026"


def flow_page(path: Path) -> None:
    text = "t3 t4 t7 t5 t9 t8 t6 t3 t4 t7"
    reading = read_flow(
        view_of(n_layers=3),
        text,
        TokenDirection("t8", ("t9",)),
        replace="t5=t6",
        weights=("mlp.0",),
    )
    write_report(path, [reading], title=ABOUT)


def asked(task: str) -> list[Question]:
    words = [f"t{number}" for number in range(3, 10)]
    return [
        Question(f"t3 {a} {b} t4", "t5", ("t6",), f"t3 {b} {a} t4", task=task)
        for a in words
        for b in words[:2]
        if a != b
    ]


def tasks_page(path: Path) -> None:
    model = view_of(n_layers=2)
    questions = []
    for task, token in (("agreement of number", "t7"), ("capitals", "t8"), ("gender", "t9")):
        for question in asked(task):
            # A circuit leaves out what the model answers otherwise.
            least = int(model.logits(model.ids(question.text)[None])[0, -1].argmin())
            (minus,) = shown_tokens(model, torch.tensor([least]))
            questions.append(Question(question.text, token, (minus,), question.against, task=task))
    write_report(path, [circuit(model, questions)], title=ABOUT)


def summary_page(path: Path) -> None:
    summary = read_summary(grammar_view(n_layers=2), small_corpus())
    write_report(path, [summary], title="grammar, read from its weights")


PAGES = {
    "flow": flow_page,
    "circuit": lambda path: write_report(
        path, [circuit(view_of(n_layers=2), asked(""))], title=ABOUT
    ),
    "tasks": tasks_page,
    "summary": summary_page,
    "classifier": lambda path: write_report(
        path, [read_bonds(small_model(2), digits())], title="digits"
    ),
}
WINDOWS = [(1280, "light"), (1280, "dark"), (390, "light"), (390, "dark")]
OPEN = "document.querySelectorAll('details').forEach((e) => { e.open = true; })"


@pytest.fixture(scope="module", params=PAGES)
def address(request, tmp_path_factory):
    path = tmp_path_factory.mktemp("pages") / f"{request.param}.html"
    PAGES[request.param](path)
    return path.as_uri()


def test_pages_have_no_faults(address, browser):
    found = []
    for width, scheme in WINDOWS:
        with visiting(browser, width, scheme) as visit:
            page = visit.open(address, ".flow svg .node, .js-plotly-plot .main-svg")
            page.wait_for_timeout(300)
            found += [f"{width} {scheme} closed: {fault}" for fault in visit.faults()]
            page.evaluate(OPEN)
            page.wait_for_timeout(700)
            found += [f"{width} {scheme} open: {fault}" for fault in visit.faults()]
    assert found == []


def test_the_explorer_has_no_faults(language_site, browser):
    found = []
    for width, scheme in WINDOWS:
        with visiting(browser, width, scheme) as visit:
            page = visit.open(language_site + "?circuit=True", "#flow svg .node")
            page.wait_for_selector("#circuit-text .tables")
            page.wait_for_timeout(700)
            found += [f"{width} {scheme} closed: {fault}" for fault in visit.faults()]
            page.get_by_role("button", name="Other second runs").click()
            page.evaluate(OPEN)
            page.wait_for_timeout(700)
            found += [f"{width} {scheme} open: {fault}" for fault in visit.faults()]
    assert found == []
