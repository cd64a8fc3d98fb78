"""The claims of the source documents, docs/sources.tsv, and the numbers here that answer them."""

import csv
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from experiments.results import Row
from experiments.verdicts import held

__all__ = ["beside_of", "cells_of", "claims", "row_of", "shown", "table_of", "verdict"]

COLUMNS = ("claim", "number", "low…high", "beside", "source", "held")
HELD = {True: "yes", False: "no", None: ""}
SOURCES = Path(__file__).parents[1] / "docs" / "sources.tsv"


def table_of(name: str, rows: Iterable[Row]) -> pd.DataFrame:
    """Return what a recipe measured: claim, number, interval, beside, the source's number, held.

    The source's number is that of its claim in the table of claims, or else what the recipe noted.
    """
    rows = list(rows)
    results = {name: {"rows": [vars(row) for row in rows]}}
    measured = {row.claim for row in rows}
    of_sources = {x["row"]: x for x in claims() if x["file"] == name and x["row"] in measured}
    table = []
    for row in rows:
        cells, claim = cells_of(vars(row)), of_sources.get(row.claim)
        if claim is not None:
            cells["source"] = claim["source"]
            # What a claim compares with may be a row that another scale has.
            if claim["beside"] in {"", *row.baselines, *measured}:
                cells["held"] = verdict(claim, results)
        table.append({name: cells[name] for name in COLUMNS})
    return pd.DataFrame(table)


def cells_of(row: Mapping[str, Any], together: Sequence[str] = ()) -> dict[str, str]:
    """Return the cells of a row of results; baselines in `together` have cells of their own."""
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
        "beside": ", ".join(f"{name} {shown(number) or 'none'}" for name, number in others.items()),
        "source": shown(row["source"]),
        "held": HELD[row["held"]],
    }


def claims() -> list[dict[str, str]]:
    """Return the rows of the table of claims."""
    with SOURCES.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file, delimiter="\t", quoting=csv.QUOTE_NONE))


def row_of(claim: Mapping[str, str], results: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the row of results that a claim names."""
    (row,) = (row for row in results[claim["file"]]["rows"] if row["claim"] == claim["row"])
    return row


def beside_of(
    claim: Mapping[str, str], results: Mapping[str, Any]
) -> tuple[str, float, float, float] | None:
    """Return the name, value and ends of what a claim's number stands beside, if anything.

    It is a baseline of the row, or another row of the file.
    """
    name, row = claim["beside"], row_of(claim, results)
    if not name:
        return None
    if name in row["baselines"]:
        value = row["baselines"][name]
        return name, value, value, value
    other = row_of({**claim, "row": name}, results)
    value = other["value"]
    low, high = (value if other[end] is None else other[end] for end in ("low", "high"))
    return name, value, low, high


def verdict(claim: Mapping[str, str], results: Mapping[str, Any]) -> str:
    """Return whether a claim that has a number held; "" without a number of the source."""
    if not claim["source"]:
        return ""
    beside = beside_of(claim, results)
    return held(claim["source"], row_of(claim, results), beside and beside[2:])


def shown(value: float | None, low: float | None = None, high: float | None = None) -> str:
    """Return a number with the digits that its interval leaves, of four places without one."""
    known = [number for number in (value, low, high) if number is not None]
    if value is None:
        return ""
    if all(number == int(number) for number in known):
        return f"{int(value):,}"
    if low is None or high is None or low == high:
        return f"{value:.4g}" if abs(value) < 1e4 else f"{value:,.0f}"
    if max(abs(number) for number in known) < 1e-3:
        return f"{value:.2g}"
    digits = max(0, min(4, 1 - math.floor(math.log10(high - low))))
    return f"{value:,.{digits}f}"
