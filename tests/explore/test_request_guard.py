"""Requests to the explorer that do not come from its own page."""

import http.client
import json
import threading
import time
from contextlib import closing
from http.server import BaseHTTPRequestHandler, HTTPServer
from urllib.parse import urlsplit

import pytest

from bilens.explore.request_guard import is_own_name, own_names

UPLOAD = (
    '--x\r\nContent-Disposition: form-data; name="files"; filename="a.txt"\r\n\r\nhi\r\n--x--\r\n'
)


def ask(site: str, path: str = "", method: str = "GET", body: str = "", **headers: str):
    """Status and text of an answer; headers are named with underscores."""
    place = urlsplit(site)
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    connection = http.client.HTTPConnection(place.hostname, place.port, timeout=20)
    with closing(connection):
        connection.request(method, f"/{path}", body, named)
        answer = connection.getresponse()
        return answer.status, answer.read().decode(errors="replace")


@pytest.mark.parametrize("host", ["127.0.0.1:80", "localhost:7860", "LOCALHOST", "[::1]:7860"])
def test_its_own_names_are_answered(image_site, host):
    assert ask(image_site, "config", Host=host)[0] == 200


@pytest.mark.parametrize(
    "host",
    [
        "attacker.example",
        "127.0.0.1.attacker.example",
        "localhost.attacker.example",
        "",
        "[::1",
        "*",
    ],
)
def test_another_name_for_this_machine_is_refused(image_site, host):
    status, text = ask(image_site, "config", Host=host)
    assert (status, text[:36]) == (403, "The explorer answers to its own name")


@pytest.mark.parametrize(
    "origin",
    ["http://attacker.example", "null", "http://127.0.0.1:1", "http://localhost", "file://"],
)
def test_another_page_in_the_same_browser_is_refused(image_site, origin):
    for path, method in (
        ("gradio_api/upload", "POST"),
        ("gradio_api/queue/join", "POST"),
        ("gradio_api/reset", "POST"),
        ("config", "GET"),
    ):
        status, text = ask(image_site, path, method, Origin=origin)
        assert (status, text) == (403, "The explorer answers to its own page alone.")


def test_its_own_page_is_answered(image_site):
    host = urlsplit(image_site).netloc
    assert ask(image_site, "config", Host=host, Origin=f"http://{host}")[0] == 200


@pytest.mark.parametrize(
    "path", ["gradio_api/upload", "upload", "gradio_api/upload/", "gradio_api/process_recording"]
)
def test_no_file_is_taken_from_anybody(image_site, path):
    kind = "multipart/form-data; boundary=x"
    assert ask(image_site, path, "POST", UPLOAD, Content_Type=kind) == (
        403,
        "The explorer takes what its page sends and nothing else.",
    )


def test_names_follow_how_it_is_served(monkeypatch):
    monkeypatch.setattr("socket.gethostname", lambda: "Desk")
    monkeypatch.setenv("SPACE_HOST", "me-digits.hf.space")
    assert own_names(None, share=False) == {"localhost", "desk", "me-digits.hf.space"}
    assert own_names("Box.lan", share=True) >= {"box.lan", ".gradio.live"}
    names = own_names(None, share=True)
    assert is_own_name("abc.gradio.live:443", names)
    assert not is_own_name("abc.gradio.live:443", own_names(None, share=False))
    assert not is_own_name("gradio.live.attacker.example", names)


@pytest.fixture
def witness():
    """The address of a server that notes what it is asked."""
    asked = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(self.path)
            self.send_response(200)
            self.end_headers()

        def log_message(self, *args: object) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}", asked
    server.shutdown()
    thread.join()
    server.server_close()


def test_it_cannot_be_made_to_fetch_addresses(image_site, witness):
    address, asked = witness
    for path in ("proxy=", "gradio_api/proxy=", "gradio_api/file=", "file=", "gradio_api/stream/"):
        assert ask(image_site, f"{path}{address}/a")[0] in (400, 403, 404)
    config = json.loads(ask(image_site, "config")[1])
    file = {"path": f"{address}/b", "url": f"{address}/c", "meta": {"_type": "gradio.FileData"}}
    for event in config["dependencies"]:
        for value in (file, {"value": file}, [file], f"{address}/d"):
            data = [value] * len(event["inputs"])
            body = {"data": data, "fn_index": event["id"], "session_hash": "attack"}
            text, kind = json.dumps(body), "application/json"
            ask(image_site, "gradio_api/queue/join", "POST", text, Content_Type=kind)
    time.sleep(1)
    assert asked == []
