"""The story model that comes with bilens: trained, rounded to eight bits, and measured.

No figure of the papers. `bilens.load("story")` is what this recipe trains: the preset `story`, four
bilinear layers on TinyStories. `python -m experiments.story RUN` writes the finished run of a
training in eight bits to the package.

Measured is the model as it ships, on held-out stories, lower-cased as its tokenizer lower-cases
them: bits a character, with half a context before each token but the first ones. The same program
measures the weights before they were rounded, and stories260K of llama2.c, a transformer of 260,000
weights, on the same stories with their capitals.

For ten verbs and ten nouns the strongest token before and after each is read from the weights. It
fits if the two tokens follow each other in held-out stories more often than they would by chance.

Small and paper: the same, a training of an hour on one core.
"""

import sys
from collections import Counter
from itertools import pairwise
from math import log
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional

from bilens.convert import open_model, open_tokenizer, save_model
from bilens.convert.eight_bits import MARK, round_rows
from bilens.data.texts import clean, read_texts
from bilens.models import load
from bilens.read.language import read_ngrams
from bilens.residual import ResidualModel
from bilens.shipped import STORY
from bilens.train.settings import PRESETS
from experiments.context import Outcome, RecipeContext
from experiments.llama2c import stories260K
from experiments.results import Row

N_STORIES = 200
VERBS = ("ate", "ran", "saw", "jumped", "climbed", "played", "gave", "found", "asked", "went")
NOUNS = ("girl", "dog", "ball", "tree", "mom", "cake", "park", "bird", "boat", "friend")


def run(context: RecipeContext) -> Outcome:
    """Train, and measure what ships."""
    preset = PRESETS["story"]
    trained = context.language("tinystories", preset.training, preset.model)
    shipped: Any = load("story")
    baseline: Any = load(stories260K(context))
    held_out = [clean(text) for text in read_texts(context.folder / "tinystories/valid.txt.gz")]
    held_out = held_out[:N_STORIES]
    lower = [text.lower() for text in held_out]
    size = (STORY / "model.safetensors").stat().st_size / 2**20
    fits = fitting(shipped, lower)
    rows = [
        Row(
            "bits a character of held-out stories, in lower case",
            bits_per_character(shipped, lower),
            unit="bits",
            baselines={
                "before rounding to eight bits": bits_per_character(trained, lower),
                "stories260K, with capitals": bits_per_character(baseline, held_out),
            },
            n=N_STORIES,
        ),
        Row("size of the weights", size, unit="MiB"),
        Row(
            "share of verbs and nouns whose strongest token before and after fit",
            sum(fits.values()) / len(fits),
            n=len(fits),
        ),
    ]
    return Outcome({row.claim: row.value for row in rows}, rows=rows)


@torch.no_grad()
def bits_per_character(model: ResidualModel, stories: list[str]) -> float:
    """Return the loss of a model on stories in bits, over the number of their characters.

    Each window has the first token, and predicts what follows its middle: at most as many tokens as
    in training, and at least half as many before each, but at the beginning of a story.
    """
    tokenizer, n_ctx = model.tokenizer, model.model.config.n_ctx
    nats = 0.0
    for story in stories:
        ids = torch.tensor([tokenizer.encode(story)])
        half = (n_ctx - 1) // 2
        for start in range(1, ids.shape[1], half):
            first = max(1, start - half)
            window = torch.cat([ids[:, :1], ids[:, first : start + half]], dim=1)
            n_new = min(half, ids.shape[1] - start)
            logits = model.logits(window)[0, -n_new - 1 : -1]
            nats += float(functional.cross_entropy(logits, window[0, -n_new:], reduction="sum"))
    return nats / log(2) / sum(map(len, stories))


def fitting(model: ResidualModel, stories: list[str]) -> dict[str, bool]:
    """Return for each verb and noun whether its strongest neighbours are neighbours in stories."""
    tokens = [model.tokenizer.tokenize(story) for story in stories]
    single = Counter(token for story in tokens for token in story)
    pairs = Counter(pair for story in tokens for pair in pairwise(story))
    total = single.total()

    def follows(first: str, second: str) -> bool:
        expected = single[first] * single[second] / total
        return pairs[first, second] > max(1.0, 2 * expected)

    found = {}
    for word in (*VERBS, *NOUNS):
        reading = read_ngrams(model, word, layer=0)
        before, after = reading.preceding.token[0], reading.following.token[0]
        found[word] = follows(before, word) and follows(word, after)
    return found


def ship(run: Path, folder: Path = STORY) -> None:
    """Write a finished training to the package, in eight bits."""
    model = open_model(run)
    setattr(model.config, MARK, True)
    save_model(folder, model, open_tokenizer(run, model), round_rows(model.state_dict()))


if __name__ == "__main__":
    ship(Path(sys.argv[1]))
