"""Intervals cover what they promise, are those of Fieller's equation, and are not told from few."""

import numpy as np
import pytest
import torch
from benchmarks.coverage import KINDS, SIZES, covered
from scipy import stats

from bilens.flows.interval import Interval, t_quantile


def test_an_interval_holds_the_shares_within_t_standard_errors():
    generator = torch.Generator().manual_seed(0)
    changes = 1 + torch.rand(9, generator=generator, dtype=torch.float64)
    rises = changes * torch.rand(9, generator=generator, dtype=torch.float64)
    found = Interval.of(rises, changes)
    assert found.value == pytest.approx(float(rises.sum() / changes.sum()))
    for end in (found.low, found.high):
        left = (rises - end * changes).numpy()
        error = abs(left.mean()) / stats.sem(left)
        assert error == pytest.approx(stats.t.ppf(0.975, 8), rel=1e-3)
    assert found.low < found.value < found.high
    assert str(found) == f"{found.value:.0%} [{found.low:.0%}, {found.high:.0%}]"


def test_equal_shares_have_no_spread():
    changes = torch.arange(1, 7).double()
    found = Interval.of(changes / 2, changes)
    assert (found.value, found.low, found.high) == pytest.approx((0.5, 0.5, 0.5))


@pytest.mark.parametrize(
    ("rises", "changes"),
    [([1.0, 2.0, 3.0, 4.0], [1.0] * 4), ([9.0, 0, 0, 0, 0], [9.0, 0, 0, 0, 0])],
)
def test_too_few_questions_or_too_different_ones_have_no_interval(rises, changes):
    found = Interval.of(torch.tensor(rises), torch.tensor(changes))
    assert found.low is found.high is None
    assert str(found) == f"{found.value:.0%}"


@pytest.mark.parametrize("degrees", [4, 5, 7, 11, 23, 400])
def test_quantiles_are_those_of_scipy(degrees):
    assert t_quantile(degrees) == pytest.approx(stats.t.ppf(0.975, degrees), rel=4e-4)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", SIZES)
def test_95_percent_are_covered(kind, size):
    """At least 90 % of skewed questions. A share of 2,000 has an error of half a percent."""
    share, told = covered(kind, size, 2000, np.random.default_rng(size))
    low, high = (0.93, 0.97) if kind == "symmetric" else (0.90, 0.97)
    assert low - 0.015 < share < high + 0.01
    assert told > 0.95
