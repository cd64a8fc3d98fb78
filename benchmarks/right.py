"""Faults in what is read, asked and said: failing tests of each kind.

`python -m benchmarks.right` runs the tests that hold each kind of fault and prints how many fail;
`--write` also writes the numbers to results/right.json. Some minutes on one core.
"""

import subprocess
import sys
import tempfile
from pathlib import Path
from xml.etree import ElementTree

from experiments.results import Recording, Row

FLOW, ISOLATION = "tests/read/flow/", "tests/test_isolation.py::"
TESTS = {
    "extras that do not resolve with the constraints": (
        "tests/test_package.py::test_every_extra_resolves_with_the_constraints"
    ),
    "questions of both signs: levels that do not end or do not say so": (
        FLOW + "test_circuit_reading.py::test_questions_of_both_signs_end_and_say_so"
    ),
    "consumers of a question that neither obey nor refuse each field": (
        FLOW + "test_questions.py::test_each_field_changes_the_result_or_is_refused_by_name"
    ),
    "readings beside which another thread has wrong logits or an error": (
        ISOLATION + "test_other_threads_run_the_model_as_it_is_during_a_reading"
    ),
    "Gemma in bfloat16 and its tokenizer: tests that fail, on random weights": (
        "tests/residual/test_gemma.py"
    ),
    "commands whose --json has a number in a text": (
        "tests/test_every_option.py::test_no_number_of_a_record_is_a_text"
    ),
    "own folder of pictures, from another working directory: tests that fail": (
        "tests/test_own_data.py"
    ),
}
"""Claims, and the tests that hold them."""


def failures(tests: str) -> tuple[int, int]:
    """Return how many tests fail, and how many ran."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        command = [sys.executable, "-m", "pytest", "-q", f"--junitxml={report}", "-n", "0", tests]
        subprocess.run(command, check=False, stdout=subprocess.DEVNULL)
        suite = next(ElementTree.parse(report).iter("testsuite"))
    tests_run, failed, errors, skipped = (
        int(suite.attrib[key]) for key in ("tests", "failures", "errors", "skipped")
    )
    if tests_run == skipped:
        raise SystemExit(f"no test ran of {tests}")
    return failed + errors, tests_run - skipped


def main() -> None:
    """Run, print, and write if asked to."""
    recording = Recording() if "--write" in sys.argv else None
    rows = []
    for claim, tests in TESTS.items():
        failed, ran = failures(tests)
        rows.append(Row(claim, failed, n=ran))
        print(rows[-1], flush=True)
    if recording is not None:
        recording.write(
            "right",
            title="Faults in what is read and said",
            command="python -m benchmarks.right --write",
            rows=rows,
            settings={"numbers": "failing tests of those that hold each kind"},
        )


if __name__ == "__main__":
    main()
