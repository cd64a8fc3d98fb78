"""Ways to one result, each in a process of its own, so that their peaks of memory are their own."""

import resource
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import torch

from benchmarks.clock import machine, seconds

__all__ = ["compare", "measure", "numbered_tokenizer"]

WAYS = ("nothing", "blocks", "whole")
"""Nothing but the model, then both ways to the result."""


def numbered_tokenizer(size: int) -> Any:
    """A tokenizer whose tokens are t0, t1, ..."""
    # The process that starts the others stays small: its peak would count in theirs.
    from tokenizers import Tokenizer, models  # noqa: PLC0415
    from transformers import PreTrainedTokenizerFast  # noqa: PLC0415

    words = models.WordLevel({f"t{i}": i for i in range(size)}, unk_token="t0")
    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer(words))


def measure(
    way: str, blocks: Callable[[], torch.Tensor], whole: Callable[[], torch.Tensor]
) -> None:
    """Print the seconds of one way and the largest memory of this process, in MB."""
    calls = {"nothing": lambda: None, "blocks": blocks, "whole": whole}
    found = seconds(calls[way], 3)
    print(found, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024)
    if way == "blocks":
        assert torch.allclose(blocks(), whole(), rtol=1e-3)


def compare(name: str) -> None:
    """Run `python -m benchmarks.NAME WAY` for all ways, and show what they print."""
    print(machine())
    found = {}
    for way in WAYS:
        command = [sys.executable, "-m", f"benchmarks.{name}", way]
        shown = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        found[way] = [float(number) for number in shown.split()]
    nothing, blocks, whole = WAYS
    base = found[nothing][1]
    for way in (blocks, whole):
        time, most = found[way]
        print(f"{way:8} {time:6.2f} s, {most:6.0f} MB at most, {most - base:5.0f} above the model")
    print(f"ratio    {found[whole][0] / found[blocks][0]:6.2f} x")
