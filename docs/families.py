"""The page of types of models: `python -m docs.families` writes it from its results."""

import json
from pathlib import Path
from typing import Any

from experiments.families import is_exact

__all__ = ["page"]

ROOT = Path(__file__).parents[1]
INTRODUCTION = """# Types of models

What a flow reads of each type of causal model of transformers, made small with random weights.
The number is the relative error of the flow's sum; norms and patterns of most models compute in
float32. *Places* says whether embedding, layers, heads and MLPs are found without a known family.
Where it is off, no flow is shown.
`bilens reproduce families` measures this, and `python -m docs.families` makes the page.
"""
COLUMNS = ("two texts", "one text", "places")


def page(result: dict[str, Any]) -> str:
    """Return the page of types as Markdown."""
    counts = result["counts"]
    lines = [INTRODUCTION]
    lines.append(f"Of {counts['types']} types {counts['made']} are made.\n")
    lines += ["| | exact | refused by name | off |", "|---|---|---|---|"]
    for name in COLUMNS:
        numbers = (counts[f"{name}: {kind}"] for kind in ("exact", "refused", "off"))
        lines.append(f"| {name} | {' | '.join(map(str, numbers))} |")
    exact: list[dict[str, Any]] = []
    others: list[dict[str, Any]] = []
    for row in result["types"]:
        everywhere = all(is_exact(row[name]) for name in COLUMNS)
        (exact if everywhere else others).append(row)
    lines.append(f"\nExact in all three: {', '.join(row['type'] for row in exact)}. The others:\n")
    lines += ["| type | two texts | one text | places |", "|---|---|---|---|"]
    for row in others:
        if row["not made"]:
            cells = [f"not made: {row['not made']}", "", ""]
        else:
            cells = [_cell(row, name) for name in COLUMNS]
        lines.append(f"| {row['type']} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _cell(row: dict[str, Any], name: str) -> str:
    reason = row[f"{name}: refused by"]
    if reason:
        return f"no: `{reason.replace('|', '/')}`"
    error = row[name]
    return f"{error:.0e}" if is_exact(error) else f"off: {error:.0e}"


if __name__ == "__main__":
    path = ROOT / "results" / "families.json"
    text = page(json.loads(path.read_text("utf-8")))
    (ROOT / "docs" / "families.md").write_text(text, "utf-8")
