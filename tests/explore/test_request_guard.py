"""Requests to the explorer that do not come from its own page."""

import http.client
import json
import time
from contextlib import closing
from urllib.parse import urlsplit

import pytest

from bilens.explore.app import LARGEST, NOTHING_ELSE, is_own_name, own_names

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
    ["attacker.example", "127.0.0.1.attacker.example", "localhost.attacker.example", "", "[::1"],
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
        assert (status, text) == (403, "The explorer answers to its own page only.")


def test_its_own_page_is_answered(image_site):
    host = urlsplit(image_site).netloc
    assert ask(image_site, "config", Host=host, Origin=f"http://{host}")[0] == 200


@pytest.mark.parametrize(
    "path", ["gradio_api/upload", "upload", "gradio_api/upload/", "gradio_api/process_recording"]
)
def test_no_file_is_taken_from_anybody(image_site, path):
    kind = "multipart/form-data; boundary=x"
    assert ask(image_site, path, "POST", UPLOAD, Content_Type=kind) == (403, NOTHING_ELSE)


def test_names_follow_how_it_is_served(monkeypatch):
    monkeypatch.setattr("socket.gethostname", lambda: "Desk")
    monkeypatch.setenv("SPACE_HOST", "me-digits.hf.space")
    assert own_names(None, share=False) == {"localhost", "desk", "me-digits.hf.space"}
    assert own_names("Box.lan", share=True) >= {"box.lan", ".gradio.live"}
    names = own_names(None, share=True)
    assert is_own_name("abc.gradio.live:443", names)
    assert not is_own_name("abc.gradio.live:443", own_names(None, share=False))
    assert not is_own_name("gradio.live.attacker.example", names)


def join(site: str, body: str):
    return ask(site, "gradio_api/queue/join", "POST", body, Content_Type="application/json")


@pytest.mark.parametrize(
    "body", ["", "no json", "[]", '{"data": 3}', "[" * 10**5, '{"data": [[[1]]]}', '{"data": [{}]}']
)
def test_what_its_page_never_sends_is_refused(image_site, body):
    assert join(image_site, body) == (403, NOTHING_ELSE)


def test_what_is_sent_has_an_end(image_site):
    assert join(image_site, '{"data": ["' + "x" * LARGEST + '"]}') == (403, NOTHING_ELSE)


def test_it_cannot_be_made_to_fetch_addresses(image_site, monkeypatch):
    asked = []

    async def fetch(url: str, **settings: object) -> None:
        asked.append(url)

    for name in ("async_ssrf_protected_get", "async_ssrf_protected_download"):
        monkeypatch.setattr(f"gradio.processing_utils.{name}", fetch)
    address = "https://attacker.example"
    for path in ("proxy=", "gradio_api/proxy=", "gradio_api/file=", "file=", "gradio_api/stream/"):
        assert ask(image_site, f"{path}{address}/a")[0] in (400, 403, 404)
    config = json.loads(ask(image_site, "config")[1])
    file = {"path": f"{address}/b", "url": f"{address}/c", "meta": {"_type": "gradio.FileData"}}
    for event in config["dependencies"]:
        for value in (file, {"value": file}, [file], [[file]], f"{address}/d"):
            data = [value] * len(event["inputs"])
            body = {"data": data, "fn_index": event["id"], "session_hash": "attack"}
            join(image_site, json.dumps(body))
    time.sleep(1)
    assert asked == []
