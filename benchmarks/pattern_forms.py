"""Loss of patterns of one score against two, taught to a pretrained model's patterns.

python -m benchmarks.pattern_forms MODEL CORPUS [--texts 64] [--length 256] [--steps 60] [--seeds 3]

Each form starts at the same pattern, with queries and keys of the model and c = 1, and learns as in
`bilens tensorise`. The loss is the mean of `pattern_loss` over layers, on texts that were not
learned. A product of two scores can be negative, so its row sums are kept from zero.
"""

import argparse
import statistics
import tempfile
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.clock import machine
from bilens.convert import open_model, open_tokenizer
from bilens.convert.language_model import as_language_model
from bilens.data import load_documents
from bilens.nn.language.attention import Attention, Rope
from bilens.train.layers import LayerStreams, TrainingRows, teach
from bilens.train.settings import Distillation
from bilens.train.tensorise import pattern_loss

FORMS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "one score, squared": lambda a, b: a * a,
    "product of two scores": lambda a, b: a * b,
    "sum of two squares": lambda a, b: a * a + b * b,
}
MARGIN = 0.05
"""Least size of a row's sum; sums of positive weights start between 1 and the number of tokens."""


class TwoScores(nn.Module):
    """Pattern of a form of two scores, the second of which starts near the first."""

    def __init__(self, original: Attention, form: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.form = form
        self.scores = nn.ModuleList([deepcopy(original), deepcopy(original)])
        self.constants = nn.Parameter(torch.ones(2, original.n_heads))
        for name, weight in self.scores[1].named_parameters():
            if name.startswith(("query", "key")):
                weight.data += 0.1 * weight.std() * torch.randn_like(weight)

    def attention_pattern(self, x: Tensor, _: None, rope: Rope | None) -> Tensor:
        """Return the pattern, (batch, heads, time, time)."""
        scores = []
        for part, constant in zip(self.scores, self.constants, strict=True):
            [(q, k)] = part.queries_keys(x, None, rope)  # type: ignore[operator]
            scores.append(q @ k.mT / (2 * q.shape[-1] ** 0.5) + constant[:, None, None])
        weights = self.form(*scores).tril()
        sums = weights.sum(-1, keepdim=True)
        return weights / torch.where(sums < 0, sums.clamp_max(-MARGIN), sums.clamp_min(MARGIN))


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    for name in ("model", "corpus"):
        parser.add_argument(name)
    for name, default in (("texts", 64), ("length", 256), ("steps", 60), ("seeds", 3)):
        parser.add_argument(f"--{name}", type=int, default=default)
    given = parser.parse_args()
    print(machine())
    opened = open_model(given.model)
    tokenizer: Any = open_tokenizer(given.model, opened)
    corpus = load_documents(given.corpus, tokenizer, n_ctx=given.length)
    model = as_language_model(opened).requires_grad_(False)
    texts = corpus.train[: given.texts]["input_ids"]
    held_out = corpus.validation[:16]["input_ids"]
    rope = model.embed_text(texts[:1], torch.arange(given.length)[None])[2]
    losses: dict[tuple[str, int], list[float]] = {}
    with tempfile.TemporaryDirectory() as place:
        folders = [Path(place) / name for name in ("learned", "held_out")]
        for folder in folders:
            folder.mkdir()
        streams, tests = (
            LayerStreams(model, list(model.blocks), ids, folder)
            for ids, folder in zip((texts, held_out), folders, strict=True)
        )
        for layer, block in enumerate(model.blocks):

            def loss(form: TwoScores, x: Tensor, block: nn.Module = block) -> Tensor:
                return pattern_loss(form, block.attn, block.attn_norm(x), rope)  # type: ignore

            for name, form in FORMS.items():
                for seed in range(given.seeds):
                    torch.manual_seed(seed)
                    pattern = TwoScores(block.attn, form)  # type: ignore[arg-type]
                    how = Distillation(steps=given.steps, batch_size=4, seed=seed)
                    folder = Path(place) / f"{layer}-{len(losses)}-{name}-{seed}"
                    teach(pattern, loss, TrainingRows(streams.stream), how, folder, name)
                    with torch.no_grad():
                        value = float(loss(pattern, tests.stream))
                    losses.setdefault((name, seed), []).append(value)
            streams.advance()
            tests.advance()
    for name in FORMS:
        means = [statistics.mean(losses[name, seed]) for seed in range(given.seeds)]
        spread = f"{min(means):.4f} to {max(means):.4f}"
        print(f"{name}: {statistics.mean(means):.4f} ({spread})", flush=True)


if __name__ == "__main__":
    main()
