"""The hub is asked once, and only for names that it can have; models are pushed to one here."""

import base64
import contextlib
import hashlib
import json
import logging
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Event, Thread

import datasets
import huggingface_hub
import pytest
import torch
import transformers.utils.hub
from huggingface_hub import constants, hf_api
from huggingface_hub.errors import OfflineModeIsEnabled

import bilens
from bilens import hub
from bilens.data import load_images
from bilens.errors import BilensError, CheckpointError, DataError
from bilens.hub import HTTPError, hub_options, hub_split
from bilens.nn import ClassifierConfig, ImageClassifier
from tests.models import random_model


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
    message = f"^{source} is not a directory here, and config.json"
    with caplog.at_level(logging.INFO), pytest.raises(CheckpointError, match=message):
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
    message = "^ylecun/mnist, split tra"
    with caplog.at_level(logging.WARNING), pytest.raises(DataError, match=message):
        load_images("mnist")
    assert network == [f"HEAD {constants.ENDPOINT}"]
    assert not caplog.records
    assert capfd.readouterr() == ("", "")


def test_the_settings_of_the_process_are_as_before(network, monkeypatch, tmp_path):
    """Also after loads that overlap, of which the first waits for the second to begin."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path)
    begun, ended = {"a/b": Event(), "c/d": Event()}, Event()

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
    for answers, options in ((True, {}), (False, {"local_files_only": True})):
        monkeypatch.setattr(hub, "_answers", lambda answers=answers: answers)
        assert hub_options("some/model") == options
    assert hub_options(tmp_path) == {}


def test_errors_of_the_reader_are_not_blamed_on_the_hub(monkeypatch):
    monkeypatch.setattr(hub, "_answers", lambda: True)
    monkeypatch.setattr(datasets, "load_dataset", lambda *_, **__: [{"text": "a"}])
    with pytest.raises(KeyError, match="txt"), hub_split("a/b", "train", "") as rows:
        rows[0]["txt"]


COMMIT = "0" * 40


class Hub(BaseHTTPRequestHandler):
    """Requests of huggingface_hub for a new repository, commits of small files and downloads."""

    files: dict[str, bytes] = {}  # noqa: RUF012

    def do_POST(self):
        body = self.rfile.read(int(self.headers["Content-Length"]))
        if self.path.endswith("/repos/create"):
            self.answer({"url": f"{constants.ENDPOINT}/you/name", "name": "you/name"})
        elif "/preupload/" in self.path:
            names = [file["path"] for file in json.loads(body)["files"]]
            how = {"uploadMode": "regular", "shouldIgnore": False}
            self.answer({"files": [{"path": name, **how} for name in names]})
        elif "/commit/" in self.path:
            lines = map(json.loads, body.splitlines())
            for file in (line["value"] for line in lines if line["key"] == "file"):
                self.files[file["path"]] = base64.b64decode(file["content"])
            url = f"{constants.ENDPOINT}/you/name/commit/{COMMIT}"
            self.answer({"commitUrl": url, "commitOid": COMMIT})
        else:
            self.answer({})

    def do_GET(self):
        name = self.path.partition("/resolve/")[2].partition("/")[2]  # behind a branch or a commit
        if self.path == "/" or "/api/" in self.path:
            self.answer({"id": "you/name", "sha": COMMIT, "siblings": []})
        elif name in self.files:
            self.answer(self.files[name])
        else:
            self.answer({}, 404, "EntryNotFound")

    do_HEAD = do_GET  # noqa: N815

    def answer(self, content, status=200, error=""):
        body = content if isinstance(content, bytes) else json.dumps(content).encode()
        self.send_response(status)
        headers = {"Content-Length": str(len(body)), "Content-Type": "application/json"}
        headers |= {"ETag": f'"{hashlib.sha1(body).hexdigest()}"', "X-Repo-Commit": COMMIT}
        for name, value in (headers | ({"X-Error-Code": error} if error else {})).items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, *_):
        """Not on standard error."""


@pytest.fixture
def pushed(monkeypatch):
    """Return the files of a hub on this machine."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    address = f"http://127.0.0.1:{server.server_port}"
    template = address + "/{repo_id}/resolve/{revision}/{filename}"
    monkeypatch.setattr(constants, "ENDPOINT", address)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
    monkeypatch.setattr(hf_api.api, "endpoint", address)
    # transformers keeps one of its own, which an earlier test may have made.
    monkeypatch.setattr(transformers.utils.hub, "_hf_api", None)
    monkeypatch.setenv("HF_TOKEN", "hf_none")
    monkeypatch.setattr(Hub, "files", {})
    Thread(target=server.serve_forever, daemon=True).start()
    yield Hub.files
    server.shutdown()
    server.server_close()


@pytest.mark.parametrize("kind", ["classifier", "language"])
def test_a_model_is_pushed_and_opened(kind, pushed, tmp_path):
    model = ImageClassifier(ClassifierConfig(6, 3, 4)) if kind == "classifier" else random_model()
    model.push_to_hub("you/name")
    assert {"README.md", "config.json", "model.safetensors"} <= pushed.keys()
    assert b'bilens.load("you/name")' in pushed["README.md"]
    pushed["README.md"] = b"mine"
    model.push_to_hub("you/name")
    assert pushed["README.md"].endswith(b"mine")  # transformers puts its metadata in front
    again = bilens.load("you/name", cache_dir=tmp_path)
    same, weights = again if kind == "classifier" else again.model, model.state_dict()
    assert all(torch.equal(weights[name], w) for name, w in same.state_dict().items())
