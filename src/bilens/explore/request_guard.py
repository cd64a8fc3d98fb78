"""Requests that the explorer answers: to its own name, from its own page, without files.

A page of somebody else's that is open in the same browser can send requests here. It is refused by
its origin; and if its own name points to this machine (DNS rebinding), by that name.
"""

import ipaddress
import json
import os
import socket
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any
from urllib.parse import urlsplit

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Message, Receive, Send], Awaitable[None]]

SENT = "/queue/join"
"""Address of the events of the page; Gradio takes uploads and more at others."""

LARGEST = 2**21
"""Bytes of a request: a drawing has a few thousand."""

NOTHING_ELSE = "The explorer takes what its page sends and nothing else."


def own_names(host: str | None, *, share: bool) -> frozenset[str]:
    """Return the names that this explorer is reached by, besides IP addresses.

    Args:
        host: address that it listens at.
        share: it also has a public address of Gradio's.
    """
    names = {"localhost", socket.gethostname(), host, os.environ.get("SPACE_HOST")}
    names |= {".gradio.live"} if share else set()
    return frozenset(name.lower() for name in names if name)


def is_own_name(host: str, names: frozenset[str]) -> bool:
    """Return True if a Host header has a name of this explorer, or an address.

    Args:
        host: the header, with or without a port.
        names: of this explorer; one that begins with a dot matches all names that end in it.
    """
    try:
        name = (urlsplit(f"//{host}").hostname or "").lower()
    except ValueError:
        return False
    ends = tuple(name for name in names if name.startswith("."))
    return name in names or name.endswith(ends) or _is_address(name)


class RequestGuard:
    """A layer around the app that refuses all other requests, uploads of files among them.

    Args:
        app: the guarded app.
        names: of this explorer.
    """

    def __init__(self, app: App, names: frozenset[str]) -> None:
        self.app, self.names = app, names

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        """Answer, or refuse with status 403 and the reason."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        reason = self._reason(scope)
        if not reason and scope["method"] == "POST":
            body = await _body(receive)
            reason = "" if _is_plain(body) else NOTHING_ELSE
            receive = _again(body, receive)
        if not reason:
            await self.app(scope, receive, send)
            return
        headers = [(b"content-type", b"text/plain; charset=utf-8")]
        await send({"type": "http.response.start", "status": 403, "headers": headers})
        await send({"type": "http.response.body", "body": reason.encode()})

    def _reason(self, scope: Message) -> str:
        headers = {name.lower(): value.decode("latin-1") for name, value in scope["headers"]}
        host, origin = headers.get(b"host", ""), headers.get(b"origin")
        if not is_own_name(host, self.names):
            return "The explorer answers to its own name only; for another, start it with --host."
        if origin is not None and urlsplit(origin).netloc != host:
            return "The explorer answers to its own page only."
        if scope["method"] not in ("GET", "HEAD") and not scope["path"].endswith(SENT):
            return NOTHING_ELSE
        return ""


async def _body(receive: Receive) -> bytes:
    """Return the body of a request, up to its limit and one piece more."""
    body, more = b"", True
    while more and len(body) <= LARGEST:
        message = await receive()
        body += message.get("body", b"")
        more = message.get("more_body", False)
    return body


def _again(body: bytes, receive: Receive) -> Receive:
    """Return a body that has been read, and then the remaining messages."""
    parts = iter([{"type": "http.request", "body": body, "more_body": False}])

    async def call() -> Message:
        return next(parts, None) or await receive()

    return call


def _is_plain(body: bytes) -> bool:
    """Return True if all values are numbers and texts, or lists of them.

    Gradio takes an object for a file, and would fetch it from any address that it names.
    """
    try:
        values = json.loads(body)["data"] if len(body) <= LARGEST else None
    except (ValueError, KeyError, TypeError, RecursionError):
        return False
    return isinstance(values, list) and not any(
        isinstance(part, dict | list)
        for value in values
        for part in (value if isinstance(value, list) else [value])
    )


def _is_address(name: str) -> bool:
    # An address has no owner who could make it point here, as a name has.
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True
