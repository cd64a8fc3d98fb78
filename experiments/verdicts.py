"""Whether a source's number comes out here, by one rule for all claims.

A source says a number, "98.05"; a range, "0.5 to 0.6"; an end, "at most 1" or "at least 99"; or a
comparison with the number that stands beside: "below", "above" or "equal". A number is a range
too: 0.3 points on both sides of an accuracy, 0.05 of another number up to 1, a tenth of a larger
one. With the interval here wholly inside of the range the claim held, wholly outside it did not,
and across an end nobody can tell, nor from a single sample, such as one seed. A number without an
interval, which no chance moves, is judged alone.
"""

import math
import re
from collections.abc import Mapping
from typing import Any

__all__ = ["held", "numbers_of_source"]

Row = Mapping[str, Any]
POINTS, SHARE, TENTH = 0.3, 0.05, 0.1
"""Distances from a source's accuracy in percent, other number up to 1, and larger number."""


def held(source: str, row: Row, beside: tuple[float, float] | None = None) -> str:
    """Return "yes", "no" or "cannot tell"; `beside` are the ends of the number to compare with.

    Raises:
        ValueError: the source has none of the forms, or compares with nothing.
    """
    if row["n"] == 1:
        return "cannot tell"
    ends = row["value"], row["value"]
    if row["low"] is not None:
        ends = row["low"], row["high"]
    if source in ("below", "above", "equal"):
        if beside is None:
            raise ValueError(f"{source!r}, expected a number beside to compare with")
        least, most = beside
        if source == "equal":
            return _inside(ends, _around((least + most) / 2, row))
        # Between the two intervals nobody can tell.
        smaller, larger = (ends, beside) if source == "below" else (beside, ends)
        if smaller[1] < larger[0]:
            return "yes"
        return "no" if smaller[0] > larger[1] else "cannot tell"
    numbers = sorted(numbers_of_source(source))
    if source.startswith("at most "):
        of_source = -math.inf, numbers[0]
    elif source.startswith("at least "):
        of_source = numbers[0], math.inf
    elif " to " in source:
        of_source = numbers[0], numbers[-1]
    else:
        of_source = _around(float(source), row)
    return _inside(ends, of_source)


def numbers_of_source(source: str) -> set[float]:
    """Return the numbers that a source says."""
    return {float(number) for number in re.findall(r"[\d.]+", source)}


def _around(number: float, row: Row) -> tuple[float, float]:
    """Return the range that is as good as the number."""
    if row["unit"] == "%" and "accuracy" in row["claim"]:
        distance = POINTS
    else:
        distance = SHARE if number <= 1 else TENTH * number
    return number - distance, number + distance


def _inside(ends: tuple[float, float], of: tuple[float, float]) -> str:
    (low, high), (least, most) = ends, of
    if least <= low and high <= most:
        return "yes"
    return "no" if high < least or low > most else "cannot tell"
