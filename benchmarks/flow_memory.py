"""Memory that flows of SmolLM2 between two texts leave behind while the cyclic collector is off.

`python -m benchmarks.flow_memory` takes three minutes, after `make test-models`.
"""

import argparse
import ctypes
import gc
from pathlib import Path

import torch
from tests.real.packages import SMOLLM2, gguf_file

import bilens
from benchmarks.clock import machine
from bilens.read.flow import flow
from bilens.read.language import TokenDirection
from bilens.residual import ResidualModel

TEXTS = ("The keys to the cabinet", "The key to the cabinet")


def resident() -> float:
    """Return the memory of the process in MB, without what the allocator only keeps."""
    ctypes.CDLL(None).malloc_trim(0)
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmRSS")) / 1024


def main() -> None:
    """Print the memory after every tenth flow."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--flows", type=int, default=60)
    count = parser.parse_args().flows
    print(machine())
    model = bilens.load(gguf_file(SMOLLM2), dtype=torch.float32)
    assert isinstance(model, ResidualModel)
    direction = TokenDirection("Ġare", ("Ġis",))
    # The first flow fills caches of torch.
    flow(model, TEXTS[0], direction, against=TEXTS[1])
    gc.collect()
    gc.disable()
    before = resident()
    for number in range(1, count + 1):
        flow(model, TEXTS[number % 2], direction, against=TEXTS[1 - number % 2])
        if number % 10 == 0 or number == count:
            print(f"{number} flows added {resident() - before:.0f} MB", flush=True)


if __name__ == "__main__":
    main()
