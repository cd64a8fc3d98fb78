"""Models are pushed to a hub that listens here, and opened from it."""

import base64
import hashlib
import json
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread

import pytest
import torch
import transformers.utils.hub
from huggingface_hub import constants, hf_api

import bilens
from bilens.nn import ClassifierConfig, ImageClassifier
from tests.models import random_model

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
            self.answer(
                {
                    "files": [
                        {"path": name, "uploadMode": "regular", "shouldIgnore": False}
                        for name in names
                    ]
                }
            )
        elif "/commit/" in self.path:
            for line in map(json.loads, body.splitlines()):
                if line["key"] == "file":
                    value = line["value"]
                    self.files[value["path"]] = base64.b64decode(value["content"])
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
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Content-Type", "application/json")
        self.send_header("ETag", f'"{hashlib.sha1(body).hexdigest()}"')
        self.send_header("X-Repo-Commit", COMMIT)
        if error:
            self.send_header("X-Error-Code", error)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, *_):
        """Not on standard error."""


@pytest.fixture
def hub(monkeypatch, tmp_path):
    """Return the files of a hub on this machine."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    address = f"http://127.0.0.1:{server.server_port}"
    monkeypatch.setattr(constants, "ENDPOINT", address)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(
        constants,
        "HUGGINGFACE_CO_URL_TEMPLATE",
        address + "/{repo_id}/resolve/{revision}/{filename}",
    )
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
def test_a_model_is_pushed_and_opened(kind, hub, tmp_path):
    model = ImageClassifier(ClassifierConfig(6, 3, 4)) if kind == "classifier" else random_model()
    model.push_to_hub("you/name")
    assert {"README.md", "config.json", "model.safetensors"} <= hub.keys()
    assert b'bilens.load("you/name")' in hub["README.md"]
    hub["README.md"] = b"mine"
    model.push_to_hub("you/name")
    assert hub["README.md"].endswith(b"mine")  # transformers puts its metadata in front
    again = bilens.load("you/name", cache_dir=tmp_path)
    same = again if kind == "classifier" else again.model
    weights = model.state_dict()
    assert all(torch.equal(weights[name], w) for name, w in same.state_dict().items())
