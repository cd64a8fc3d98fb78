"""The hub is asked once, and only for names that it can have."""

import contextlib
import logging
from threading import Event, Thread

import datasets
import huggingface_hub
import pytest
from huggingface_hub import constants
from huggingface_hub.errors import OfflineModeIsEnabled

import bilens
from bilens import hub
from bilens.data import load_images
from bilens.errors import BilensError, CheckpointError, DataError
from bilens.hub import HTTPError, hub_options, hub_split


@pytest.fixture
def network(monkeypatch):
    """Return a network in which everything fails; counts its requests."""
    asked = []

    class Session:
        def request(self, method, url, **how):
            if constants.HF_HUB_OFFLINE:  # as the hub's own client does
                raise OfflineModeIsEnabled
            asked.append(f"{method} {url}")
            raise HTTPError("Name or service not known")

        def head(self, url, **how):
            return self.request("HEAD", url, **how)

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", False)
    for module in (hub, huggingface_hub.utils._http):
        monkeypatch.setattr(module, "get_session", Session)
    return asked


@pytest.mark.parametrize("source", ["nothere", "runs/mnist"])
def test_a_model_that_is_nowhere(network, tmp_path, monkeypatch, caplog, source):
    monkeypatch.chdir(tmp_path)
    with (
        caplog.at_level(logging.INFO),
        pytest.raises(CheckpointError, match=f"^{source} is not a directory here, and config.json"),
    ):
        bilens.load(source)
    assert network == [f"HEAD {constants.ENDPOINT}"]
    assert not caplog.records


@pytest.mark.parametrize("source", ["a/b/c", "runs/", "/no/such", "no such", "x" * 5000])
def test_what_cannot_be_a_name_of_the_hub(network, source, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    message = "is not a directory here, and config.json could not.*Train a model with `bilens"
    with pytest.raises(CheckpointError, match=message):
        bilens.load(source)
    assert not network


def test_data_that_is_nowhere(network, monkeypatch, tmp_path, caplog, capfd):
    monkeypatch.delenv("BILENS_DATA", raising=False)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path)
    with (
        caplog.at_level(logging.WARNING),
        pytest.raises(DataError, match="^ylecun/mnist, split tra"),
    ):
        load_images("mnist")
    assert network == [f"HEAD {constants.ENDPOINT}"]
    assert not caplog.records
    assert capfd.readouterr() == ("", "")


def test_the_settings_of_the_process_are_as_before(network, monkeypatch, tmp_path):
    """Also after loads that overlap, of which the first waits for the second to begin."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path)
    begun = {"a/b": Event(), "c/d": Event()}
    ended = Event()

    def read(name, **_):
        begun[name].set()
        # The second comes in only if nothing keeps it out, and then leaves last.
        (begun["c/d"] if name == "a/b" else ended).wait(timeout=0.3)
        return []

    monkeypatch.setattr(datasets, "load_dataset", read)

    def load(name):
        with contextlib.suppress(BilensError):
            bilens.load(name)
        with hub_split(name, "train", ""):
            pass
        ended.set()

    first, second = (Thread(target=load, args=(name,)) for name in begun)
    first.start()
    assert begun["a/b"].wait(timeout=20)
    second.start()
    first.join()
    second.join()
    assert not constants.HF_HUB_OFFLINE
    assert not datasets.config.HF_HUB_OFFLINE


def test_a_hub_that_answers_is_asked(monkeypatch, tmp_path):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(hub, "_answers", lambda: True)
    assert hub_options("some/model") == {}
    monkeypatch.setattr(hub, "_answers", lambda: False)
    assert hub_options("some/model") == {"local_files_only": True}
    assert hub_options(tmp_path) == {}


def test_errors_of_the_reader_are_not_blamed_on_the_hub(monkeypatch):
    monkeypatch.setattr(hub, "_answers", lambda: True)
    monkeypatch.setattr(datasets, "load_dataset", lambda *_, **__: [{"text": "a"}])
    with pytest.raises(KeyError, match="txt"), hub_split("a/b", "train", "") as rows:
        rows[0]["txt"]
