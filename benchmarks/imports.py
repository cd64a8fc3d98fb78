"""Time of imports: bilens over torch, and `bilens --help`; each in a fresh interpreter."""

import subprocess
import sys

from benchmarks.clock import machine, seconds

IMPORTS = {
    "import bilens": "import bilens",
    "its tensor mathematics": "from bilens import BilinearTensor",
    "and its image models": "import bilens.nn",
    "and opening a model": "from bilens import load",
    "bilens --help": "from bilens.cli import main; main(['--help'])",
}


def main() -> None:
    """Print the time of each, and its ratio to that of importing torch only."""
    print(machine())
    alone = _fresh("import torch")
    for name, code in IMPORTS.items():
        took = _fresh(code)
        print(f"{name}: {took:.2f} s, {took / alone:.2f} of torch alone")


def _fresh(code: str) -> float:
    call = [sys.executable, "-c", code]
    return seconds(lambda: subprocess.run(call, check=True, stdout=subprocess.DEVNULL), repeats=7)


if __name__ == "__main__":
    main()
