"""Words until the answer of reports, sizes, heights, what is wrong with texts, and time.

`python -m benchmarks.pages PAGE.html ...` measures pages, with Chrome or Chromium also heights.
`--write` makes `results/pages.json` of them. `--report MODEL --data NAME` times a report in
seconds of the processor, after the import and the loading of the model.
"""

import argparse
import re
import time
from html import unescape
from itertools import product
from pathlib import Path
from typing import Any

from experiments.results import Recording, Row
from tests.explore.browser import FAULTS, find_browser

import bilens
from bilens.pages import report

SIZES = {"desktop": 1280, "phone": 390}
"""Widths of windows in pixels."""
ENDS = """() => document.documentElement.scrollHeight"""
OPEN = "document.querySelectorAll('section > details').forEach((part) => { part.open = true; })"
SMALL = """() => [...document.querySelectorAll("main text, main tspan")]
    .filter((e) => e.textContent.trim() && e.checkVisibility())
    .map((e) => [parseFloat(getComputedStyle(e).fontSize), e.getScreenCTM()])
    .map(([size, matrix]) => size * Math.hypot(matrix.a, matrix.b))"""
"""Script: sizes of all labels in pixels of the window."""


def words_until_answered(page: str) -> int:
    """Return the number of words from the top of a report to the end of its answer."""
    body = page[page.index("<body>") :]
    answer = re.search(r'<p class="answer">.*?</p>', body, re.DOTALL)
    assert answer is not None
    return len(unescape(re.sub(r"<[^>]*>", " ", body[: answer.end()])).split())


def browsed(pages: list[Path], executable: str) -> dict[Path, dict[str, Any]]:
    """Return the height of each page in both windows, its smallest label, and its faults."""
    from playwright.sync_api import sync_playwright  # noqa: PLC0415

    sizes: dict[Path, dict[str, Any]] = {page: {} for page in pages}
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=executable, args=["--no-sandbox"])
        for (window, width), scheme in product(SIZES.items(), ("light", "dark")):
            view: dict[str, Any] = {
                "viewport": {"width": width, "height": 900},
                "color_scheme": scheme,
            }
            tab = browser.new_context(**view).new_page()
            for page in pages:
                tab.goto(page.resolve().as_uri())
                tab.wait_for_timeout(1000)
                sizes[page][window] = tab.evaluate(ENDS)
                sizes[page][f"{window}, smallest label"] = min(tab.evaluate(SMALL))
                faults = tab.evaluate(FAULTS)
                tab.evaluate(OPEN)
                tab.wait_for_timeout(3000)
                faults += tab.evaluate(FAULTS)
                print(page, window, scheme, *faults, sep="\n  ")
                sizes[page]["faults"] = sizes[page].get("faults", 0) + len(faults)
        browser.close()
    return sizes


def report_seconds(model: str, data: str, folder: Path) -> float:
    """Return seconds of the processor that the report of a model takes."""
    opened = bilens.load(model)
    start = time.process_time()
    report(opened, folder / "report.html", data=data)
    return time.process_time() - start


def main() -> None:
    """Measure, print, and write the file of results."""
    parser = argparse.ArgumentParser()
    parser.add_argument("pages", nargs="*", type=Path)
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--report")
    parser.add_argument("--data", default="tinystories")
    options = parser.parse_args()
    recording = Recording() if options.write else None
    rows = []
    chrome = find_browser()
    sizes = browsed(options.pages, chrome) if chrome and options.pages else {}
    for page in options.pages:
        name = f"{page.stem} of {page.parent.name}"
        words = words_until_answered(page.read_text(encoding="utf-8"))
        size = Row(f"{name}: size", round(page.stat().st_size / 1e6, 2), unit="MB")
        rows += [Row(f"{name}: words until the end of the answer", words), size]
        if of := sizes.get(page):
            least = round(min(of[f"{window}, smallest label"] for window in SIZES), 1)
            rows += [
                *(Row(f"{name}: height, {window}", of[window], unit="pixels") for window in SIZES),
                Row(f"{name}: smallest label", least, unit="pixels"),
                Row(f"{name}: texts that overlap, are cut off, too small or pale", of["faults"]),
            ]
    if options.report:
        taken = report_seconds(options.report, options.data, Path("runs"))
        name = Path(options.report).stem
        rows.append(Row(f"report of {name}: time of the processor", taken, unit="s"))
    print(*rows, sep="\n")
    if recording is not None:
        recording.write(
            "pages",
            title="Pages",
            command="python -m benchmarks.pages --write PAGE ...",
            rows=rows,
            settings={"widths of windows in pixels": SIZES, "schemes": ["light", "dark"]},
        )


if __name__ == "__main__":
    main()
