"""A training step of a small model at T = 1024: attention without softmax against softmax."""

import statistics
import time
from typing import Any

import torch

from benchmarks.clock import machine, wait
from bilens.nn.language import LanguageConfig, LanguageModel
from bilens.nn.language_settings import ATTENTIONS

LENGTH, TEXTS, VOCAB, ROUNDS = 1024, 2, 4096, 7
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "d_model": 256,
    "n_layers": 4,
    "n_heads": 4,
    "d_hidden": 768,
    "n_ctx": LENGTH,
    "norm": "rms",
    "qk_norm": True,
}


class Step:
    """Forward, backward and AdamW on one batch of random tokens."""

    def __init__(self, attention: str) -> None:
        torch.manual_seed(0)
        device = "cuda" if torch.cuda.is_available() else "cpu"
        with torch.device(device):
            self.model = LanguageModel(LanguageConfig(**{**SIZES, "attention": attention}))
        self.optimizer = torch.optim.AdamW(self.model.parameters())
        self.ids = torch.randint(VOCAB, (TEXTS, LENGTH), device=device)

    def __call__(self) -> float:
        """Take a step and return its seconds."""
        start = time.perf_counter()
        self.optimizer.zero_grad()
        self.model(self.ids, labels=self.ids).loss.backward()
        self.optimizer.step()
        wait()
        return time.perf_counter() - start


def main() -> None:
    """Print the time per token of each attention, and as a multiple of softmax's."""
    print(machine())
    print(f"{TEXTS} texts of {LENGTH} tokens, {SIZES}")
    steps = {name: Step(name) for name in ATTENTIONS}
    for step in steps.values():
        step()
    # In turns, so that all meet the same machine; each ratio is of one turn.
    turns = [{name: step() for name, step in steps.items()} for _ in range(ROUNDS)]
    for name, step in steps.items():
        seconds = statistics.median(turn[name] for turn in turns)
        ratio = statistics.median(turn[name] / turn["softmax"] for turn in turns)
        size = sum(weight.numel() for weight in step.model.parameters())
        print(
            f"{name:13} {size / 1e6:5.2f}M parameters   {1e6 * seconds / TEXTS / LENGTH:7.1f} us a "
            f"token   {ratio:5.2f} x softmax"
        )


if __name__ == "__main__":
    main()
