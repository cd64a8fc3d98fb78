"""What new users tried with README, docs and --help alone: which was done, and what was missing.

    python -m benchmarks.users

One person was a researcher, an engineer and a student, one after the other, with the models story
and SmolLM2 on a machine with much other work. Jobs are those that others tried before, usages odd
ones that people type. `benchmarks/users.tsv` has the judgement on each: done (yes, partly, no, not
tried), the seconds of the processor where they were taken, the tries, and what was missing; its end
says what was mended afterwards. What was partly done at first somebody else tried again. Commands
ran in one process, whose imports are in the seconds of a few. Readers who know the field said of
each sentence, heading and label of README, terminal and picture of a circuit whether they could
explain it: yes, partly if only after the how-to, or no. This program adds them up; the numbers
before are of trials by others, of the sentences before they were written anew.
"""

from collections.abc import Mapping, Sequence

from experiments.results import Row

from benchmarks.tasks import counted, time_of, write_judged

DONE = ("yes", "partly", "no", "not tried")
BEFORE = {"yes": 14, "partly": 6, "no": 3, "not tried": 0}
READ_BEFORE = {"yes": 37, "partly": 15, "no": 16}


def rows_of(tried: Sequence[Mapping[str, str]]) -> list[Row]:
    """Return the totals of the jobs and of the usages."""
    rows = []
    for kind in ("job", "usage"):
        some = [one for one in tried if one["kind"] == kind]
        rows += counted(f"{kind}s done", some, BEFORE if kind == "job" else {}, DONE)
        mended = sum(one["missing"].endswith(": mended") for one in some)
        rows.append(Row(f"{kind}s in which something was mended", mended, n=len(some)))
    read = [one for one in tried if one["kind"] == "sentence"]
    rows += counted("sentences of circuits explained", read, READ_BEFORE, DONE[:3])
    return [*rows, time_of("a job or usage", tried)]


if __name__ == "__main__":
    write_judged("users", "New users", rows_of)
