"""Opening a run: what the explorer is for, and what it says where it is not."""

import sys

import pytest

from bilens.cli import main
from bilens.errors import BilensError, CheckpointError
from bilens.explore import explorer
from bilens.explore.app import Explorer
from bilens.nn import AutoencoderConfig, SparseAutoencoder
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
    with pytest.raises(BilensError, match="port=80 cannot be listened on: address already in use"):
        explorer(image_run).launch(port=80, wait=False)
