"""The tables of the page about circuits on templates that nobody saw, from the files of results.

python -m docs.unseen
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from experiments.results import load_results

__all__ = ["PAGE", "page"]

PAGE = Path(__file__).with_name("ideas") / "unseen-templates.md"
BEGIN, END = "<!-- tables of docs/unseen.py -->\n", "<!-- end -->\n"
Row = Mapping[str, Any]


def number(value: float | None) -> str:
    """Return a number with two decimals, or a dash."""
    return "-" if value is None else f"{value:.2f}"


def between(row: Row) -> str:
    """Return an interval."""
    return "-" if row["low"] is None else f"{row['low']:.2f}…{row['high']:.2f}"


def lines(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a Markdown table."""
    cells = [header, ["---"] * len(header), *rows]
    return "\n".join("|".join(row) for row in cells) + "\n"


def tables(results: Mapping[str, Row]) -> str:
    """Return the tables: all folds of each model, each task, and each behaviour of proposals."""
    unseen, proposals = results["unseen_templates"], results["proposals"]
    parts = [f"`{unseen['command']}` · unseen_templates.json, {unseen['commit']}\n"]
    of_all: list[Sequence[str]] = []
    of_tasks: list[Sequence[str]] = []
    baselines = [*unseen["rows"][0]["baselines"]]
    for row in unseen["rows"]:
        name, _, claim = row["claim"].partition(": ")
        others = [number(row["baselines"].get(baseline)) for baseline in baselines]
        if ", " in name:
            found = "yes" if row["held"] else "no"
            of_tasks.append((name, number(row["value"]), between(row), *others, found))
        else:
            of_all.append((name, claim, number(row["value"]), between(row), f"{row['n']}", *others))
    columns = [
        "model",
        "of circuits found, on the template left out",
        "number",
        "95 %",
        "n",
        *baselines,
    ]
    parts.append(lines(columns, of_all))
    columns = ["f on the template left out", "median", "range", *baselines, "all found"]
    parts.append(lines(columns, of_tasks))
    parts.append(f"`{proposals['command']}` · proposals.json, {proposals['commit']}\n")
    by_behaviour: dict[str, list[str]] = {}
    for row in proposals["rows"]:
        name, _, claim = row["claim"].partition(": ")
        if claim:
            by_behaviour.setdefault(name, []).append(number(row["value"]))
    columns = ["behaviour", "accepted", "f by hand, found on proposals", "the other way round"]
    parts.append(lines(columns, [(name, *cells) for name, cells in by_behaviour.items()]))
    return "\n".join(parts)


def page(text: str, results: Mapping[str, Row]) -> str:
    """Return the page with its tables made anew."""
    before, _, rest = text.partition(BEGIN)
    return f"{before}{BEGIN}\n{tables(results)}\n{END}{rest.partition(END)[2]}"


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text("utf-8"), load_results()), encoding="utf-8")
