"""Tables inside of pages that people write, from the files of results.

python -m docs.tables
"""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from experiments.families import EXACT, SUMS
from experiments.results import load_results

__all__ = ["PAGES", "page"]

DOCS = Path(__file__).parent
TABLES = re.compile(r"(<!-- tables of \S+ -->\n).*?(<!-- end -->\n)", re.DOTALL)
"""Where a page has tables that a program makes."""
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


def unseen_templates(results: Mapping[str, Row]) -> str:
    """Return tables of all folds of each model, and of each task."""
    unseen = results["unseen_templates"]
    parts = [f"`{unseen['command']}`, unseen_templates.json, {unseen['commit']}\n"]
    kinds: dict[bool, list[Row]] = {False: [], True: []}
    for row in unseen["rows"]:
        kinds[", " in row["claim"].partition(": ")[0]].append(row)
    titles = ("on the template left out", "f on the template left out")
    for title, rows in zip(titles, kinds.values(), strict=True):
        baselines = [*rows[0]["baselines"]]
        cells = []
        for row in rows:
            name, _, claim = row["claim"].partition(": ")
            first = name if rows is kinds[True] else f"{name}: {claim}"
            others = [number(row["baselines"].get(baseline)) for baseline in baselines]
            cells.append((first, number(row["value"]), between(row), f"{row['n']}", *others))
        parts.append(lines([title, "number", "between", "n", *baselines], cells))
    return "\n".join(parts)


def families(results: Mapping[str, Row]) -> str:
    """Return the types of models whose sums are exact, and a table of all others."""
    exact, others = [], []
    for row in results["families"]["details"]["types"]:
        # Of types that were not made nothing is known.
        cells = [row["not made"] or _reading(row, kind) for kind in SUMS]
        if set(cells) == {"exact"}:
            exact.append(row["type"])
        else:
            others.append((row["type"], *cells))
    parts = [
        f"`{results['families']['command']}`, families.json, {results['families']['commit']}\n",
        f"Exact in all four ({len(exact)}): {', '.join(exact)}.\n",
        lines(("others", *SUMS), others),
    ]
    return "\n".join(parts)


def cost(results: Mapping[str, Row]) -> str:
    """Return tables of passes by reading, and of seconds a pass."""
    measured = results["cost"]
    parts = [f"`{measured['command']}`, cost.json, {measured['commit']}\n"]
    for unit, header in {"passes of both texts": ("reading", "passes"), "s": ("pass", "s")}.items():
        rows = [row for row in measured["rows"] if row["unit"] == unit]
        parts.append(lines(header, [(row["claim"], number(row["value"])) for row in rows]))
    return "\n".join(parts)


def _reading(row: Row, kind: str) -> str:
    reason, error = row[f"{kind}: refused by"], row[kind]
    if reason:
        return f"refused: {reason.removeprefix('BilensError: ')}"
    return "exact" if error < EXACT else f"off by {error:.1e}"


def tuned(results: Mapping[str, Row]) -> str:
    """Return the table of what says which weights changed an answer, by method."""
    result = results["tuned"]
    columns: dict[str, dict[str, str]] = {}
    for row in result["rows"]:
        name, _, rest = row["claim"].partition(": ")
        claim, _, method = rest.rpartition(", ")
        if claim.startswith("R2 with"):
            columns.setdefault(f"R2, {name}", {})[method] = (
                f"{number(row['value'])} ({between(row)})"
            )
        elif claim.startswith("share lost"):
            by = method.removeprefix("by ")
            columns.setdefault(f"lost, {name}", {})[by] = f"{number(row['value'])} ({between(row)})"
        elif name.startswith("cost over"):
            columns.setdefault("cost", {})[name.partition(", ")[2]] = number(row["value"])
    methods = dict.fromkeys(method for column in columns.values() for method in column)
    cells = [
        [method, *(column.get(method, "") for column in columns.values())] for method in methods
    ]
    title = f"`{result['command']}`, tuned.json, {result['commit']}\n"
    return "\n".join([title, lines(["method", *columns], cells)])


PAGES = {
    DOCS / "ideas" / "diff.md": tuned,
    DOCS / "ideas" / "unseen-templates.md": unseen_templates,
    DOCS / "howto" / "convert.md": families,
    DOCS / "howto" / "cost.md": cost,
}
"""Pages, each with the function that makes its tables."""


def page(path: Path, results: Mapping[str, Row]) -> str:
    """Return the text of a page with its tables made anew."""
    made = PAGES[path](results)
    return TABLES.sub(lambda marks: f"{marks[1]}\n{made}\n{marks[2]}", path.read_text("utf-8"))


if __name__ == "__main__":
    of_files = load_results()
    for path in PAGES:
        path.write_text(page(path, of_files), encoding="utf-8")
