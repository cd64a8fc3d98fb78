"""Coverage of the intervals of circuits, and of bootstraps in their place, by simulation.

`python -m benchmarks.coverage` prints the shares of simulated sets of questions whose interval of
95 % holds the true share of the change, 0.8; `--write` also writes them to results/coverage.json. A
question's change is log-normal with a spread of one half. Its own share is 0.8 with a spread of
0.25, normal or exponential. A quarter of a minute on one core.
"""

import sys

import numpy as np
import torch
from experiments.patching import resampled

from benchmarks.clock import write_results
from bilens.read.flow.interval import Interval

KINDS = ("symmetric", "skewed")
SIZES = (5, 8, 12, 24)
TRUE, SPREAD = 0.8, 0.25


def questions(kind: str, size: int, sets: int, random: np.random.Generator) -> np.ndarray:
    """Return rises and changes of sets of questions, (2, sets, size)."""
    changes = random.lognormal(1, 0.5, (sets, size))
    if kind == "symmetric":
        noise = random.normal(size=(sets, size))
    else:
        noise = random.exponential(size=(sets, size)) - 1
    return np.stack([(TRUE + SPREAD * noise) * changes, changes])


def covered(kind: str, size: int, sets: int, random: np.random.Generator) -> tuple[float, float]:
    """Return the share of intervals that hold the truth, and the share of sets that have one."""
    hits = []
    for rises, changes in torch.from_numpy(questions(kind, size, sets, random)).unbind(1):
        interval = Interval.of(rises, changes)
        if interval.low is not None and interval.high is not None:
            hits.append(interval.low <= TRUE <= interval.high)
    return sum(hits) / len(hits), len(hits) / sets


def covered_by_bootstraps(kind: str, size: int, sets: int, random: np.random.Generator) -> float:
    """Return the share of percentile intervals of 2,000 bootstraps that hold the truth."""
    drawn, hits = resampled(size), 0
    for rises, changes in questions(kind, size, sets, random).swapaxes(0, 1):
        ratios = rises[drawn].mean(1) / changes[drawn].mean(1)
        low, high = np.quantile(ratios, [0.025, 0.975])
        hits += bool(low <= TRUE <= high)
    return hits / sets


def main() -> None:
    """Simulate, print, and write if asked to."""
    rows = []
    for kind in KINDS:
        shares, told, bootstraps = [], [], []
        for size in SIZES:
            share, has_one = covered(kind, size, 20_000, np.random.default_rng(size))
            shares.append(share)
            told.append(has_one)
            of_kind = covered_by_bootstraps(kind, size, 2000, np.random.default_rng(size))
            bootstraps.append(of_kind)
        print(kind, "sets that have an interval:", *(f"{x:.3f}" for x in told))
        sizes, found = ", ".join(map(str, SIZES)), ", ".join(f"{x:.3f}" for x in shares)
        others = f"bootstrap {min(bootstraps):.3f}…{max(bootstraps):.3f}"
        rows.append((f"{kind}, {sizes} questions", found, others))
        print(*rows[-1], sep="  ", flush=True)
    if "--write" in sys.argv:
        write_results("coverage", "Coverage of intervals", "coverage --write", "", rows)


if __name__ == "__main__":
    main()
