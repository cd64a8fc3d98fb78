"""Positions and induction: how many steps each kind of positions takes to learn to repeat.

Shortformer positions, which only queries and keys see, "make it easier for models to form induction
heads", by the documentation of TransformerLens, which has no number. Here models of two blocks with
learned, shortformer and rotary positions read random words that begin again after 8 to 16 of them,
so that no fixed distance finds what comes next. Counted are the steps until 0.8 of the words that
are said again are the likeliest ones. Every kind sees the same texts in the same order.

Small: 3 seeds, 4 minutes on one core. Paper: 10.
"""

from statistics import median
from typing import Any

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from bilens.nn.language import LanguageConfig, LanguageModel
from experiments.context import Outcome, RecipeContext
from experiments.curves import Line, line_figure
from experiments.results import Row

SEEDS = (3, 10)
"""Initialisations at either scale."""
POSITIONS = ("learned", "shortformer", "rotary")
SIZES: dict[str, Any] = {
    "vocab_size": 32,
    "d_model": 64,
    "n_layers": 2,
    "n_heads": 2,
    "d_hidden": 64,
    "n_ctx": 40,
}
SHORTEST, LONGEST = 8, 16
BATCH, RATE, EVERY, MOST, SHARE, HELD_OUT = 32, 1e-2, 20, 1500, 0.8, 300


def run(context: RecipeContext) -> Outcome:
    """Train with each kind of positions, and count steps."""
    seeds = context.seed_range(SEEDS)
    curves = {kind: [learned(kind, seed) for seed in seeds] for kind in POSITIONS}
    steps = {kind: [float(EVERY * len(curve)) for curve in of] for kind, of in curves.items()}
    rows = [
        Row.of_range(
            f"{kind} positions: steps until repeated words are found",
            of_seeds,
            baselines={name: median(of) for name, of in steps.items() if name != kind},
        )
        for kind, of_seeds in steps.items()
    ]
    lines = []
    for kind, of in curves.items():
        longest = max(map(len, of))
        shares = torch.tensor([curve + curve[-1:] * (longest - len(curve)) for curve in of])
        ends = (part.tolist() for part in (shares.median(0)[0], shares.amin(0), shares.amax(0)))
        lines.append(Line(kind, range(EVERY, EVERY * longest + 1, EVERY), *ends))
    axes: dict[str, Any] = {"x_title": "steps", "y_title": "share of repeated words that are found"}
    figure = line_figure(lines, title="Median and range of seeds", **axes)
    settings = {
        **SIZES,
        **{"words before they repeat": (SHORTEST, LONGEST), "batch": BATCH, "learning rate": RATE},
        **{"share": SHARE, "steps at most": MOST, "low and high": "range over seeds"},
    }
    return Outcome({}, {"repeated": figure}, rows=rows, settings=settings)


def draw(
    texts: int, generator: torch.Generator
) -> tuple[Int[Tensor, "texts time"], Bool[Tensor, "texts time"]]:
    """Draw words that begin again, and where the next word follows from those before it."""
    period = torch.randint(SHORTEST, LONGEST + 1, (texts, 1), generator=generator)
    words = torch.randint(SIZES["vocab_size"], (texts, LONGEST), generator=generator)
    place = torch.arange(SIZES["n_ctx"])
    return words.gather(1, place % period), place[None] >= period


def learned(positions: str, seed: int) -> list[float]:
    """Return the share of repeated words that are found after every few steps, until enough are."""
    held_out, again = draw(HELD_OUT, torch.Generator().manual_seed(10_000))
    generator = torch.Generator().manual_seed(seed)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = LanguageModel(LanguageConfig(**{**SIZES, "norm": "rms", "positions": positions}))
    optimizer = torch.optim.AdamW(model.parameters(), RATE)
    shares: list[float] = []
    while EVERY * len(shares) < MOST and (not shares or shares[-1] < SHARE):
        for _ in range(EVERY):
            ids, _ = draw(BATCH, generator)
            optimizer.zero_grad()
            model(ids, labels=ids).loss.backward()
            optimizer.step()
        with torch.no_grad():
            found = model(held_out).logits[:, :-1].argmax(-1) == held_out[:, 1:]
        shares.append(float(found[again[:, :-1]].float().mean()))
    return shares
