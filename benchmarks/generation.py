"""Time of a generated token by the length of its text: `python -m benchmarks.generation MODEL...`.

Each repeat takes 100 steps after either length in turn, so that both meet the same machine, and
compares the medians of their processor time. The aim is at most 1.1 times the time after 1,024.
"""

import statistics
import sys
import time

import torch
from torch import nn

from benchmarks.clock import machine
from bilens.models import load
from bilens.residual import ResidualModel

SHORT, LONG = 1024, 16384
STEPS, REPEATS = 100, 3


def main() -> None:
    """Print the ratio of each repeat, for each model."""
    torch.set_num_threads(1)
    print(machine())
    for source in sys.argv[1:]:
        opened = load(source)
        assert isinstance(opened, ResidualModel)
        ratios = ratios_of(opened.model)
        print(f"{source}: {LONG} over {SHORT}: {', '.join(f'{ratio:.3f}' for ratio in ratios)}")


@torch.no_grad()
def ratios_of(model: nn.Module) -> list[float]:
    """Return the ratio of the medians of each repeat."""
    ids = torch.zeros(1, LONG, dtype=torch.long)
    caches = {
        length: model(ids[:, :length], use_cache=True, logits_to_keep=1).past_key_values
        for length in (SHORT, LONG)
    }
    ratios = []
    for _ in range(REPEATS):
        seconds: dict[int, list[float]] = {SHORT: [], LONG: []}
        for step in range(STEPS):
            for length in (SHORT, LONG) if step % 2 else (LONG, SHORT):
                start = time.process_time()
                made = model(ids[:, :1], past_key_values=caches[length], use_cache=True)
                seconds[length].append(time.process_time() - start)
                caches[length] = made.past_key_values
        ratios.append(statistics.median(seconds[LONG]) / statistics.median(seconds[SHORT]))
    return ratios


if __name__ == "__main__":
    main()
