"""Requests to the explorer that do not come from its own page."""

import socket
import struct
from contextlib import closing
from http.client import HTTPConnection
from urllib.parse import urlsplit

import pytest

from bilens.explore.server import LARGEST, is_own_name, own_names


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
NOT_HERS = "The explorer answers to its own page only."


@pytest.mark.parametrize("host", OWN)
def test_its_own_names_are_answered(image_site, host):
    assert ask(image_site, Host=host)[0] == 200


@pytest.mark.parametrize("host", FOREIGN)
def test_another_name_for_this_machine_is_refused(image_site, host):
    status, text = ask(image_site, Host=host)
    assert (status, text[:36]) == (403, "The explorer answers to its own name")


@pytest.mark.parametrize("origin", ORIGINS)
def test_another_page_in_the_same_browser_is_refused(image_site, origin):
    for path, method in (("explain/sheet", "POST"), ("explain/page", "GET")):
        assert ask(image_site, path, method, Origin=origin) == (403, NOT_HERS)
    # As an image or a script of its page, for which a browser says no origin.
    foreign = {"Sec_Fetch_Site": "cross-site", "Sec_Fetch_Mode": "no-cors"}
    assert ask(image_site, "explain/page", **foreign) == (403, NOT_HERS)


def test_links_and_its_own_page_are_answered(image_site):
    host = urlsplit(image_site).netloc
    assert (
        ask(image_site, Host=host, Origin=f"http://{host}", Sec_Fetch_Site="same-origin")[0] == 200
    )
    link = {"Sec_Fetch_Site": "cross-site", "Sec_Fetch_Mode": "navigate"}
    assert ask(image_site, "explain?image=test-3", **link)[0] == 200
    assert ask(image_site, "explain/sheet", "POST", "x", **link) == (403, NOT_HERS)


def test_names_follow_how_it_is_served(monkeypatch):
    monkeypatch.setattr("socket.gethostname", lambda: "Desk")
    monkeypatch.setenv("SPACE_HOST", "me-digits.hf.space")
    names = own_names("Box.lan")
    assert names == {"localhost", "desk", "me-digits.hf.space", "box.lan"}
    assert is_own_name("ME-DIGITS.hf.space:443", names)
    assert not is_own_name("you.hf.space", names)


@pytest.mark.parametrize("method", ["PUT", "DELETE", "OPTIONS", "HEAD"])
def test_other_methods_are_not_answered(image_site, method):
    assert ask(image_site, "explain", method)[0] == 501


@pytest.mark.parametrize(
    ("path", "body", "status"),
    [
        ("explain/sheet", "x" * 10, 400),
        ("explain/sheet", "", 400),
        ("explain/sheet", "data:image/png;base64,A", 400),
        ("explain/page", "x", 404),
        ("upload", "x", 404),
    ],
)
def test_nothing_but_a_drawing_is_taken(image_site, path, body, status):
    assert ask(image_site, path, "POST", body)[0] == status


@pytest.mark.parametrize("length", ["-1", "x", str(LARGEST + 1), "9" * 5000])
def test_a_drawing_is_not_read_beyond_its_limit(image_site, length):
    assert ask(image_site, "explain/sheet", "POST", "x", Content_Length=length)[0] == 400


@pytest.mark.parametrize("name", ["model.safetensors", "/etc/hostname", "app.py", "explore.js"])
def test_no_file_is_served(image_site, image_run, name):
    whole = str(image_run / name)
    for path in (whole, whole[1:], "../../../../../../../" + whole, "..%2f..%2f" + name):
        for route in ("", "file=", "explain/", "explain/page/", "static/"):
            assert ask(image_site, route + path)[0] == 404, route + path


def test_an_answer_allows_nothing_of_other_places(image_site):
    place = urlsplit(image_site)
    with closing(HTTPConnection(place.hostname, place.port, timeout=60)) as connection:
        connection.request("GET", "/")
        headers = connection.getresponse().headers
    assert headers["Content-Security-Policy"].startswith("default-src 'none'")
    assert headers["X-Content-Type-Options"] == "nosniff"
    assert image_site.startswith("http://127.0.0.1:")


def test_a_visitor_who_leaves_early_is_no_fault(image_site, capfd):
    place = urlsplit(image_site)
    for path in ("explain", "explain/page?image=test-3"):
        with socket.create_connection((place.hostname, place.port)) as visitor:
            # Closed at once, without waiting for what is not read.
            visitor.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            visitor.sendall(f"GET /{path} HTTP/1.1\r\nHost: {place.netloc}\r\n\r\n".encode())
    assert ask(image_site, "explain/page?image=test-3")[0] == 200
    assert "Traceback" not in capfd.readouterr().err
