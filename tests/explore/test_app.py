"""Opening a run: what the explorer is for, and what it says where it is not."""

import json
import shutil
import sys
import urllib.request

import pytest

from bilens.cli import main
from bilens.errors import BilensError, CheckpointError
from bilens.explore import explorer
from bilens.explore.app import Explorer
from bilens.nn import AutoencoderConfig, SparseAutoencoder
from tests.explore.browser import served
from tests.models import digit_model


def test_a_run_without_its_record_needs_a_name_of_data(tmp_path):
    digit_model().save_files(tmp_path)
    with pytest.raises(CheckpointError, match=r"training.json is missing or damaged"):
        explorer(tmp_path)
    assert isinstance(explorer(tmp_path, data="digits"), Explorer)


def test_an_autoencoder_has_no_explorer(tmp_path):
    SparseAutoencoder(AutoencoderConfig(3, 5)).save_files(tmp_path)
    with pytest.raises(BilensError, match="holds a sparse autoencoder, which has no explorer"):
        explorer(tmp_path)


def test_without_gradio_it_says_what_to_install(image_run, monkeypatch, capsys):
    for name in [name for name in sys.modules if name.startswith("bilens.explore")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "gradio", None)
    with pytest.raises(SystemExit):
        main(["explore", str(image_run)])
    assert "gradio is needed for this and is not installed: pip install 'gradio>=6.31'" in " ".join(
        capsys.readouterr().err.split()
    )


def test_the_command_serves_this_machine_alone(image_run, monkeypatch):
    asked = {}
    monkeypatch.setattr(Explorer, "launch", lambda self, **settings: asked.update(settings))
    main(["explore", str(image_run)])
    assert asked == {"host": "127.0.0.1", "port": None, "share": False, "open_browser": False}


def test_a_port_that_is_taken_is_named(image_run, monkeypatch):
    def taken(*args, **settings):
        raise OSError("address already in use")

    monkeypatch.setattr("gradio.Blocks.launch", taken)
    with pytest.raises(
        BilensError, match="port=80 cannot be listened on: address already in use. Another"
    ):
        explorer(image_run).launch(port=80, wait=False)


@pytest.mark.parametrize(
    ("place", "message"),
    [
        ({"port": 99999}, "port=99999, expected a whole number, 1 to 65535"),
        ({"port": 0}, "port=0, expected a whole number, 1 to 65535"),
        ({"host": "nope.invalid"}, "host=nope.invalid, port=None cannot be listened on: "),
        ({"host": "203.0.113.1", "port": 7999}, "host=203.0.113.1, port=7999 cannot be listened"),
    ],
)
def test_where_it_cannot_listen_it_says_so(image_run, place, message):
    with pytest.raises(BilensError, match=message):
        explorer(image_run).launch(**place, wait=False)


def test_the_name_of_a_run_is_text(image_run, monkeypatch, tmp_path):
    """In the title of the page and its heading, whatever the folder is called."""
    name = "<img src=x onerror=alert(1)>[x](http:a)"
    shutil.copytree(image_run, tmp_path / name)
    with served(explorer(tmp_path / name)) as address:
        with urllib.request.urlopen(address, timeout=10) as answer:
            page = answer.read().decode()
        with urllib.request.urlopen(address + "config", timeout=10) as answer:
            config = json.load(answer)
    assert "<img src=x" not in page.replace(r"\u003cimg", "")
    (heading,) = [c for c in config["components"] if c["props"].get("elem_id") == "title"]
    assert "&lt;img src=x onerror=alert(1)&gt;[x](http:a)" in heading["props"]["value"]


def test_visitors_are_answered_at_once(image_run, language_run):
    """One who waits for a slow figure does not hold back others; a model that is run without some
    of its parts for a moment serves one visitor after another."""
    for run, at_once in ((image_run, 4), (language_run, 1)):
        handlers = [f for f in explorer(run).blocks.fns.values() if f.queue]
        assert {f.concurrency_limit for f in handlers} == {at_once}
        assert len({f.concurrency_id for f in handlers}) == 1
