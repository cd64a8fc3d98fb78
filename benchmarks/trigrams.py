"""Skip-trigrams of one head over all pairs of tokens: in blocks, and as one whole matrix."""

import sys

import torch

from benchmarks.apart import compare, measure, numbered_tokenizer

VOCAB, D_MODEL, D_HIDDEN, K = 4096, 1024, 3072, 100


def run(way: str) -> None:
    """Measure one way in this process."""
    from bilens.nn.language import LanguageConfig, LanguageModel  # noqa: PLC0415
    from bilens.read.language import (  # noqa: PLC0415
        head_map,
        interaction,
        output_direction,
        skip_trigrams,
    )

    torch.manual_seed(0)
    config = LanguageConfig(vocab_size=VOCAB, d_model=D_MODEL, d_hidden=D_HIDDEN)
    model = LanguageModel(config).requires_grad_(False)
    tokenizer = numbered_tokenizer(VOCAB)
    direction = output_direction(model, 7)

    def whole() -> torch.Tensor:
        past = model.W_E @ head_map(model, 0)
        Q = interaction(model, direction).dense()
        scores: torch.Tensor = 2 * past @ Q @ model.W_E.T
        return scores.flatten().topk(K).values

    def blocks() -> torch.Tensor:
        frame = skip_trigrams(model, tokenizer, direction, 0, k=K)
        return torch.tensor(frame.value.tolist())

    measure(way, blocks, whole)


def main() -> None:
    """Measure each way in a process of its own."""
    print(
        f"vocabulary {VOCAB}, d_model {D_MODEL}, hidden {D_HIDDEN}, top {K} of {VOCAB**2:,} pairs"
    )
    compare("trigrams")


if __name__ == "__main__":
    run(sys.argv[1]) if len(sys.argv) > 1 else main()
