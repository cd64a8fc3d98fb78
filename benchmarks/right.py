"""Faults in what is read, asked and said: failing tests of each kind, and coverage of intervals.

`python -m benchmarks.right` runs the tests that hold each kind of fault and prints how many fail;
`--write` also writes the numbers to results/right.json. Some minutes on one core.
"""

import subprocess
import sys
import tempfile
from pathlib import Path
from xml.etree import ElementTree

import numpy as np

from benchmarks.clock import Row, write_results
from benchmarks.coverage import KINDS, SIZES, covered, covered_by_bootstraps

PACKAGE, FLOW = "tests/test_package.py::", "tests/read/flow/"
TESTS = {
    "extras that do not resolve with the constraints": (
        [PACKAGE + "test_every_extra_resolves_with_the_constraints"],
        "gpu does not",
    ),
    "questions of both signs: levels that do not end or do not say so": (
        [FLOW + "test_circuit_reading.py::test_questions_of_both_signs_end_and_say_so"],
        "never ends",
    ),
    "consumers of a question that neither obey nor refuse each field": (
        [FLOW + "test_questions.py::test_each_field_changes_the_result_or_is_refused_by_name"],
        "at least 6 fields",
    ),
    "readings beside which another thread has wrong logits or an error": (
        ["tests/test_isolation.py::test_other_threads_run_the_model_as_it_is_during_a_reading"],
        "33 wrong logits and 186 errors of 4,318",
    ),
    "Gemma in bfloat16 and its tokenizer: tests that fail, on random weights": (
        ["tests/residual/test_gemma.py"],
        "refused; wrong",
    ),
    "commands whose --json has a number in a text": (
        ["tests/test_every_option.py::test_no_number_of_a_record_is_a_text"],
        "most numbers of a circuit",
    ),
    "own folder of pictures, from another working directory: tests that fail": (
        ["tests/test_own_data.py"],
        "fails at the second command",
    ),
}
"""Claims with the tests that hold them, and what was so at commit a31c8f6b."""


def failures(tests: list[str]) -> tuple[int, int]:
    """Return how many tests fail, and how many ran."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        command = [sys.executable, "-m", "pytest", "-q", f"--junitxml={report}", "-n", "0", *tests]
        subprocess.run(command, check=False, stdout=subprocess.DEVNULL)
        suite = next(ElementTree.parse(report).iter("testsuite"))
    tests_run, failed, errors, skipped = (
        int(suite.attrib[key]) for key in ("tests", "failures", "errors", "skipped")
    )
    if tests_run == skipped:
        raise SystemExit(f"no test ran of {tests}")
    return failed + errors, tests_run - skipped


def main() -> None:
    """Run, simulate, print, and write if asked to."""
    rows: list[Row] = []
    for claim, (tests, before) in TESTS.items():
        failed, ran = failures(tests)
        rows.append((f"{claim}, of {ran}", failed, f"before: {before}"))
        print(*rows[-1], sep="  ", flush=True)
    for kind in KINDS:
        for size in SIZES:
            share, _ = covered(kind, size, 20_000, np.random.default_rng(size))
            bootstrap = covered_by_bootstraps(kind, size, 2000, np.random.default_rng(size))
            claim = f"share of 95 % intervals that hold the truth, {kind}, {size} questions"
            rows.append((claim, share, f"bootstrap {bootstrap:.3f}"))
            print(*rows[-1], sep="  ", flush=True)
    if "--write" in sys.argv:
        note = "Failing tests of those that hold each kind; coverage by simulation."
        write_results("right", "Faults in what is read and said", "right --write", note, rows)


if __name__ == "__main__":
    main()
