"""A one-layer bilinear transformer on TinyStories: tables 1, 6 and 7 and figures 7 and 11 to 13.

Reproduces section 6 and appendices F and G of Pearce et al. 2024 on a model without norms and
biases, trained here:

- the tokens before and after "girl" (table 1);
- the most salient bigrams of the residual stream and of the MLP's diagonal (table 6);
- the skip-trigrams of every head that end in a quotation mark (table 7);
- the contexts of largest activation for the eigenvectors of "swim" minus other verbs, of "swim"
  alone, and of the quotation mark (figures 7 and 13, 12, and 11).

Measured too is the validation loss in nats a token. A story is stored.

The source finds 99 of the 100 strongest pairs of its head 0.2 to be a talk-related verb before a
comma or a colon. Here these pairs are counted for every head, with the words of `TALK`. They are
the pairs that raise the quotation mark through the MLP, among all tokens and among the 500 most
frequent ones. After little training, rare tokens have the largest weights.

Small: the preset tiny (d = 256, two passes over a part of TinyStories that is 3.5 million tokens
long), about 10 minutes on two cores. Paper: the preset paper, for a GPU.
"""

from collections.abc import Sequence
from typing import Any

import pandas as pd
import torch

from bilens.analysis import ContextList, Reading, Table
from bilens.language import (
    TokenDirection,
    bigrams,
    generate_text,
    read_direction,
    read_ngrams,
    skip_trigrams,
)
from bilens.pages import spectrum_figure
from bilens.train import PRESETS
from bilens.transformer import ResidualModel
from experiments.context import Outcome, RecipeContext, validation_loss
from experiments.results import Row

FREQUENT = 500
VERBS = ("run", "climb", "eat", "see", "smell", "walk", "fly", "sit", "sleep")
SWIM, ALONE = TokenDirection("swim", VERBS), TokenDirection("swim")
QUOTE, GIRL = TokenDirection('"'), TokenDirection("girl")
TALK = {
    *("said", "say", "says", "saying", "told", "tell", "tells", "asked", "ask", "asks", "asking"),
    *("shouted", "shout", "shouts", "shouting", "yelled", "yell", "yells", "yelling", "screamed"),
    *("whispered", "whisper", "whispers", "replied", "reply", "replies", "answered", "answer"),
    *("cried", "cries", "called", "calls", "exclaimed", "exclaims", "##laimed", "announced"),
    *("explained", "begged", "agreed", "added", "thought", "laughed", "smiled", "sang"),
}
PROMPT = "once upon a time, there was a little"


def run(context: RecipeContext) -> Outcome:
    """Train on stories and read the weights."""
    preset = PRESETS[context.choose("tiny", "paper")]
    model = context.language("tinystories", preset.training, preset.model)
    config = model.model.config
    corpus = context.corpus("tinystories", config.n_ctx, config.vocab_size)
    girl, quote = (read_ngrams(model, direction.token, layer=0) for direction in (GIRL, QUOTE))
    frames = (girl.preceding, girl.following, *quote.heads)
    before, after, *ending = map(pd.DataFrame, frames)
    direct, mlp = bigrams(model, layer=0, part="direct"), bigrams(model, layer=0, part="mlp")
    counts = torch.bincount(corpus.validation[:]["input_ids"].flatten())
    frequent: list[int] = counts.argsort(descending=True)[:FREQUENT].tolist()
    directions = [
        read_direction(model, corpus, direction.token, minus=direction.minus, layer=0)
        for direction in (SWIM, ALONE, QUOTE)
    ]
    numbers: dict[str, Any] = {
        "parameters": sum(parameter.numel() for parameter in model.model.parameters()),
        "validation_loss": validation_loss(model.model, corpus),
        "training_tokens": len(corpus.train) * config.n_ctx * preset.training.epochs,
        "story": generate_text(model, PROMPT),
        "table_1": {"preceding": list(before.token), "following": list(after.token)},
        "table_6": {"direct": _records(direct), "mlp": _records(mlp)},
        "table_7": {
            f"head {head}": {
                "talk_before_comma_or_colon_of_100": _talk(model, head),
                "the_same_among_frequent_tokens": _talk(model, head, frequent),
                "top": _records(frame),
            }
            for head, frame in enumerate(ending)
        },
        "source": {"talk_before_comma_or_colon_of_100": 99, "parameters": 22_020_096},
    }
    tables = [
        _ngram_table(before, "before girl"),
        _ngram_table(after, "after girl"),
        _ngram_table(direct, "bigrams, residual"),
        _ngram_table(mlp, "bigrams, MLP"),
        *(_ngram_table(frame, f'head {head}, to "') for head, frame in enumerate(ending)),
    ]
    contexts = [part for reading in directions for part in _contexts(reading)]
    figures = {
        f"spectrum-{number}": spectrum_figure(
            reading.all_eigenvectors, title=f"Eigenvalues of {reading.direction}"
        )
        for number, reading in enumerate(directions, start=1)
    }
    heads = numbers["table_7"].values()
    talk, of_frequent = (
        max(100 * head[key] for head in heads)
        for key in ("talk_before_comma_or_colon_of_100", "the_same_among_frequent_tokens")
    )
    rows = [
        Row("validation loss", numbers["validation_loss"], n=1, unit="nats"),
        Row(
            "known pairs among the hundred strongest of the best head",
            talk,
            n=100,
            baselines={"of frequent tokens": of_frequent},
            source=99,
            held=talk >= 99,
        ),
    ]
    settings = {"tokens of training": numbers["training_tokens"], "frequent": FREQUENT}
    return Outcome(numbers, figures, [*tables, *contexts], rows=rows, settings=settings)


def talk_share(frame: pd.DataFrame) -> float:
    """Share of the pairs that are a talk-related verb before a comma or a colon."""
    hits = frame.virtual.isin(TALK) & frame.direct.isin([",", ":"])
    return float(hits.mean())


def _talk(model: ResidualModel, head: int, among: Sequence[int] | None = None) -> float:
    return talk_share(skip_trigrams(model, QUOTE.token, head, layer=0, k=100, among=among))


def _records(frame: pd.DataFrame) -> list[list[Any]]:
    words = [name for name in frame.columns if frame[name].dtype.kind not in "fi"]
    return [[*row[:-1], round(row[-1], 2)] for row in frame[[*words, "value"]].values.tolist()]


def _ngram_table(frame: pd.DataFrame, caption: str) -> Table:
    words = [name for name in frame.columns if frame[name].dtype.kind not in "fiu"]
    return Table(frame[[*words, "value"]], caption, {"value": "z.2f"})


def _contexts(reading: Reading) -> Sequence[ContextList]:
    return [
        part
        for section in reading.sections()
        for part in section.parts
        if isinstance(part, ContextList)
    ]
