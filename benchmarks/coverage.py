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
from experiments.results import Recording, Row

from bilens.circuits import Interval

KINDS = ("symmetric", "skewed")
SIZES = (5, 8, 12, 24)
TRUE, SPREAD, SETS = 0.8, 0.25, 20_000


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
    recording = Recording() if "--write" in sys.argv else None
    rows = []
    for kind in KINDS:
        for size in SIZES:
            share, has_one = covered(kind, size, SETS, np.random.default_rng(size))
            others = {
                "bootstrap": covered_by_bootstraps(kind, size, 2000, np.random.default_rng(size)),
                "sets that have an interval": has_one,
            }
            claim = f"{kind}, {size} questions: share of intervals that hold the truth"
            rows.append(Row(claim, share, n=SETS, baselines=others))
            print(rows[-1], flush=True)
    if recording is not None:
        recording.write(
            "coverage",
            title="Coverage of intervals",
            command="python -m benchmarks.coverage --write",
            rows=rows,
            settings={"questions": SIZES, "level": 0.95},
            seeds=SIZES,
        )


if __name__ == "__main__":
    main()
