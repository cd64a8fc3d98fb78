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
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from experiments.results import Recording, Row

FOLDER = Path(__file__).parent
BEFORE = {"yes": 24, "partly": 6, "no": 5}


def counted(
    what: str, judged: Sequence[Mapping[str, str]], before: Mapping[str, int], known: Sequence[str]
) -> list[Row]:
    """Return how many were done, in each of the known ways, beside the numbers before."""
    counts = Counter(one["done"] for one in judged)
    if unknown := counts.keys() - {*known}:
        raise ValueError(f"done is {', '.join(sorted(unknown))}, expected {', '.join(known)}")
    rows = []
    for how in known:
        beside = {"before": before[how]} if before else {}
        rows.append(Row(f"{what}: {how}", counts[how], n=len(judged), baselines=beside))
    return rows


def time_of(what: str, judged: Sequence[Mapping[str, str]]) -> Row:
    """Return the median and range of the seconds, where they were taken."""
    seconds = [float(one["seconds"]) for one in judged if one["seconds"]]
    return Row.of_range(f"time of the processor for {what}", seconds, unit="s")


def write_judged(
    name: str, title: str, rows_of: Callable[[Sequence[Mapping[str, str]]], list[Row]]
) -> None:
    """Add up the table of judgements beside this file, and write the file of results."""
    recording = Recording()
    with (FOLDER / f"{name}.tsv").open(encoding="utf-8", newline="") as file:
        judged = list(csv.DictReader(file, delimiter="\t", quoting=csv.QUOTE_NONE))
    result = recording.write(
        name,
        title=title,
        command=f"python -m benchmarks.{name}",
        rows=rows_of(judged),
        settings={"models": ["story", "SmolLM2"], "low and high": "the least and the largest"},
        details=judged,
    )
    print(*result["rows"], sep="\n")


def rows_of(tasks: Sequence[Mapping[str, str]]) -> list[Row]:
    """Return the totals of the tasks."""
    first = sum(int(task["tries"]) == 1 for task in tasks)
    return [
        *counted("tasks done", tasks, BEFORE, [*BEFORE]),
        Row("tasks that needed one try", first, n=len(tasks)),
        time_of("a task", tasks),
    ]


if __name__ == "__main__":
    write_judged("tasks", "Everyday tasks", rows_of)
