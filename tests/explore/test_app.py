"""Opening a run: its screen, and the error for runs without one."""

import json
import logging
import shutil
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from typing import Any

import pytest

from bilens.cli import main
from bilens.errors import BilensError
from bilens.explore import explorer
from bilens.explore.app import Explorer
from bilens.explore.flows import ThreadModel
from bilens.flows import FlowReading
from bilens.flows.reading import answer_question
from bilens.transformer import ResidualModel
from tests.explore.browser import NODE, box, served, submit, visiting
from tests.explore.test_request_guard import ask
from tests.models import digit_model, random_model


def test_a_run_without_its_record_needs_a_name_of_data(tmp_path):
    digit_model().save_files(tmp_path)
    with pytest.raises(BilensError, match="so the data that .* was trained on is unknown"):
        explorer(tmp_path)
    assert isinstance(explorer(tmp_path, data="digits"), Explorer)


def test_without_gradio_it_says_what_to_install(image_run, monkeypatch, capsys):
    for name in [name for name in sys.modules if name.startswith("bilens.explore")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "gradio", None)
    with pytest.raises(SystemExit):
        main(["explore", str(image_run)])
    message = "gradio is needed for this and is not installed: pip install -e '.[explore]'"
    assert message in " ".join(capsys.readouterr().err.split())


def test_the_command_serves_this_machine_alone(image_run, monkeypatch):
    asked = {}
    monkeypatch.setattr(Explorer, "launch", lambda self, **settings: asked.update(settings))
    main(["explore", str(image_run)])
    assert asked == {"host": "127.0.0.1", "port": None, "share": False, "open_browser": False}


def test_the_address_is_logged(image_run, monkeypatch, caplog):
    monkeypatch.setattr("gradio.Blocks.block_thread", lambda self: None)
    with caplog.at_level(logging.INFO, logger="bilens"), closing(explorer(image_run)) as app:
        address = app.launch()
    assert caplog.messages == [f"explorer: {address}  (ctrl-C stops it)"]


def test_the_name_of_a_run_is_text(image_run, tmp_path):
    """In the title of the page and its heading, whatever the folder is called."""
    name = "<img src=x onerror=alert(1)>[x](http:a)"
    shutil.copytree(image_run, tmp_path / name)
    with served(explorer(tmp_path / name)) as address:
        (_, page), (_, config) = ask(address), ask(address, "config")
    assert "<img src=x" not in page.replace(r"\u003cimg", "")
    (heading,) = [
        c for c in json.loads(config)["components"] if c["props"].get("elem_id") == "title"
    ]
    assert "&lt;img src=x onerror=alert(1)&gt;[x](http:a)" in heading["props"]["value"]


def test_a_slow_flow_does_not_hold_up_another_visitor(language_site, browser, monkeypatch):
    started, may_end = threading.Event(), threading.Event()

    def slow(*args: Any, **how: Any) -> FlowReading:
        started.set()
        assert may_end.wait(60)
        return answer_question(*args, **how)

    with visiting(browser) as single, visiting(browser) as other:
        address = language_site + "?flow_against="
        waiting, clicking = (visit.open(address, NODE) for visit in (single, other))
        # Names of nodes are words of the vocabulary, so the whole drawing is compared.
        drawn = waiting.text_content("#flow svg")
        monkeypatch.setattr("bilens.explore.flows.answer_question", slow)
        try:
            submit(box(waiting, "prompt"), "mia saw the kite")
            assert started.wait(30)
            clicking.get_by_label("The next token").fill("kit")
            clicking.get_by_role("option", name="kite").click()
            other.shows("#reading-ngrams", "of kite")
            assert waiting.text_content("#flow svg") == drawn
        finally:
            may_end.set()
        single.wait(f"document.querySelector('#flow svg').textContent !== {json.dumps(drawn)}")


def test_each_thread_runs_modules_of_its_own_with_the_same_weights():
    model = ResidualModel(random_model())
    custom = ThreadModel(model)
    with ThreadPoolExecutor(1) as pool:
        theirs = pool.submit(lambda: custom.model).result()
    assert custom.model is custom.model
    assert not {*theirs.model.modules()} & {*custom.model.model.modules(), *model.model.modules()}
    weights = zip(theirs.model.parameters(), model.model.parameters(), strict=True)
    assert all(single.data_ptr() == other.data_ptr() for single, other in weights)
