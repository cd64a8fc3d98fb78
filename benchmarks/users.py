"""What new users tried with README, docs and --help alone: which was done, and what was missing.

    python -m benchmarks.users

One person was a researcher, an engineer and a student, one after the other, with the models story
and SmolLM2 on a machine with much other work. Jobs are those that others tried before, usages
odd ones that people type. `benchmarks/users.tsv` has the judgement on each at the first trial: done
(yes, partly, no, not tried), the seconds of the processor where they were taken, the tries, and
what was missing; its end says what was mended afterwards. Commands ran in one process, whose
imports are in the seconds of a few. This program adds them up; the numbers before are of the trial
of the same jobs by others.
"""

import csv
from collections import Counter
from pathlib import Path

from experiments.results import Recording, Row

USERS = Path(__file__).with_suffix(".tsv")
DONE = ("yes", "partly", "no", "not tried")
BEFORE = {"yes": 14, "partly": 6, "no": 3, "not tried": 0}


def rows_of(tried: list[dict[str, str]]) -> list[Row]:
    """Return the totals of the jobs and of the usages."""
    if unknown := {one["done"] for one in tried} - {*DONE}:
        raise ValueError(f"done is {', '.join(sorted(unknown))}, expected {', '.join(DONE)}")
    rows = []
    for kind in ("job", "usage"):
        some = [one for one in tried if one["kind"] == kind]
        counts = Counter(one["done"] for one in some)
        mended = sum(one["missing"].endswith(": mended") for one in some)
        for how in DONE:
            before = {"before": BEFORE[how]} if kind == "job" else {}
            rows.append(Row(f"{kind}s done: {how}", counts[how], n=len(some), baselines=before))
        rows.append(Row(f"{kind}s in which something was mended", mended, n=len(some)))
    seconds = [float(one["seconds"]) for one in tried if one["seconds"]]
    return [*rows, Row.of_range("time of the processor for a job or usage", seconds, unit="s")]


def main() -> None:
    """Add them up and write the file of results."""
    recording = Recording()
    with USERS.open(encoding="utf-8", newline="") as file:
        tried = list(csv.DictReader(file, delimiter="\t", quoting=csv.QUOTE_NONE))
    result = recording.write(
        "users",
        title="New users",
        command="python -m benchmarks.users",
        rows=rows_of(tried),
        settings={"models": ["story", "SmolLM2"], "low and high": "the least and the largest"},
        details=tried,
    )
    print(*result["rows"], sep="\n")


if __name__ == "__main__":
    main()
