"""Time of imports: rooms over torch, and help and errors of commands over tyro and rich.

Each runs in a fresh interpreter. Times are of the processor, user and system, in the median of
five runs by turns.
"""

import os
import statistics
import subprocess
import sys

from benchmarks.clock import machine

ROOMS = {
    "import bilens": "import bilens",
    "its tensor mathematics": "from bilens import BilinearTensor",
    "and its image models": "from bilens.nn import ImageClassifier",
    "and opening a model": "from bilens import load",
}
COMMANDS = ("flow", "report --help", "train images --help")


def main() -> None:
    """Print the median time of each, and the ratio to that of the libraries below it."""
    print(machine())
    calls = {name: ["-c", code] for name, code in ROOMS.items()}
    _print({"import torch": ["-c", "import torch"]} | calls)
    commands = {f"bilens {words}": ["-m", "bilens", *words.split()] for words in COMMANDS}
    _print({"import tyro, rich": ["-c", "import tyro, rich"]} | commands)


def _print(calls: dict[str, list[str]]) -> None:
    """Print the times of calls, and their ratios to the first."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(5):
        for name, words in calls.items():
            times[name].append(_processor_seconds([sys.executable, *words]))
    first = statistics.median(next(iter(times.values())))
    for name, runs in times.items():
        middle = statistics.median(runs)
        print(f"{name}: {middle:.2f} s ({min(runs):.2f} to {max(runs):.2f}), {middle / first:.2f}")


def _processor_seconds(command: list[str]) -> float:
    before = os.times()
    subprocess.run(command, capture_output=True, check=False)
    after = os.times()
    return sum(after[2:4]) - sum(before[2:4])


if __name__ == "__main__":
    main()
