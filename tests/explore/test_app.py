"""Opening a run: its site, where it listens, and the errors."""

import logging
import shutil
import threading
from contextlib import closing

import pytest

from bilens.cli import main
from bilens.errors import BilensError
from bilens.explore import explorer
from bilens.explore.app import Explorer
from tests.explore.browser import served
from tests.explore.test_request_guard import ask
from tests.models import digit_model
from tests.refusals import refused


def test_a_run_without_its_record_needs_a_name_of_data(tmp_path):
    digit_model().save_files(tmp_path)
    with pytest.raises(BilensError, match="so the data that .* was trained on is unknown"):
        explorer(tmp_path)
    assert isinstance(explorer(tmp_path, data="digits"), Explorer)


def test_the_command_serves_this_machine_alone(image_run, monkeypatch):
    asked = {}
    monkeypatch.setattr(Explorer, "launch", lambda self, **settings: asked.update(settings))
    main(["explore", str(image_run)])
    assert asked == {"host": "127.0.0.1", "port": None, "open_browser": False}


def test_the_address_is_logged_and_ctrl_c_stops_it(image_run, monkeypatch, caplog):
    def stop(self):
        raise KeyboardInterrupt

    app = explorer(image_run)
    monkeypatch.setattr(threading.Thread, "join", stop)
    with caplog.at_level(logging.INFO, logger="bilens"), pytest.raises(KeyboardInterrupt):
        app.launch()
    (message,) = caplog.messages
    assert message.startswith("explorer: http://127.0.0.1:")
    assert not app._servers


def test_two_explorers_have_two_ports(image_run):
    with closing(explorer(image_run)) as one, closing(explorer(image_run)) as other:
        addresses = {app.launch(wait=False) for app in (one, other, one)}
        assert len(addresses) == 3
        assert {ask(address)[0] for address in addresses} == {200}


def test_the_name_of_a_run_is_text(image_run, tmp_path):
    """In the title of the page and its heading, whatever the folder is called."""
    name = "<img src=x onerror=alert(1)>[x](http:a)"
    shutil.copytree(image_run, tmp_path / name)
    with served(explorer(tmp_path / name)) as address:
        _, page = ask(address)
    assert "<img src=x" not in page
    assert page.count("&lt;img src=x onerror=alert(1)&gt;[x](http:a)") == 2


def test_what_nobody_foresaw_is_said_to_the_visitor_in_one_line(image_run, monkeypatch, caplog):
    def fail(self, *asked):
        raise RuntimeError("secret")

    monkeypatch.setattr("bilens.explore.model_pages.ModelPages.page", fail)
    with served(explorer(image_run)) as address, caplog.at_level(logging.ERROR, logger="bilens"):
        answer = ask(address, "explain/page")
    assert answer == (500, "bilens failed; its log says why.")
    assert "secret" in caplog.text


def launched(**place):
    return lambda image_run: explorer(image_run).launch(**place, wait=False)


def launched_on_a_taken_port(image_run):
    with closing(explorer(image_run)) as app:
        port = int(app.launch(wait=False).rpartition(":")[2].strip("/"))
        explorer(image_run).launch(port=port, wait=False)


ADDRESSES = {
    "port=99999, expected a whole number, 1 to 65535": launched(port=99999),
    "port=0, expected a whole number, 1 to 65535": launched(port=0),
    "host=nope.invalid, port=None cannot be listened on: ": launched(host="nope.invalid"),
    "port=7999 cannot be listened": launched(host="203.0.113.1", port=7999),
    "cannot be listened on: .*in use. Another program": launched_on_a_taken_port,
}
test_where_it_cannot_listen_it_says_so = refused(ADDRESSES)
