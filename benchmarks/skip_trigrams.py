"""Skip-trigrams of one head over all pairs of tokens: in blocks, and as one whole matrix."""

import sys

import torch

from benchmarks.subprocess_memory import compare, measure, random_model
from bilens.lazy_imports import lazy_import

language = lazy_import("bilens.read.language")
VOCAB, D_MODEL, D_HIDDEN, K = 4096, 1024, 3072, 100


def run(way: str) -> None:
    """Measure one way in this process."""
    model = random_model(vocab_size=VOCAB, d_model=D_MODEL, d_hidden=D_HIDDEN)
    direction = model.direction(7)

    def full() -> torch.Tensor:
        past = model.W_E @ model.ov(0)[0].dense()
        Q = model.mlp(0).interaction(direction).dense()
        scores: torch.Tensor = 2 * past @ Q @ model.W_E.T
        return scores.flatten().topk(K).values

    def blocks() -> torch.Tensor:
        frame = language.skip_trigrams(model, direction, 0, layer=0, k=K)
        return torch.tensor(frame.value.tolist())

    measure(way, blocks, full)


def main() -> None:
    """Measure each way in a process of its own."""
    print(
        f"vocabulary {VOCAB}, d_model {D_MODEL}, hidden {D_HIDDEN}, top {K} of {VOCAB**2:,} pairs"
    )
    compare("skip_trigrams")


if __name__ == "__main__":
    run(sys.argv[1]) if len(sys.argv) > 1 else main()
