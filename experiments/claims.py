"""The claims of the source documents, docs/sources.tsv, and the numbers here that answer them."""

import csv
import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import pandas as pd

from experiments.results import Row
from experiments.verdicts import held

__all__ = ["beside_of", "claims", "row_of", "shown", "table_of", "verdict"]

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
        claim = of_sources.get(row.claim)
        # What a claim compares with may be a row that another scale has.
        known = claim is not None and claim["beside"] in {"", *row.baselines, *measured}
        beside = (f"{key} {shown(value) or 'none'}" for key, value in row.baselines.items())
        noted = {True: "yes", False: "no", None: ""}[row.held]
        table.append(
            {
                "claim": row.claim,
                "number": " ".join([shown(row.value, row.low, row.high), row.unit]).strip(),
                "low…high": "…".join(
                    shown(end, row.low, row.high) for end in (row.low, row.high) if end is not None
                ),
                "beside": ", ".join(beside),
                "source": claim["source"] if claim is not None else shown(row.source),
                "held": verdict(claim, results) if claim is not None and known else noted,
            }
        )
    return pd.DataFrame(table)


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
    digits = max(0, min(4, 1 - math.floor(math.log10(high - low))))
    return f"{value:,.{digits}f}"
