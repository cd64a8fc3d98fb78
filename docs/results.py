"""The page of results, from the files of `results/`: `python -m docs.results` writes it.

Do not edit the page; run the program of a file again.
"""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from experiments.results import load_results

__all__ = ["GROUPS", "OF_THE_PROJECT", "PAGE", "page", "shown"]

PAGE = Path(__file__).with_name("results.md")
GROUPS = {
    "Images": [
        *("accuracy", "fig3", "fig4", "noises", "fig5"),
        *("deep", "seeds", "bonds", "masks", "case_study", "modular"),
    ],
    "Language models": [
        *("stories", "grammar", "rules", "compare", "anneal", "linear_gates"),
        *("tensorise", "tensor_readings"),
    ],
    "Circuits and flows": [
        *("coverage", "labels", "task_directions", "head_directions", "part_weights", "patching"),
        *("unseen", "truth", "agreement", "one_direction", "stream_directions"),
    ],
    "Exactness and speed": [
        *("exactness", "robustness", "flow_memory", "flow_time", "attention", "short_attention"),
        *("kernels", "kernel_launches", "launches", "report_time", "eigenpairs", "processes"),
        *("gpu", "peers", "speed", "tasks"),
    ],
}
"""Headings of the page, and the names of their files."""
OF_THE_PROJECT = (
    *("areas", "circuits", "families", "help", "pages", "proposals", "right", "size", "suite"),
    "unseen_templates",
)
"""Files that the page leaves out: about the project itself, or with a page of their own."""
HELD = {True: "yes", False: "no", None: ""}
INTRODUCTION = """# Results

Numbers of README and these pages: command, file in `results/`, commit. Between *low* and *high* are
95 %, or what the file's settings say. Columns named by a method, and *beside*, are alternatives of
the same run; *source* is the papers' number; … is as in the line above.
"""


def page(results: Mapping[str, Mapping[str, Any]]) -> str:
    """Return the page of results as Markdown."""
    parts = [INTRODUCTION]
    for heading, names in GROUPS.items():
        parts.append(f"## {heading}\n")
        parts += [_section(name, results[name]) for name in names if "machine" in results[name]]
    return "\n".join(parts)


def shown(value: float | None, low: float | None = None, high: float | None = None) -> str:
    """Return a number with the digits that its interval leaves, of four places without one."""
    known = [number for number in (value, low, high) if number is not None]
    if value is None:
        return ""
    if all(number == int(number) for number in known):
        return f"{int(value):,}"
    if low is None or high is None or low == high:
        return f"{value:.4g}" if abs(value) < 1e4 else f"{value:,.0f}"
    digits = max(0, min(4, 1 - math.floor(math.log10(high - low))))
    return f"{value:,.{digits}f}"


def _section(name: str, result: Mapping[str, Any]) -> str:
    # Seconds of tasks stand beside their calls, on a page of their own.
    of_file = result["rows"][:2] if name == "tasks" else result["rows"]
    together = _baselines(of_file)
    rows = [_cells(row, together) for row in of_file]
    for row, claim in zip(rows, short([row["claim"] for row in rows]), strict=True):
        row["claim"] = claim
    columns = [key for key in rows[0] if any(row[key] for row in rows)]
    machine = "" if "no GPU" in result["machine"] else f", {result['machine']}"
    lines = [
        f"### {result['title']}\n",
        f"`{result['command']}` · {name}.json, {result['commit']}{machine}\n",
        *([f"{result['note']}\n"] if "note" in result else []),
        "|".join(columns),
        "|".join("---" for _ in columns),
    ]
    lines += ["|".join(row[column] for column in columns).rstrip("|") + "|" for row in rows]
    return "\n".join(lines) + "\n"


def short(claims: Sequence[str]) -> list[str]:
    """Return claims without the half, before or after a colon, that the claim above has too."""
    shown, above = [], ("", "")
    for claim in claims:
        first, _, second = halves = claim.partition(": ")
        if second and first == above[0]:
            shown.append(f"… {second}")
        elif second and second == above[1]:
            shown.append(f"{first}: …")
        else:
            shown.append(claim)
        above = halves[0], second
    return shown


def _baselines(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the baselines that most rows of a file have, which get columns."""
    counts = Counter(name for row in rows for name in row["baselines"])
    return [name for name, count in counts.items() if count > len(rows) / 2 and len(rows) > 1]


def _cells(row: Mapping[str, Any], together: Sequence[str]) -> dict[str, str]:
    value, low, high = (row[key] for key in ("value", "low", "high"))
    unit = f" {row['unit']}" if row["unit"] else ""
    ends = [shown(end, low, high) for end in (low, high)] if low is not None else []
    others = {name: number for name, number in row["baselines"].items() if name not in together}
    return {
        "claim": row["claim"].replace("|", "/"),
        "number": shown(value, low, high) + (unit if value is not None else ""),
        "low…high": "…".join(ends),
        "n": "" if row["n"] is None else f"{row['n']:,}",
        **{name: shown(row["baselines"].get(name)) for name in together},
        "beside": ", ".join(f"{name} {shown(number)}" for name, number in others.items()),
        "source": shown(row["source"]),
        "held": HELD[row["held"]],
    }


if __name__ == "__main__":
    PAGE.write_text(page(load_results()), encoding="utf-8")
