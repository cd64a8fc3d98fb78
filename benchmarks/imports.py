"""Time of imports: rooms over torch, and help and errors of commands over tyro and rich.

Each runs in a fresh interpreter. Times are of the processor, user and system, in the median of
five runs by turns. They are written to `results/help.json`.
"""

import os
import statistics
import subprocess
import sys

from experiments.results import Recording, Row

ROOMS = {
    "import bilens": "import bilens",
    "its tensor mathematics": "from bilens import BilinearTensor",
    "and its image models": "from bilens.nn import ImageClassifier",
    "and opening a model": "from bilens import load",
}
TURNS = 5
COMMANDS = ("flow", "report --help", "train images --help")


def main() -> None:
    """Print the ratio of each time to that of the libraries below it, and write them."""
    recording = Recording()
    calls = {name: ["-c", code] for name, code in ROOMS.items()}
    commands = {f"bilens {words}": ["-m", "bilens", *words.split()] for words in COMMANDS}
    recording.write(
        "help",
        title="Imports, help and errors of usage",
        command="python -m benchmarks.imports",
        rows=[
            *_rows("import torch", ["-c", "import torch"], calls),
            *_rows("import tyro, rich", ["-c", "import tyro, rich"], commands),
        ],
        settings={"turns": TURNS, "low and high": "least and most of the turns"},
    )


def _rows(below: str, first: list[str], calls: dict[str, list[str]]) -> list[Row]:
    """Return the times of calls as multiples of that of the first, all by turns."""
    times: dict[str, list[float]] = {name: [] for name in (below, *calls)}
    for _ in range(TURNS):
        for name, words in {below: first, **calls}.items():
            times[name].append(_processor_seconds([sys.executable, *words]))
    least = times.pop(below)
    rows = [
        Row.of_range(
            f"{name}: time over that of {below}",
            [above / below for above, below in zip(runs, least, strict=True)],
            baselines={f"{below}, seconds": statistics.median(least)},
        )
        for name, runs in times.items()
    ]
    print(*rows, sep="\n", flush=True)
    return rows


def _processor_seconds(command: list[str]) -> float:
    before = os.times()
    subprocess.run(command, capture_output=True, check=False)
    after = os.times()
    return sum(after[2:4]) - sum(before[2:4])


if __name__ == "__main__":
    main()
