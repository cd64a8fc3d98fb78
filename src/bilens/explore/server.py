"""The explorer's server: pages of a model over HTTP, for its own visitors only.

It answers to its own name, serves no file, and takes nothing but a drawing. A page of somebody
else's that is open in the same browser can send requests here. It is refused by what the browser
says of it; and if its own name points to this machine (DNS rebinding), by that name.
"""

import ipaddress
import os
import socket
import sys
from collections.abc import Callable
from functools import cached_property
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar
from urllib.parse import parse_qsl, urlsplit

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from bilens.data import ImageData
from bilens.errors import BilensError
from bilens.explore.model_pages import ModelPages
from bilens.explore.sketchpad import picture_of, read_sheet
from bilens.progress import logger

LARGEST = 2**21
"""Bytes of a drawing: a sheet has a few thousand."""
HEADERS = {
    # The page needs no more than what it holds, and the answers of this server.
    "Content-Security-Policy": "default-src 'none'; style-src 'unsafe-inline'; script-src "
    "'unsafe-inline'; img-src data: blob:; connect-src 'self'; base-uri 'none'; form-action 'self'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",
}
HTML, TEXT = "text/html; charset=utf-8", "text/plain; charset=utf-8"


class Server(ThreadingHTTPServer):
    """A server of pages at a host and a port.

    Args:
        place: host and port.
        pages: the model's readings.
        title: the name of the model, for the head of the page.
    """

    daemon_threads = True

    def __init__(self, place: tuple[str, int], pages: ModelPages, title: str) -> None:
        self.pages, self.title, self.names = pages, title, own_names(place[0])
        family, *_ = socket.getaddrinfo(*place, type=socket.SOCK_STREAM)[0]
        self.address_family = family
        super().__init__(place, Handler)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Say nothing of visitors who leave before their page comes, as those who type on do."""
        if not isinstance(sys.exception(), ConnectionError):
            super().handle_error(request, client_address)

    @cached_property
    def shells(self) -> dict[str, str]:
        """The page of each form, without a reading."""
        folders = [Path(__file__).parent, Path(__file__).parents[1] / "pages"]
        environment = Environment(
            loader=FileSystemLoader(folders), autoescape=True, undefined=StrictUndefined
        )
        template, pages = environment.get_template("explore.html"), self.pages
        return {
            name: template.render(
                title=self.title,
                name=name,
                names=list(pages.forms),
                about=form.entry.about.partition("\n")[0],
                form=form,
                waits=pages.waits(name),
                data=pages.data if "image" in form.boxes else None,
                side=280 // max(pages.data.shape) if isinstance(pages.data, ImageData) else 0,
                switch=bool,
            )
            for name, form in pages.forms.items()
        }


class Handler(BaseHTTPRequestHandler):
    """Answers one request; see `Server`."""

    server: Server
    timeout: ClassVar[float] = 60.0  # seconds that a visitor may stay silent
    server_version, sys_version = "bilens", ""

    def do_GET(self) -> None:
        """Answer with a form, the page of a reading, a removal or a picture for the sheet."""
        self._answer(self._get)

    def do_POST(self) -> None:
        """Answer a drawing with its text."""
        self._answer(self._post)

    def log_message(self, format: str, *args: Any) -> None:
        logger.debug(format, *args)

    def _answer(self, find: Callable[[str, list[tuple[str, str]]], tuple[str, str]]) -> None:
        if reason := self._refusal():
            self._send(HTTPStatus.FORBIDDEN, TEXT, reason)
            return
        place = urlsplit(self.path)
        try:
            query = parse_qsl(place.query, keep_blank_values=True)
            kind, content = find(place.path.strip("/"), query)
        except KeyError:
            self._send(HTTPStatus.NOT_FOUND, TEXT, "There is no such page.")
        except (BilensError, ValueError) as error:
            is_ours = isinstance(error, BilensError)
            reason = str(error) if is_ours else "This request cannot be read."
            self._send(HTTPStatus.BAD_REQUEST, TEXT, reason)
        except Exception:
            logger.exception("explorer: %s failed", place.path)
            self._send(HTTPStatus.INTERNAL_SERVER_ERROR, TEXT, "bilens failed; its log says why.")
        else:
            self._send(HTTPStatus.OK, kind, content)

    def _get(self, path: str, query: list[tuple[str, str]]) -> tuple[str, str]:
        pages, (name, _, what) = self.server.pages, path.partition("/")
        name = name or next(iter(pages.forms))
        if not what:
            return HTML, self.server.shells[name]
        if what == "page":
            return HTML, pages.page(name, query)
        if what == "removed":
            nodes = [value for key, value in query if key == "node"]
            return TEXT, pages.removed(name, query, nodes)
        if what == "sheet" and isinstance(pages.data, ImageData):
            return TEXT, picture_of(dict(query)["image"], pages.data)
        raise KeyError(what)

    def _post(self, path: str, _: list[tuple[str, str]]) -> tuple[str, str]:
        data, length = self.server.pages.data, int(self.headers.get("Content-Length", 0))
        if not path.endswith("/sheet") or not isinstance(data, ImageData):
            raise KeyError(path)
        if not 0 < length <= LARGEST:
            raise BilensError(f"image has {length} bytes, expected up to {LARGEST}")
        return TEXT, read_sheet(self.rfile.read(length).decode("ascii", "replace"), data)

    def _refusal(self) -> str:
        """Return why a request is refused by its head, or nothing."""
        host, origin = self.headers.get("Host", ""), self.headers.get("Origin")
        # A page of another site could reach this machine by a name of its own that points here.
        if not is_own_name(host, self.server.names):
            return "The explorer answers to its own name only; for another, start it with --host."
        # Links of other pages are followed; programs that are no browsers send no such headers.
        is_foreign = self.headers.get("Sec-Fetch-Site") in ("cross-site", "same-site")
        is_link = self.headers.get("Sec-Fetch-Mode") == "navigate" and self.command == "GET"
        is_other = origin is not None and urlsplit(origin).netloc != host
        if is_other or (is_foreign and not is_link):
            return "The explorer answers to its own page only."
        return ""

    def _send(self, status: HTTPStatus, kind: str, content: str) -> None:
        body = content.encode("utf-8", "replace")
        self.send_response(status)
        for name, value in (HEADERS | {"Content-Type": kind}).items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


def own_names(host: str) -> frozenset[str]:
    """Return the names that this explorer is reached by, besides IP addresses."""
    names = {"localhost", socket.gethostname(), host, os.environ.get("SPACE_HOST")}
    return frozenset(name.lower() for name in names if name)


def is_own_name(host: str, names: frozenset[str]) -> bool:
    """Return True if a Host header has a name of this explorer, or an address."""
    try:
        name = (urlsplit(f"//{host}").hostname or "").lower()
        # An address has no owner who could make it point here, as a name has.
        return name in names or bool(ipaddress.ip_address(name))
    except ValueError:
        return False
