"""Cases of a matrix that run every night; the suite takes some of each kind."""

from collections.abc import Container, Iterable
from typing import Any

import pytest


def nightly(cases: Iterable[Any], daily: Container[Any]) -> list[Any]:
    """Return the cases, and mark slow those that are not among `daily`; a tuple is one case."""
    result = []
    for case in cases:
        values = case if isinstance(case, tuple) else (case,)
        result.append(pytest.param(*values, marks=() if case in daily else pytest.mark.slow))
    return result
