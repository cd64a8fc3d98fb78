"""Everyday tasks done with README and docs alone: which were, and what was missing.

    python -m benchmarks.tasks

One person did the tasks of `docs/howto/tasks.md` in an empty folder, with the models story and
SmolLM2. `benchmarks/tasks.tsv` has the judgement on each, made after what was missing was
mended: done (yes, partly, no), the seconds of the processor that the call or command took, loading
included for commands, the tries that it needed, and what was missing at the first. This program
adds them up; the numbers before are of a trial of the same tasks by others, one of them not tried.
"""

import csv
from collections import Counter
from pathlib import Path

from experiments.results import Recording, Row

TASKS = Path(__file__).with_suffix(".tsv")
BEFORE = {"yes": 24, "partly": 6, "no": 5}


def rows_of(tasks: list[dict[str, str]]) -> list[Row]:
    """Return the totals of the tasks."""
    counts = Counter(task["done"] for task in tasks)
    if unknown := counts.keys() - BEFORE.keys():
        raise ValueError(f"done is {', '.join(sorted(unknown))}, expected yes, partly or no")
    done = [
        Row(f"tasks done: {how}", counts[how], n=len(tasks), baselines={"before": BEFORE[how]})
        for how in BEFORE
    ]
    first = sum(int(task["tries"]) == 1 for task in tasks)
    seconds = [float(task["seconds"]) for task in tasks if task["seconds"]]
    return [
        *done,
        Row("tasks that needed one try", first, n=len(tasks)),
        Row.of_range("time of the processor for a task", seconds, unit="s"),
    ]


def main() -> None:
    """Add the tasks up and write the file of results."""
    recording = Recording()
    with TASKS.open(encoding="utf-8", newline="") as file:
        tasks = list(csv.DictReader(file, delimiter="\t", quoting=csv.QUOTE_NONE))
    result = recording.write(
        "tasks",
        title="Everyday tasks",
        command="python -m benchmarks.tasks",
        rows=rows_of(tasks),
        settings={"models": ["story", "SmolLM2"], "low and high": "the least and the largest"},
        details=tasks,
    )
    print(*result["rows"], sep="\n")


if __name__ == "__main__":
    main()
