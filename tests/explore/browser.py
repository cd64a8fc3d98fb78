"""One server for each kind of run, and a browser that records all requests to other machines."""

import os
import shutil
import socket
from collections.abc import Iterator
from contextlib import closing, contextmanager
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")


def find_browser() -> str | None:
    """Return the path of Chrome or Chromium, or None; BILENS_NO_BROWSER hides it."""
    if os.environ.get("BILENS_NO_BROWSER"):
        return None
    return next((path for name in NAMES if (path := shutil.which(name))), None)


DRAWN, NODE = "figure svg", "main .flow svg .node"
HERE = ("http://127.0.0.1:", "file:", "data:", "blob:")
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
"""Script: True if no content is at the right beyond the page."""
FAULTS = r"""() => {
  const style = (e) => getComputedStyle(e), faults = new Set();
  const up = (e) => (e ? [e, ...up(e.parentElement)] : []);
  // What is seen of a text: its ancestors cut it off, and those that scroll may do so.
  const seen = (e, inner) => {
    const [seen, cut] = [{ ...inner }, { ...inner }];
    let scrolls = false;
    for (const p of up(e).filter((p) => p !== document.body && !p.ownerSVGElement)) {
      const { overflowX, overflowY, display } = style(p), at = p.getBoundingClientRect();
      const narrow = (box, x, y) => {
        if (x) [box.left, box.right] = [Math.max(box.left, at.left), Math.min(box.right, at.right)];
        if (y) [box.top, box.bottom] = [Math.max(box.top, at.top), Math.min(box.bottom, at.bottom)];
      };
      if (display === "inline" || p === document.documentElement) continue;
      narrow(seen, overflowX !== "visible", overflowY !== "visible");
      // What is around a place that scrolls cuts that place, and not its text.
      scrolls ||= [overflowX, overflowY].some((way) => ["auto", "scroll"].includes(way));
      const cuts = (way) => !scrolls && ["hidden", "clip"].includes(way);
      narrow(cut, cuts(overflowX), cuts(overflowY));
    }
    return { seen, cut };
  };
  const texts = [], walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (walker.nextNode()) {
    const node = walker.currentNode, e = node.parentElement, range = document.createRange();
    const isShown = e.checkVisibility({ opacityProperty: true, visibilityProperty: true });
    if (!node.textContent.trim() || !isShown || e.closest("title, script, style, option")) continue;
    range.selectNodeContents(node);
    for (const { left, right, top, bottom } of range.getClientRects()) {
      // Lines have some space above and below their letters.
      const air = Math.min(4, 0.2 * (bottom - top));
      const inner = { left: left + 1, right: right - 1, top: top + air, bottom: bottom - air };
      const { seen: at, cut } = seen(e, inner), name = node.textContent.trim().slice(0, 40);
      if (at.right - at.left < 1 || at.bottom - at.top < 1) continue;
      const isAxis = e.closest(".axes") !== null;
      texts.push({ e, at, name, owner: e.closest("text") || e, isAxis });
      if (Object.keys(cut).some((side) => Math.abs(cut[side] - inner[side]) > 1.5))
        faults.add(`clipped: ${name}`);
      if (at.right > innerWidth + 1 || at.left < -1) faults.add(`outside: ${name}`);
    }
  }
  texts.sort((a, b) => a.at.top - b.at.top);
  texts.forEach((a, i) => {
    for (const b of texts.slice(i + 1)) {
      if (b.at.top > a.at.bottom) break;
      // Axes have a ground of their own, under which labels scroll.
      if (a.owner === b.owner || a.isAxis !== b.isAxis) continue;
      const wide = Math.min(a.at.right, b.at.right) - Math.max(a.at.left, b.at.left);
      if (wide > 2 && Math.min(a.at.bottom, b.at.bottom) - b.at.top > 2)
        faults.add(`overlap: ${a.name} / ${b.name}`);
    }
  });
  const numbers = (colour) => colour.match(/[\d.]+/g).map(Number);
  const blend = (over, under) => {
    const [r, g, b, alpha = 1] = numbers(over);
    return [r, g, b].map((x, i) => alpha * x + (1 - alpha) * under[i]);
  };
  const light = (colour) => colour.map((x) => x / 255)
    .map((x) => (x <= 0.03928 ? x / 12.92 : ((x + 0.055) / 1.055) ** 2.4))
    .reduce((sum, x, i) => sum + [0.2126, 0.7152, 0.0722][i] * x, 0);
  for (const { e, name } of texts) {
    const ownSize = parseFloat(style(e).fontSize);
    const matrix = e.ownerSVGElement && e.getScreenCTM();
    const size = ownSize * (matrix ? Math.hypot(matrix.a, matrix.b) : 1);
    if (size < 9.9) faults.add(`small: ${name}`);
    // The ink of a matrix's numbers is chosen by their cells, which are a picture.
    if (e.closest(":disabled, [id^=cell-]")) continue;
    const ground = up(e).reverse().filter((p) => style(p).backgroundColor !== "rgba(0, 0, 0, 0)")
      .reduce((under, p) => blend(style(p).backgroundColor, under), [255, 255, 255]);
    const ink = blend(e.ownerSVGElement ? style(e).fill : style(e).color, ground);
    const [dark, bright] = [light(ink), light(ground)].sort((x, y) => x - y);
    if ((bright + 0.05) / (dark + 0.05) < 4.5) faults.add(`pale: ${name}`);
  }
  if (document.documentElement.scrollWidth > innerWidth) faults.add("the page scrolls sideways");
  return [...faults];
}"""
"""Script: what is wrong with the texts of a page as it is shown.

Texts may not lie on others, be cut off, be smaller than 10 pixels or have little contrast (below
4.5, as WCAG asks), and the page may not scroll sideways. Text that its own place scrolls is not cut
off, and disabled buttons may be pale."""


class Visit:
    """A page with its requests to other machines and its errors."""

    def __init__(self, browser: Any, width: int, scheme: str) -> None:
        self.page = browser.new_page()
        self.page.set_default_timeout(PATIENCE)
        self.page.set_viewport_size({"width": width, "height": 900})
        self.page.emulate_media(color_scheme=scheme)
        self.requests: list[str] = []
        self.failures: list[str] = []
        self.page.on("request", lambda request: self.requests.append(request.url))
        self.page.on("pageerror", lambda error: self.failures.append(str(error)))

    def open(self, address: str, ready: str = DRAWN) -> Any:
        self.page.goto(address)
        self.page.wait_for_selector(ready)
        return self.page

    def wait(self, condition: str) -> None:
        self.page.wait_for_function(condition)

    def shows(self, selector: str, text: str) -> None:
        """Wait until a part of the page has the text."""
        self.wait(f"document.querySelector({selector!r})?.innerText.includes({text!r})")

    def fits(self) -> None:
        """Wait until all of the page fits its width; figures are drawn anew for another one."""
        self.wait(FITS)

    def fits_a_phone(self) -> None:
        self.page.set_viewport_size({"width": 390, "height": 900})
        self.page.wait_for_timeout(300)
        self.fits()

    def open_details(self) -> None:
        self.page.locator("details").evaluate_all("(all) => all.forEach((e) => { e.open = true; })")

    def faults(self) -> list[str]:
        """Return what is wrong with the texts of the page, as it is shown now."""
        return self.page.evaluate(FAULTS)


def box(page: Any, name: str) -> Any:
    """Return a box of a form."""
    return page.locator(f"form [name={name}]")


def submit(field: Any, text: str) -> None:
    field.fill(text)
    field.press("Enter")


@contextmanager
def visiting(browser: Any, width: int = 1200, scheme: str = "light") -> Iterator[Visit]:
    """Visit a page without any failure or request to another machine."""
    visit = Visit(browser, width, scheme)
    with closing(visit.page):
        yield visit
        assert [url for url in visit.requests if not url.startswith(HERE)] == []
        assert visit.failures == []


@contextmanager
def chromium(path: str) -> Iterator[Any]:
    from playwright.sync_api import sync_playwright  # noqa: PLC0415

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        with closing(browser):
            yield browser.new_context(bypass_csp=True)


@contextmanager
def served(app: Any) -> Iterator[str]:
    """Yield the address of an explorer while it is served, on a free port."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with closing(app):
        yield app.launch(port=port, wait=False)
