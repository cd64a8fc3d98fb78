"""A training step of a language model: each attention's tokens a second and share of the rate.

`python -m benchmarks.step` is for the CPU: a small model, texts of 1,024 tokens, float32. On a GPU
`python -m benchmarks.step --preset 500m --compile --precision bf16 --length 1024 8192`. The rate is
that of one large product. The share counts the products of weights only, 6 for each weight and
token, so that attention's own work lowers it. `--write` writes `results/step.json`.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import torch
from experiments.results import Recording, Row

from benchmarks.clock import machine, seconds, wait
from bilens.nn import ATTENTIONS
from bilens.nn.language import LanguageConfig, LanguageModel
from bilens.train import PRESETS

ROUNDS = 7
SIZES: dict[str, dict[str, Any]] = {
    "small": {
        "vocab_size": 4096,
        "d_model": 256,
        "n_layers": 4,
        "n_heads": 4,
        "d_hidden": 768,
        "norm": "rms",
        "qk_norm": True,
    },
    "500m": asdict(PRESETS["500m"].model),
}
DTYPES = {"float32": torch.float32, "bf16": torch.bfloat16}
SIDE = {"cpu": 1024, "cuda": 8192}
"""Side of the square matrices whose product defines the rate."""


class Step:
    """Forward, backward and AdamW on one batch of random tokens."""

    def __init__(self, sizes: dict[str, Any], texts: int, dtype: torch.dtype, *, compiled: bool):
        torch.manual_seed(0)
        self.device = "cuda" if torch.cuda.is_available() else "cpu"
        with torch.device(self.device):
            self.model = LanguageModel(LanguageConfig(**sizes))
        self.run: Any = torch.compile(self.model, fullgraph=True) if compiled else self.model
        self.dtype = dtype
        self.optimizer = torch.optim.AdamW(self.model.parameters(), fused=True)
        shape = (texts, sizes["n_ctx"])
        self.ids = torch.randint(sizes["vocab_size"], shape, device=self.device)

    def __call__(self) -> float:
        """Take a step and return its seconds."""
        start = time.perf_counter()
        self.optimizer.zero_grad()
        with torch.autocast(self.device, self.dtype, enabled=self.dtype != torch.float32):
            loss = self.run(self.ids, labels=self.ids).loss
        loss.backward()
        self.optimizer.step()
        wait()
        return time.perf_counter() - start

    def operations(self) -> float:
        """Multiplications and additions of the products of weights, forward and backward."""
        weights = self.model.num_parameters(exclude_embeddings=True)
        return 6.0 * weights * self.ids.numel()


def product_rate(dtype: torch.dtype) -> float:
    """Return the multiplications and additions a second of one large product."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    side = SIDE[device]
    square = torch.randn(side, side, device=device, dtype=dtype)
    return 2 * side**3 / seconds(lambda: square @ square)


def show(steps: dict[str, Step], rate: float) -> list[Row]:
    """Print a line for each attention, and return its time as a multiple of softmax's."""
    for step in steps.values():
        step()
    # In turns, so that all meet the same machine; each ratio is of one turn.
    turns = [{name: step() for name, step in steps.items()} for _ in range(ROUNDS)]
    rows = []
    for name, step in steps.items():
        taken = statistics.median(turn[name] for turn in turns)
        ratios = [turn[name] / turn["softmax"] for turn in turns]
        texts, length = step.ids.shape
        rows.append(Row.of_range(f"{length} tokens, {name}: time over that of softmax", ratios))
        size = sum(weight.numel() for weight in step.model.parameters())
        print(
            f"{name:13} {length:6} {texts:5} {size / 1e6:10.2f}M {texts * length / taken:10.0f}"
            f" {step.operations() / taken / rate:7.1%} {statistics.median(ratios):9.2f}",
            flush=True,
        )
    return rows


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the table of a size."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--preset", choices=SIZES, default="small")
    parser.add_argument("--attention", nargs="+", choices=ATTENTIONS, default=list(ATTENTIONS))
    parser.add_argument("--length", nargs="+", type=int, default=[1024])
    parser.add_argument("--tokens", type=int, default=2048, help="of a step")
    parser.add_argument("--precision", choices=DTYPES, default="float32")
    parser.add_argument("--compile", action="store_true", help="by torch.compile, as one graph")
    parser.add_argument("--write", action="store_true", help="to results/step.json")
    given = parser.parse_args(arguments)
    recording, rows = Recording() if given.write else None, []
    print(machine())
    dtype = DTYPES[given.precision]
    rate = product_rate(dtype)
    print(f"{given.preset}, {given.precision}; one product: {rate / 1e12:.3g} TFLOP/s")
    print("attention     length texts  parameters   tokens/s   share  x softmax")
    for length in given.length:
        rows += show(
            {
                name: Step(
                    {**SIZES[given.preset], "attention": name, "n_ctx": length},
                    max(1, given.tokens // length),
                    dtype,
                    compiled=given.compile,
                )
                for name in dict.fromkeys(["softmax", *given.attention])
            },
            rate,
        )
    if recording is not None:
        recording.write(
            "step",
            title="A training step of a language model",
            command=" ".join(["python -m benchmarks.step", *(arguments or sys.argv[1:])]),
            rows=rows,
            settings={
                **{"preset": given.preset, "precision": given.precision, "tokens": given.length},
                **{"turns": ROUNDS, "low and high": "least and most of the turns"},
            },
        )


if __name__ == "__main__":
    main()
