"""What people meet first: the length of README, the demo's time, and pages that are typed into.

    python -m benchmarks.people

Numbers of tests are those that fail. Browsers are needed, as for `make browser`. Writes
`results/people.json`.
"""

import re
import resource
import subprocess
import sys
from tempfile import TemporaryDirectory

from experiments.results import ROOT, Recording, Row, numbers_of

from benchmarks.right import Tests, failures, names_of, run

TESTS: dict[str, Tests] = {
    "typing into the explorer: tests in which a text is lost": (("explore/test_typing",),),
    "readings in a notebook's HTML: tests that miss a picture or a table": (("test_notebook",),),
    "pages: tests that find text cut, covered or hard to read": (
        ("report/test_flow", "no_text_is_covered_cut_off_or_hard_to_read"),
    ),
}


def paragraphs() -> list[str]:
    """Return the paragraphs of README, without code, tables and links' targets."""
    text = re.sub(r"^```.*?^```$", "", (ROOT / "README.md").read_text("utf-8"), flags=re.M | re.S)
    text = re.sub(r"`[^`]*`|\]\([^)]*\)", "", text)
    return [x for x in text.split("\n\n") if not x.lstrip().startswith(("|", "#", "!"))]


def demo() -> float:
    """Return the processor's seconds of the demo, with its imports."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    with TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "bilens", "demo", "--output", folder]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def main() -> None:
    """Measure, and write the results."""
    recording = Recording()
    found = [len(numbers_of(paragraph)) for paragraph in paragraphs()]
    rows = [
        Row("words of README", len((ROOT / "README.md").read_text("utf-8").split())),
        Row("paragraphs of README with more numbers than three", sum(n > 3 for n in found)),
        Row("the demo, of the processor", demo(), unit="s"),
    ]
    counts = run(name for tests in TESTS.values() for name in names_of(tests))
    for claim, tests in TESTS.items():
        failed, ran = failures(tests, counts)
        rows.append(Row(claim, failed, n=ran))
    print(*rows, sep="\n")
    recording.write(
        "people",
        title="What people meet first",
        command="python -m benchmarks.people",
        rows=rows,
        settings={},
    )


if __name__ == "__main__":
    main()
