"""Memory of flows of SmolLM2 between two texts: the largest of a process, and what flows leave.

`python -m benchmarks.flow_memory --write` takes half an hour, after `make test-models`, and writes
`results/flow_memory.json`. Each length has a process of its own, whose memory includes imports and
weights. So has what tuning changed, all of whose weights differ. The last number is what flows of
five tokens leave behind while the cyclic collector is off.
"""

import argparse
import ctypes
import gc
import resource
import subprocess
import sys
import time
from pathlib import Path

import torch
from experiments.results import Recording, Row
from tests.real.packages import SMOLLM2, gguf_file

import bilens
from bilens.flows import diff, flow
from bilens.language import TokenDirection
from bilens.transformer import ResidualModel

TEXTS = ("The keys to the cabinet", "The key to the cabinet")


def resident() -> float:
    """Return the memory of the process in MB, without what the allocator only keeps."""
    ctypes.CDLL(None).malloc_trim(0)
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmRSS")) / 1024


def opened() -> ResidualModel:
    """Return SmolLM2."""
    model = bilens.load(gguf_file(SMOLLM2), dtype=torch.float32)
    assert isinstance(model, ResidualModel)
    return model


def largest(tokens: int, *, tuned: bool) -> None:
    """Print memory in GB and seconds of this process after a flow of random tokens.

    It is between two texts, or between two models on one of them. One of the tokens changes.

    A change at a quarter of the text reaches all positions after it.
    """
    torch.set_num_threads(1)
    model = opened()
    ids = torch.randint(1000, 20_000, (tokens,), generator=torch.Generator().manual_seed(0))
    other = ids.clone()
    other[tokens // 4] = 500
    after = opened() if tuned else model
    start = time.process_time()
    if tuned:
        with torch.no_grad():
            for weight in after.model.parameters():
                weight.mul_(1.01)
        diff(model, after, ids, "[5]", "[7]")
    else:
        flow(model, ids, model.direction(5), against=other, labels=0)
    seconds = time.process_time() - start
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024**2
    print(peak, seconds)


def left_behind(count: int) -> float:
    """Return the memory in MB that some flows add."""
    model, direction = opened(), TokenDirection("Ġare", ("Ġis",))
    # The first flow fills caches of torch.
    flow(model, TEXTS[0], direction, against=TEXTS[1])
    gc.collect()
    gc.disable()
    before = resident()
    for number in range(1, count + 1):
        flow(model, TEXTS[number % 2], direction, against=TEXTS[1 - number % 2])
    return resident() - before


def main() -> None:
    """Measure each length in a process of its own, then what flows leave behind."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--tokens", type=int, nargs="*", default=[512, 1024, 2048, 5000])
    parser.add_argument("--tuned", type=int, nargs="*", default=[512, 1024])
    parser.add_argument("--flows", type=int, default=20)
    parser.add_argument("--alone", type=int, help="number of tokens to measure in this process")
    parser.add_argument("--models", action="store_true", help="between two models")
    parser.add_argument("--write", action="store_true")
    given = parser.parse_args()
    if given.alone:
        largest(given.alone, tuned=given.models)
        return
    torch.set_num_threads(1)
    recording, rows = Recording() if given.write else None, []
    flows: list[tuple[str, int, list[str]]] = [("flow of", tokens, []) for tokens in given.tokens]
    flows += [("what tuning changed in", tokens, ["--models"]) for tokens in given.tuned]
    for name, tokens, flags in flows:
        command = [sys.executable, "-m", "benchmarks.flow_memory", "--alone", str(tokens), *flags]
        peak, taken = map(float, subprocess.check_output(command, text=True).split())
        rows.append(Row(f"{name} {tokens:,} tokens: largest memory", peak, unit="GB"))
        rows.append(Row(f"{name} {tokens:,} tokens: time of the processor", taken, unit="s"))
        print(*rows[-2:], sep="\n", flush=True)
    if given.flows:
        claim = f"{given.flows} flows with the collector off add"
        rows.append(Row(claim, left_behind(given.flows), unit="MB"))
        print(rows[-1], flush=True)
    if recording is not None:
        recording.write(
            "flow_memory",
            title="Memory of flows between two texts",
            command="python -m benchmarks.flow_memory --write",
            rows=rows,
            settings={
                "model": "SmolLM2-135M in float32, weights and imports included",
                "tokens": given.tokens,
                "tokens of two models": given.tuned,
                "flows": given.flows,
            },
        )


if __name__ == "__main__":
    main()
