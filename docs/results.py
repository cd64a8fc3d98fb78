"""The page of results, from the files of `results/`: `python -m docs.results` writes it.

A file is what a recipe measured: title, command, commit, date, hardware, seeds, a note, and rows of
claim, number, spread and baseline. Do not edit the page; run the recipe again.
"""

import json
from pathlib import Path
from typing import Any

__all__ = ["GROUPS", "load_results", "page"]

ROOT = Path(__file__).parents[1]
GROUPS = {
    "Images": [
        *("accuracy", "ten_eigenvectors", "fig3", "fig4", "noises", "fig5", "pictures"),
        *("deep", "seeds", "bonds", "masks", "case_study", "modular"),
    ],
    "Language models": [
        *("stories", "grammar", "rules", "compare", "anneal", "linear_gates"),
        *("tensorise", "tensor_readings"),
    ],
    "Circuits and flows": [
        "circuits",
        "areas",
        "labels",
        "patching",
        "unseen",
        "truth",
        "agreement",
        "stream_directions",
    ],
    "Exactness and speed": [
        *("exactness", "robustness", "flow_memory", "flow_time", "attention", "kernels"),
        *("gpu", "peers", "speed", "suite", "help", "pages", "tasks"),
    ],
}
"""Headings of the page, and the names of their files."""
INTRODUCTION = """# Results

Each table is a file of `results/`; `python -m docs.results` makes this page from them. The line
above a table has the command that measured it, the file, the date and the commit; run a command
at its commit, since some recipes and benchmarks have left. Files of commit b0b1e92 were copied
from the tables of version 0.3.0. Spread is the standard deviation over seeds (±), a 95 %
interval, or the values themselves. The machine has two cores and no GPU unless a line names
another, and times are of the processor, beside other work. "Pearce" is *Weight-based
Decomposition: A Case for Bilinear MLPs* (2024), "the study" *Bilinear Layers for Mech-Interp: an
MNIST case study* (2024).
"""


def load_results(folder: Path = ROOT / "results") -> dict[str, dict[str, Any]]:
    """Return the content of each file of results by its name without ending."""
    return {
        path.stem: json.loads(path.read_text("utf-8")) for path in sorted(folder.glob("*.json"))
    }


def page(results: dict[str, dict[str, Any]]) -> str:
    """Return the page of results as Markdown."""
    parts = [INTRODUCTION]
    for heading, names in GROUPS.items():
        parts.append(f"## {heading}\n")
        parts += [_section(name, results[name]) for name in names]
    return "\n".join(parts)


def _section(name: str, result: dict[str, Any]) -> str:
    seeds = f", seeds {result['seeds']}" if result["seeds"] else ""
    hardware = "" if result["hardware"].startswith("2 cores") else f", {result['hardware']}"
    lines = [
        f"### {result['title']}\n",
        f"`{result['command']}` · {name}.json, {result['date']}, {result['commit']}"
        f"{hardware}{seeds}\n",
        "| claim | number | spread | baseline |",
        "|---|---|---|---|",
    ]
    for row in result["rows"]:
        cells = (str(row[column]) for column in ("claim", "number", "spread", "baseline"))
        lines.append(f"| {' | '.join(cells)} |")
    if result["note"]:
        lines += ["", result["note"]]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    (ROOT / "docs" / "results.md").write_text(page(load_results()), encoding="utf-8")
