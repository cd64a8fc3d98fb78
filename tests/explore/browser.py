"""One server for each kind of run, and a browser that records all requests to other machines."""

import os
import shutil
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")


def find_browser() -> str | None:
    """Return the path of Chrome or Chromium, or None; BILENS_NO_BROWSER hides it."""
    if os.environ.get("BILENS_NO_BROWSER"):
        return None
    return next((path for name in NAMES if (path := shutil.which(name))), None)


DRAWN = ".js-plotly-plot .main-svg"
PATIENCE = 120_000
"""Milliseconds that a page may take; a machine may be busy with all other tests."""


FITS = """() => {
  const scrolls = (e) => e && (getComputedStyle(e).overflowX === "auto" || held(e));
  const held = (e) => scrolls(e.parentElement);
  const fixed = (e) => e.checkVisibility() && !e.ownerSVGElement && !held(e);
  const ends = [...document.querySelectorAll("body *")].filter(fixed)
    .map((e) => e.getBoundingClientRect().right);
  return Math.max(...ends) <= innerWidth;
}"""
"""Script: True if no content is at the right beyond the page. Gradio cuts off content that is too
wide for its place, and the page itself grows no wider."""


class Visit:
    """A page with its requests to other machines and its errors."""

    def __init__(self, browser: Any, width: int) -> None:
        # Pages of one context share their cache: a page of Gradio's is several megabytes of script.
        self.page = browser.new_page()
        self.page.set_default_timeout(PATIENCE)
        self.page.set_viewport_size({"width": width, "height": 900})
        self.outside: list[str] = []
        self.failures: list[str] = []
        self.page.on("request", self._note)
        self.page.on("pageerror", lambda error: self.failures.append(str(error)))

    def _note(self, request: Any) -> None:
        if not request.url.startswith(("http://127.0.0.1:", "file:", "data:", "blob:")):
            self.outside.append(request.url)

    def open(self, address: str, ready: str = DRAWN) -> Any:
        self.page.goto(address)
        self.page.wait_for_selector(ready)
        return self.page

    def wait(self, condition: str) -> None:
        self.page.wait_for_function(condition)

    def fits(self) -> None:
        """Wait until all of the page fits its width; figures are drawn anew for another one."""
        self.wait(FITS)


@contextmanager
def visiting(browser: Any, width: int = 1200) -> Iterator[Visit]:
    """Visit a page without any failure or request to another machine."""
    visit = Visit(browser, width)
    try:
        yield visit
        assert visit.outside == []
        assert visit.failures == []
    finally:
        visit.page.close()


@contextmanager
def chromium(path: str) -> Iterator[Any]:
    from playwright.sync_api import sync_playwright  # noqa: PLC0415

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        try:
            yield browser.new_context()
        finally:
            browser.close()


@contextmanager
def served(app: Any) -> Iterator[str]:
    """Yield the address of an explorer while it is served, on a free port."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    try:
        yield app.launch(port=port, wait=False)
    finally:
        app.close()
