"""The page of results, from the files of `results/`: `python -m docs.results` writes it.

A file is what a recipe measured: title, command, commit, date, hardware, seeds, a note, and rows of
claim, number, spread and baseline. Do not edit the page; run the recipe again.
"""

import json
from pathlib import Path
from typing import Any

__all__ = ["GROUPS", "OF_THE_PROJECT", "load_results", "page"]

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
        "coverage",
        "labels",
        "task_directions",
        "head_directions",
        "part_weights",
        "patching",
        "unseen",
        "truth",
        "agreement",
        "one_direction",
        "stream_directions",
    ],
    "Exactness and speed": [
        *(
            "exactness",
            "robustness",
            "flow_memory",
            "flow_time",
            "attention",
            "kernels",
            "kernel_launches",
            "launches",
            "report_time",
            "eigenpairs",
            "processes",
        ),
        *("gpu", "peers", "speed", "tasks"),
    ],
}
"""Headings of the page, and the names of their files."""
OF_THE_PROJECT = (*("areas", "circuits"), *("families", "help", "pages", "size", "suite"))
"""Files that the page leaves out: about the project itself, or of an earlier search."""
COLUMNS = ("claim", "number", "spread", "baseline")
"""Columns of a table; those that are empty in all of its rows are left out."""
INTRODUCTION = """# Results

Numbers of README and these pages: command, file in `results/`, commit. Files of b0b1e92 copy
the tables of 0.3.0. Spread: standard deviation over seeds (±), 95 % interval, or values. Times are
of the processor, on two cores or the machine named. "Pearce" is *Weight-based Decomposition: A Case
for Bilinear MLPs*, "the study" *Bilinear Layers for Mech-Interp: an MNIST case study*, both 2024.
"""


def load_results(folder: Path = ROOT / "results") -> dict[str, dict[str, Any]]:
    """Return the content of each file of results by its name without ending.

    Those of `experiments.results` have numbers as numbers, and pages of their own.
    """
    results = {}
    for path in sorted(folder.glob("*.json")):
        result = json.loads(path.read_text("utf-8"))
        if "machine" not in result:
            results[path.stem] = result
    return results


def page(results: dict[str, dict[str, Any]]) -> str:
    """Return the page of results as Markdown."""
    parts = [INTRODUCTION]
    for heading, names in GROUPS.items():
        parts.append(f"## {heading}\n")
        parts += [_section(name, results[name]) for name in names]
    return "\n".join(parts)


def _section(name: str, result: dict[str, Any]) -> str:
    hardware = "" if result["hardware"].startswith("2 cores") else f", {result['hardware']}"
    # Seconds of tasks stand beside their calls, on a page of their own.
    rows = result["rows"][:2] if name == "tasks" else result["rows"]
    columns = [column for column in COLUMNS if any(row[column] for row in rows)]
    lines = [
        f"### {result['title']}\n",
        f"`{result['command']}` · {name}.json, {result['commit']}{hardware}\n",
        *([f"{result['note']}\n"] if result["note"] else []),
        "| ".join(columns),
        "|".join("---" for _ in columns),
    ]
    lines += ["| ".join(str(row[column]) for column in columns).rstrip() for row in rows]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    (ROOT / "docs" / "results.md").write_text(page(load_results()), encoding="utf-8")
