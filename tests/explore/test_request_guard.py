"""Requests to the explorer that do not come from its own page."""

import json
import time
from contextlib import closing
from http.client import HTTPConnection
from urllib.parse import urlsplit

import pytest

from bilens.explore.app import LARGEST, NOTHING_ELSE, is_own_name, own_names

HEADER = 'Content-Disposition: form-data; name="files"; filename="a.txt"'
UPLOAD = f"--x\r\n{HEADER}\r\n\r\nhi\r\n--x--\r\n"


def ask(site: str, path: str = "", method: str = "GET", body: str = "", **headers: str):
    """Status and text of an answer; headers are named with underscores."""
    place = urlsplit(site)
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    with closing(HTTPConnection(place.hostname, place.port, timeout=60)) as connection:
        connection.request(method, f"/{path}", body, named)
        answer = connection.getresponse()
        return answer.status, answer.read().decode(errors="replace")


OWN = "127.0.0.1:80", "localhost:7860", "LOCALHOST", "[::1]:7860"
ATTACKER = "attacker.example"
FOREIGN = ATTACKER, f"127.0.0.1.{ATTACKER}", f"localhost.{ATTACKER}", "", "[::1"
ORIGINS = f"http://{ATTACKER}", "null", "http://127.0.0.1:1", "http://localhost", "file://"
UPLOADS = "gradio_api/upload", "upload", "gradio_api/upload/", "gradio_api/process_recording"


@pytest.mark.parametrize("host", OWN)
def test_its_own_names_are_answered(image_site, host):
    assert ask(image_site, "config", Host=host)[0] == 200


@pytest.mark.parametrize("host", FOREIGN)
def test_another_name_for_this_machine_is_refused(image_site, host):
    status, text = ask(image_site, "config", Host=host)
    assert (status, text[:36]) == (403, "The explorer answers to its own name")


@pytest.mark.parametrize("origin", ORIGINS)
def test_another_page_in_the_same_browser_is_refused(image_site, origin):
    for path in ("gradio_api/upload", "gradio_api/queue/join", "gradio_api/reset", "config"):
        answer = ask(image_site, path, "GET" if path == "config" else "POST", Origin=origin)
        assert answer == (403, "The explorer answers to its own page only.")


def test_its_own_page_is_answered(image_site):
    host = urlsplit(image_site).netloc
    assert ask(image_site, "config", Host=host, Origin=f"http://{host}")[0] == 200


@pytest.mark.parametrize("path", UPLOADS)
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


BODIES = "", "no json", "[]", '{"data": 3}', "[" * 10**5, '{"data": [[[1]]]}', '{"data": [{}]}'
TOO_LONG = '{"data": ["' + "x" * LARGEST + '"]}'


@pytest.mark.parametrize("body", [*BODIES, TOO_LONG], ids=lambda body: f"{body:.20}")
def test_what_its_page_never_sends_is_refused(image_site, body):
    assert join(image_site, body) == (403, NOTHING_ELSE)


def test_it_cannot_be_made_to_fetch_addresses(image_site, monkeypatch):
    asked = []

    async def fetch(url: str, **settings: object) -> None:
        asked.append(url)

    for name in ("async_ssrf_protected_get", "async_ssrf_protected_download"):
        monkeypatch.setattr(f"gradio.processing_utils.{name}", fetch)
    address = f"https://{ATTACKER}"
    for path in ("proxy=", "gradio_api/proxy=", "gradio_api/file=", "file=", "gradio_api/stream/"):
        assert ask(image_site, f"{path}{address}/a")[0] in (400, 403, 404)
    config = json.loads(ask(image_site, "config")[1])
    file = {"path": f"{address}/b", "url": f"{address}/c", "meta": {"_type": "gradio.FileData"}}
    for event in config["dependencies"]:
        for value in (file, {"value": file}, [file], [[file]], f"{address}/d"):
            body = {"data": [value] * len(event["inputs"]), "fn_index": event["id"]}
            join(image_site, json.dumps({**body, "session_hash": "attack"}))
    time.sleep(1)
    assert asked == []
