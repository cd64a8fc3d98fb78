"""Loss of squared patterns by the width of heads, taught to a pretrained model's patterns.

python -m benchmarks.head_width MODEL CORPUS [--widths 8 16 32 64] [--texts 64] [--length 128]
                                             [--steps 200] [--layers 1 3]

Queries and keys get more coordinates than the model's, at rotary speeds in between. They start at
the pattern of the model's own queries and keys, and learn as in `bilens tensorise`. Printed for
each layer is `pattern_loss` on texts that were not learned. Its least value is the entropy of the
model's own patterns. Beside it is the width that copying needs at least. If the later half of a
text attends to different tokens of the earlier half with a total of s, that is s - 1
(docs/ideas/tensorise.md). It is the median over texts, of the head that needs most.
"""

import argparse
import math
import tempfile
from pathlib import Path
from typing import Any

import torch
from scipy.optimize import linear_sum_assignment
from torch import Tensor, nn

from bilens.convert import open_model, open_tokenizer
from bilens.convert.language_model import as_language_model
from bilens.data import load_documents
from bilens.nn.language.attention import rotate, rotation
from bilens.train.layers import LayerStreams, TrainingRows, teach
from bilens.train.settings import Distillation
from bilens.train.tensorise import EPS, pattern_loss


class Wide(nn.Module):
    """Squared pattern with heads of another width, which starts at that of a model."""

    def __init__(self, original: Any, width: int, base: float) -> None:
        super().__init__()
        self.scale, self.width, self.base = 2 * original.d_head**0.5, width, base
        self.constant = nn.Parameter(torch.ones(original.n_heads, 1, 1))
        times, half = width // original.d_head, original.d_head // 2
        # Pair i of the model turns as pair times * i of the wide head.
        pairs = torch.arange(half) * times
        places = torch.cat([pairs, pairs + width // 2])
        maps = []
        for part, repeats in (
            (original.query, 1),
            (original.key, original.n_heads // original.n_kv_heads),
        ):
            weight = part.weight.unflatten(0, (-1, original.d_head)).repeat_interleave(repeats, 0)
            wide = 0.1 * weight.std() * torch.randn(len(weight), width, weight.shape[-1])
            wide[:, places] = weight
            maps.append(nn.Parameter(wide))
        self.query, self.key = maps

    def attention_pattern(self, x: Tensor, *_: Any) -> Tensor:
        """Return the pattern, (batch, heads, time, time)."""
        positions = torch.arange(x.shape[1])[None]
        rope = rotation(positions, self.width, self.base, x)
        q, k = (
            rotate(torch.einsum("btm,hwm->bhtw", x, part), rope) for part in (self.query, self.key)
        )
        weights = (q @ k.mT / self.scale + self.constant).square().tril()
        return weights / weights.sum(-1, keepdim=True)


def least_width(pattern: Tensor) -> int:
    """Return the width that the pattern of a head, (time, time), needs at least."""
    half = pattern.shape[0] // 2
    block = pattern[half:, :half].numpy()
    return max(math.ceil(block[linear_sum_assignment(block, maximize=True)].sum()) - 1, 0)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    for name in ("model", "corpus"):
        parser.add_argument(name)
    for name, default in (("texts", 64), ("length", 128), ("steps", 200)):
        parser.add_argument(f"--{name}", type=int, default=default)
    for name, several in (("widths", [8, 16, 32, 64]), ("layers", [1, 3])):
        parser.add_argument(f"--{name}", type=int, nargs="+", default=several)
    given = parser.parse_args()
    opened = open_model(Path(given.model))
    tokenizer: Any = open_tokenizer(given.model, opened)
    model: Any = as_language_model(opened).requires_grad_(False)
    corpus = load_documents(given.corpus, tokenizer, n_ctx=given.length)
    learned, held_out = corpus.train[: given.texts], corpus.validation[:16]
    rope = model.embed_text(held_out["input_ids"][:1], torch.arange(given.length)[None])[2]
    with tempfile.TemporaryDirectory() as place:
        both = []
        for name, rows in (("learned", learned), ("held_out", held_out)):
            folder = Path(place) / name
            folder.mkdir()
            both.append(LayerStreams(model, list(model.blocks), rows["input_ids"], folder))
        for layer, block in enumerate(model.blocks):
            if layer in given.layers:

                def loss(pattern: Any, x: Tensor, block: Any = block) -> Tensor:
                    return pattern_loss(pattern, block.attn, block.attn_norm(x), rope)

                with torch.no_grad():
                    softmax = block.attn.attention_pattern(
                        block.attn_norm(both[1].stream), None, rope
                    )
                least = torch.tensor([[least_width(head) for head in text] for text in softmax])
                entropy = float(-(softmax * (softmax + EPS).log()).sum(-1).mean())
                print(
                    f"layer {layer}: entropy {entropy:.3f}, copying needs "
                    f"{int(least.median(0).values.max())}",
                    flush=True,
                )
                for width in given.widths:
                    torch.manual_seed(0)
                    pattern = Wide(block.attn, width, model.config.rope_base)
                    how = Distillation(steps=given.steps, batch_size=4)
                    folder = Path(place) / f"{layer}-{width}"
                    teach(
                        pattern,
                        loss,
                        TrainingRows(both[0].stream),
                        how,
                        folder,
                        f"heads of {width}",
                    )
                    with torch.no_grad():
                        value = float(loss(pattern, both[1].stream))
                    print(f"layer {layer}, heads of {width}: {value:.3f}", flush=True)
            for streams in both:
                streams.advance()


if __name__ == "__main__":
    main()
