"""Pairs of tokens with a head's highest and lowest scores: in blocks, and from the full square."""

import sys

import torch

from benchmarks.subprocess_memory import compare, measure, random_model
from bilens.lazy_imports import lazy_import

language = lazy_import("bilens.read.language")
VOCAB, D_MODEL, HEADS, K = 4096, 1024, 8, 100


def run(way: str) -> None:
    """Measure one way in this process."""
    model = random_model(
        vocab_size=VOCAB, d_model=D_MODEL, n_heads=HEADS, attention="bilinear", qk_norm=True
    )

    def full() -> torch.Tensor:
        first, second = (scores[0].dense() for scores in language.attention_scores(model, layer=0))
        pattern = (first * second).flatten()
        return torch.cat([pattern.topk(K).values, pattern.topk(K, largest=False).values])

    def blocks() -> torch.Tensor:
        [result] = language.attention_pairs(model, [0], layer=0, k=K)
        return torch.tensor([*result.highest.value, *result.lowest.value])

    measure(way, blocks, full)


def main() -> None:
    """Measure each way in a process of its own."""
    print(
        f"vocabulary {VOCAB}, d_model {D_MODEL}, {HEADS} heads of bilinear attention with QK-norm, "
        f"the top {K} of either end of {VOCAB**2:,} pairs of one head"
    )
    compare("head_pairs")


if __name__ == "__main__":
    run(sys.argv[1]) if len(sys.argv) > 1 else main()
