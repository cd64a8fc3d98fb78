"""Both commands of README in a clone with nothing else, timed, and the sizes of pages.

    python -m benchmarks.bare

The commit is cloned into a new folder and has a new environment and home, no browser, and no data
of the user; only pip's downloads are shared, so that the network is not in the time. `make demo`
installs first, `make test` adds what tests need. A report of MNIST is made afterwards, if it is in
`BILENS_DATA`, of a classifier that trained for an epoch.
"""

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from experiments.results import Recording, Row

ROOT = Path(__file__).parents[1]
AIMS = {"demo": 90, "test": 240}
"""Seconds of both commands."""
KILOBYTES = {"flow": 350, "MNIST": 600}
"""Sizes of the pages of a flow and of an MNIST classifier that are aimed at."""


def bare(folder: Path) -> dict[str, str]:
    """Return the variables of a shell that has nothing of the user but pip's downloads."""
    pip = [sys.executable, "-m", "pip", "cache", "dir"]
    cache = subprocess.run(pip, capture_output=True, text=True, check=True).stdout.strip()
    hidden = ("BILENS_DATA", "PYTHONPATH", "MAKEFLAGS", "MAKELEVEL", "VIRTUAL_ENV")
    variables = {name: value for name, value in os.environ.items() if name not in hidden}
    own = {"HOME": folder / "home", "VENV": folder / "venv", "PIP_CACHE_DIR": cache}
    return variables | {name: str(x) for name, x in own.items()} | {"BILENS_NO_BROWSER": "1"}


def beside(claim: str, value: float, unit: str, aim: float) -> Row:
    """Return the row of a number that is to be no larger than an aim."""
    return Row(claim, value, unit=unit, baselines={"aim": aim}, held=value <= aim)


def main() -> None:
    """Run the commands, print how long they took, and write it."""
    recording = Recording()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        clone, variables = folder / "bilens", bare(folder)
        Path(variables["HOME"]).mkdir()
        subprocess.run(["git", "clone", "--quiet", str(ROOT), str(clone)], check=True)

        def took(*command: str, **more: str) -> float:
            start = time.perf_counter()
            subprocess.run(command, cwd=clone, env=variables | more, check=True)
            return time.perf_counter() - start

        rows = []
        for target, aim in AIMS.items():
            rows.append(beside(f"make {target}", took("make", target), "s", aim))
        pages = {"flow": clone / "runs" / "demo" / "story" / "flow.html"}
        if data := os.environ.get("BILENS_DATA"):
            bilens = str(folder / "venv" / "bin" / "bilens")
            train = ("train", "images", "--data", "mnist", "--epochs", "1")
            took(bilens, *train, "--output", "runs/mnist", BILENS_DATA=data)
            took(bilens, "report", "runs/mnist", BILENS_DATA=data)
            pages["MNIST"] = clone / "runs" / "mnist" / "report.html"
        for page, path in pages.items():
            size = path.stat().st_size / 1000
            rows.append(beside(f"the page of {page}", size, "kB", KILOBYTES[page]))
    for row in rows:
        print(f"{row.claim:20}{row.value:8.0f} {row.unit}")
    title = "Both commands of README in a clone with nothing else, and sizes of pages"
    command = "python -m benchmarks.bare"
    settings = {"browser": False, "pip's downloads": "shared"}
    recording.write("bare", title=title, command=command, rows=rows, settings=settings)


if __name__ == "__main__":
    main()
