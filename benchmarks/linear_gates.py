"""Loss of a gated model whose gates are made linear, in closed form and after local distillation.

python -m benchmarks.linear_gates MODEL CALIBRATION.txt.gz HELD_OUT.txt.gz [--tokens 8192]
    [--steps 0 100] [--layers 0 1 2] [--budget 0.1] [--alone]

Texts of 256 tokens; the first 1,024 tokens of HELD_OUT are measured.
"""

import argparse
import gzip
import time

import torch

from benchmarks.clock import machine
from bilens.convert import open_model, open_tokenizer
from bilens.train.linearise import linearise
from bilens.train.settings import Distillation

LENGTH, MEASURED = 256, 1024


def read(path: str, tokenizer: object, tokens: int) -> torch.Tensor:
    """Return the first tokens of a file, in texts of equal length."""
    with gzip.open(path, "rt") as file:
        ids = tokenizer(file.read(12 * tokens))["input_ids"][:tokens]  # type: ignore[operator]
    return torch.tensor(ids).view(-1, LENGTH)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    for name in ("model", "calibration", "held_out"):
        parser.add_argument(name)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--steps", type=int, nargs="+", default=[0])
    parser.add_argument("--layers", type=int, nargs="+")
    parser.add_argument("--budget", type=float)
    parser.add_argument("--alone", action="store_true")
    given = parser.parse_args()
    print(machine())
    tokenizer = open_tokenizer(given.model, open_model(given.model))
    texts = read(given.calibration, tokenizer, given.tokens)
    held_out = read(given.held_out, tokenizer, MEASURED)
    for steps in given.steps:
        start = time.perf_counter()
        result = linearise(
            open_model(given.model),
            texts,
            held_out,
            given.layers,
            budget=given.budget,
            distillation=Distillation(steps=steps),
            alone=given.alone,
        )
        for layer, loss in result.alone.items():
            print(f"layer {layer} alone: {loss:.4f}")
        distance = sum(fit.distance for fit in result.fits.values()) / max(len(result.fits), 1)
        print(
            f"{given.tokens} tokens, {steps} steps, layers {list(result.layers)}: "
            f"{result.before:.4f} before, {result.after:.4f} after, mean distance {distance:.3f}, "
            f"{time.perf_counter() - start:.0f} s",
            flush=True,
        )


if __name__ == "__main__":
    main()
