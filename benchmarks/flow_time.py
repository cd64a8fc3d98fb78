"""Time of a flow of SmolLM2 between two texts over a forward and a backward pass of one of them.

`python -m benchmarks.flow_time` takes a minute of the processor, after `make test-models`. The
backward pass is that of a logit to the embeddings. Both take turns; times are the processor's.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from functools import partial

import torch
from tests.real.packages import SMOLLM2, gguf_file
from torch import Tensor

import bilens
from benchmarks.clock import machine
from bilens.read.flow import flow
from bilens.residual import ResidualModel

TOKEN = 5


def both_ways(model: ResidualModel, ids: Tensor) -> None:
    """Run a model on a text, and its logit back to the embeddings."""
    with torch.enable_grad():
        x = model.parts.embed.rows(ids)[None].requires_grad_()
        logit = model.model(inputs_embeds=x, use_cache=False).logits[0, -1, TOKEN]
        torch.autograd.grad(logit, x)


def spent(call: Callable[[], object]) -> float:
    """Return the processor's seconds of a call."""
    start = time.process_time()
    call()
    return time.process_time() - start


def main() -> None:
    """Print the ratio for each length, the median over turns and its range."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--tokens", type=int, nargs="+", default=[8, 32, 128])
    parser.add_argument("--turns", type=int, default=5)
    given = parser.parse_args()
    torch.set_num_threads(1)
    print(machine())
    model = bilens.load(gguf_file(SMOLLM2), dtype=torch.float32)
    assert isinstance(model, ResidualModel)
    direction, generator = model.direction(TOKEN), torch.Generator().manual_seed(0)
    for length in given.tokens:
        ids = torch.randint(1000, 20_000, (length,), generator=generator)
        other = ids.clone()
        other[length // 4] = 500
        calls = (
            partial(flow, model, ids, direction, against=other, ablate=0),
            partial(both_ways, model, ids),
        )
        turns = [[spent(call) for call in calls] for _ in range(given.turns + 1)][1:]
        ratios = [first / second for first, second in turns]
        of_flow, of_passes = (statistics.median(column) for column in zip(*turns, strict=True))
        print(
            f"{length:4} tokens {of_flow:6.2f} s over {of_passes:5.2f} s: "
            f"{statistics.median(ratios):5.2f} ({min(ratios):.2f} to {max(ratios):.2f})",
            flush=True,
        )


if __name__ == "__main__":
    main()
