"""The pairs of tokens that a head looks at most and least: in blocks, and from the whole square."""

import sys

import torch

from benchmarks.apart import compare, peak
from benchmarks.clock import seconds

VOCAB, D_MODEL, HEADS, K = 4096, 1024, 8, 100
WAYS = ("nothing", "blocks", "whole")


def measure(way: str) -> None:
    """Print the seconds of one way and the largest memory of the process, in MB."""
    from tokenizers import Tokenizer, models  # noqa: PLC0415
    from transformers import PreTrainedTokenizerFast  # noqa: PLC0415

    from bilens.nn.language import LanguageConfig, LanguageModel  # noqa: PLC0415
    from bilens.read.language import look_pairs, token_scores  # noqa: PLC0415

    torch.manual_seed(0)
    config = LanguageConfig(
        vocab_size=VOCAB, d_model=D_MODEL, n_heads=HEADS, attention="bilinear", qk_norm=True
    )
    model = LanguageModel(config).requires_grad_(False)
    words = models.WordLevel({f"t{i}": i for i in range(VOCAB)}, unk_token="t0")
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(words))

    def whole() -> torch.Tensor:
        first, second = (scores[0].dense() for scores in token_scores(model))
        pattern = (first * second).flatten()
        return torch.cat([pattern.topk(K).values, pattern.topk(K, largest=False).values])

    def blocks() -> torch.Tensor:
        found = look_pairs(model, tokenizer, 0, k=K)
        return torch.tensor([*found.highest.value, *found.lowest.value])

    calls = {"nothing": lambda: None, "blocks": blocks, "whole": whole}
    found = seconds(calls[way], 3)
    print(found, peak())
    if way == "blocks":
        assert torch.allclose(blocks(), whole(), rtol=1e-3)


def main() -> None:
    """Measure each way in a process of its own."""
    print(
        f"vocabulary {VOCAB}, d_model {D_MODEL}, {HEADS} heads of bilinear attention with QK-norm, "
        f"the top {K} of either end of {VOCAB**2:,} pairs of one head"
    )
    compare("looks", WAYS)


if __name__ == "__main__":
    measure(sys.argv[1]) if len(sys.argv) > 1 else main()
