"""An interval of 95 % of a share: the ratio of two means over questions."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

LEAST = 5
"""Questions without which no interval is told: fewer say too little about their spread."""


@dataclass(frozen=True)
class Interval:
    """A share of a change, with its interval of 95 % over questions.

    There is none, and both ends are None, for fewer than `LEAST` questions, and where the mean
    change is not far enough from 0 for their number.

    Source: Fieller 1954, "Some problems in interval estimation". Coverage is simulated in
        `benchmarks/coverage.py`.
    """

    value: float
    low: float | None = None
    high: float | None = None

    @classmethod
    def of(cls, rises: Float[Tensor, " cases"], changes: Float[Tensor, " cases"]) -> "Interval":
        """Return the mean rise over the mean change.

        The interval has all shares q for which the mean of rise - q change is within t standard
        errors of 0. They are the roots of a quadratic equation.
        """
        pairs = torch.stack([rises, changes]).cpu().double()
        spread = pairs - pairs.mean(1, keepdim=True)
        return cls.of_moments(len(rises), pairs.mean(1), spread @ spread.T)

    @classmethod
    def of_moments(
        cls, n: int, means: Float[Tensor, " 2"], products: Float[Tensor, "2 2"]
    ) -> "Interval":
        """Return the first of two means over the second, from sums of products around them."""
        value = float(means[0] / means[1])
        if n < LEAST:
            return cls(value)
        errors = t_quantile(n - 1) ** 2 * products / (n * (n - 1))
        # The roots of a q^2 - 2 b q + c.
        (c, b), (_, a) = (means[:, None] * means - errors).tolist()
        if a <= 0:
            return cls(value)
        # Rounding may leave a little less than 0 where no question differs from another.
        root = max(b * b - a * c, 0.0) ** 0.5
        return cls(value, (b - root) / a, (b + root) / a)

    def __str__(self) -> str:
        spread = "" if self.low is None else f" [{self.low:z.0%}, {self.high:z.0%}]"
        return f"{self.value:z.0%}{spread}"


def interval_columns(name: str, shares: Sequence[Interval]) -> dict[str, list[float | None]]:
    """Return columns of a table: shares, and the ends of their intervals where any has them."""
    columns: dict[str, list[float | None]] = {name: [share.value for share in shares]}
    if any(share.low is not None for share in shares):
        columns[f"{name}, low"] = [share.low for share in shares]
        columns[f"{name}, high"] = [share.high for share in shares]
    return columns


def t_quantile(degrees: int) -> float:
    """Return the 97.5 % quantile of Student's t, within 0.04 % from 4 degrees of freedom on.

    Source: Abramowitz and Stegun 1964, 26.7.5.
    """
    # scipy.stats would be a dependency for this number, and takes two seconds to import.
    z, v = 1.959963984540054, degrees
    terms = (
        z,
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
        (79 * z**9 + 776 * z**7 + 1482 * z**5 - 1920 * z**3 - 945 * z) / 92160,
    )
    return sum(term / v**power for power, term in enumerate(terms))
