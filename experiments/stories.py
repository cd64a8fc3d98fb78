"""A one-layer bilinear transformer on TinyStories: tables 1, 6 and 7 and figures 7 and 11 to 13.

Reproduces section 6 and appendices C.2, F and G of Pearce et al. 2024 on models without norms and
biases, trained here. The page has the most salient bigrams (table 6), the skip-trigrams of every
head that end in a quotation mark (table 7), and the contexts of largest activation for the
eigenvectors of "swim" minus other verbs, of "swim" alone, and of the quotation mark (figures 7 and
13, 12, and 11). Measured are

- how many of the 100 strongest pairs of a head are a talk-related verb, of `TALK`, before a comma
  or a colon, after a quarter, a half and the whole of the training. The source finds 99 in its head
  0.2, after 2 billion tokens. The pairs raise the quotation mark through the MLP. Another head
  closes the quotation, after a quotation mark and punctuation;
- whether the most negative eigenvector of an output takes away what the heads have added to its
  logit, which the source supposes (section 6.2). Outputs are frequent words, and places those of
  held-out stories;
- what norms, biases and the width change (appendix C.2), after a quarter of the training: the
  validation loss, and how many of the 20 words of table 1 are among the ten tokens before and after
  "girl" here.

Small: d = 128, a pass over 3.5 million tokens of TinyStories, 25 minutes on one core. Paper: the
preset paper, for a GPU.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from statistics import fmean, median
from typing import Any

import pandas as pd
import torch
from jaxtyping import Int
from torch import Tensor

from bilens.analysis import ContextList, Table
from bilens.data import Corpus
from bilens.language import (
    TokenDirection,
    bigrams,
    following,
    generate_text,
    preceding,
    read_direction,
    skip_trigrams,
)
from bilens.nn import LanguageSettings
from bilens.pages import spectrum_figure
from bilens.train import PRESETS, LanguageTraining
from bilens.transformer import Pass, ResidualModel
from experiments.context import Outcome, RecipeContext, validation_loss
from experiments.curves import Line, line_figure
from experiments.results import Row

SEEDS = (2, 3)
"""Initialisations of the models after a quarter of the training."""
SMALL = replace(
    PRESETS["tiny"],
    model=LanguageSettings(d_model=128, n_heads=4, d_hidden=384, n_ctx=128),
    training=LanguageTraining(epochs=1, batch_size=8, learning_rate=3e-3, warmup=0.02),
)
QUARTER, HALF, WHOLE = 0.25, 0.5, 1.0
FREQUENT, OUTPUTS, TEXTS = 500, 30, 64
VERBS = ("run", "climb", "eat", "see", "smell", "walk", "fly", "sit", "sleep")
SWIM, ALONE = TokenDirection("swim", VERBS), TokenDirection("swim")
QUOTE = TokenDirection('"')
BEFORE = {"little", "the", "young", "small", "poor", "good", "birthday", "another", "first", "kind"}
AFTER = {"named", "who", "nodded", "called", "hugged", "touched", "names", "cried", "s", "name"}
"""Table 1 of the source: the tokens before and after "girl"."""
TALK = {
    *("said", "say", "says", "saying", "told", "tell", "tells", "asked", "ask", "asks", "asking"),
    *("shouted", "shout", "shouts", "shouting", "yelled", "yell", "yells", "yelling", "screamed"),
    *("whispered", "whisper", "whispers", "replied", "reply", "replies", "answered", "answer"),
    *("cried", "cries", "called", "calls", "exclaimed", "exclaims", "##laimed", "announced"),
    *("explained", "begged", "agreed", "added", "thought", "laughed", "smiled", "sang"),
}
ENDS = (".", "!", "?", ",")
PROMPT = "once upon a time, there was a little"


def run(context: RecipeContext) -> Outcome:
    """Train on stories, measure what the source says, and read the weights."""
    preset = context.choose(SMALL, PRESETS["paper"])
    corpus = context.corpus("tinystories", preset.model.n_ctx, preset.model.vocab_size)
    tokens = len(corpus.train) * preset.model.n_ctx * preset.training.epochs
    by_part = {part: trained(context, part) for part in (QUARTER, HALF, WHOLE)}
    model = by_part[WHOLE]
    counts = torch.bincount(corpus.validation[:]["input_ids"].flatten())
    frequent: list[int] = counts.argsort(descending=True)[:FREQUENT].tolist()
    names = [*corpus.tokenizer.convert_ids_to_tokens(frequent)]
    outputs = [number for number, name in zip(frequent, names, strict=True) if name.isalpha()]
    places = corpus.validation[:TEXTS]["input_ids"]
    talk = {part: best_head(one, talk_pairs) for part, one in by_part.items()}
    rows = [
        Row("validation loss", validation_loss(model.model, corpus), n=1, unit="nats"),
        Row.of_share(
            "known pairs among the hundred strongest of the best head, share",
            talk[WHOLE],
            baselines={
                "after a quarter of the training": fmean(talk[QUARTER]),
                "after half of it": fmean(talk[HALF]),
                "of frequent tokens": fmean(best_head(model, talk_pairs, frequent)),
            },
        ),
        Row.of_share(
            "quotation mark and punctuation among the hundred strongest of the best head, share",
            best_head(model, closing_pairs),
            baselines={"every such pair": len(ENDS) / 100},
        ),
        *cancelling_rows(model, places, outputs[:OUTPUTS]),
        *changed_rows(context, corpus),
    ]
    share = [100 * fmean(known) for known in talk.values()]
    axes: dict[str, Any] = {"x_title": "tokens of training (millions)", "y_title": "of 100 pairs"}
    line = Line("best head", [part * tokens / 1e6 for part in talk], share, share, share)
    figures = {"known-pairs": line_figure([line], title="Talk and quotation marks", **axes)}
    tables = [
        *(_table(bigrams(model, layer=0, part=part), part) for part in ("direct", "mlp")),
        *(
            _table(skip_trigrams(model, QUOTE.token, head, layer=0), f'head {head}, to "')
            for head in range(model.n_heads)
        ),
    ]
    contexts: list[ContextList] = []
    for number, direction in enumerate((SWIM, ALONE, QUOTE), start=1):
        reading = read_direction(model, corpus, direction.token, minus=direction.minus, layer=0)
        title = f"Eigenvalues of {reading.direction}"
        figures[f"spectrum-{number}"] = spectrum_figure(reading.all_eigenvectors, title=title)
        parts = [part for section in reading.sections() for part in section.parts]
        contexts += [part for part in parts if isinstance(part, ContextList)]
    settings = {
        **{"tokens of training": tokens, "frequent": FREQUENT, "outputs": OUTPUTS},
        **{"places": places.numel(), "words of the source": len(BEFORE | AFTER)},
        "low and high of norms, biases and width": "range over seeds",
    }
    return Outcome(
        {"story": generate_text(model, PROMPT)},
        figures,
        [*tables, *contexts],
        rows=rows,
        settings=settings,
    )


def trained(context: RecipeContext, part: float, seed: int = 0, **changes: Any) -> ResidualModel:
    """Return the model after a part of the training, with some of its settings changed."""
    preset = context.choose(SMALL, PRESETS["paper"])
    training = replace(preset.training, epochs=part * preset.training.epochs, seed=seed)
    return context.language("tinystories", training, replace(preset.model, **changes))


def talk_pairs(frame: pd.DataFrame) -> list[bool]:
    """Return which pairs are a talk-related verb before a comma or a colon."""
    return [*(frame.virtual.isin(TALK) & frame.direct.isin([",", ":"]))]


def closing_pairs(frame: pd.DataFrame) -> list[bool]:
    """Return which pairs are a quotation mark, and then punctuation."""
    return [*((frame.virtual == QUOTE.token) & frame.direct.isin(ENDS))]


def best_head(
    model: ResidualModel,
    known: Callable[[pd.DataFrame], list[bool]],
    among: Sequence[int] | None = None,
) -> list[bool]:
    """Return which of the 100 strongest pairs are known, of the head that has most of them."""
    heads = (
        known(skip_trigrams(model, QUOTE.token, head, layer=0, k=100, among=among))
        for head in range(model.n_heads)
    )
    return max(heads, key=sum)


def cancelling_rows(
    model: ResidualModel, texts: Int[Tensor, "texts time"], outputs: Sequence[int]
) -> list[Row]:
    """Return what the first negative eigenvector takes away of what heads added to each output.

    This is the slope of its activations over the logits that the heads added, with the other sign.
    """
    of_text = Pass.of(model, texts)
    x = of_text.layer(0).mlp_input.flatten(0, 1)
    U = (model.W_U - model.W_U.mean(1, keepdim=True))[:, list(outputs)].T
    heads = (x - of_text.streams[0].flatten(0, 1)) @ U.T
    spectra = model.mlp(0).interaction(U).eigh()
    random = torch.randn(x.shape[1], generator=torch.Generator().manual_seed(0)).to(x)
    values = spectra.values
    found = {
        "first negative": spectra.select(values.argmin(-1, keepdim=True)).activations(x)[..., 0],
        "first positive": spectra.select(values.argmax(-1, keepdim=True)).activations(x)[..., 0],
        "minus the square along a random direction": -((x @ random)[:, None] ** 2),
    }
    logits = heads - heads.mean(0)
    taken = {
        name: (-(act - act.mean(0)) * logits).mean(0) / logits.square().mean(0)
        for name, act in found.items()
    }
    against = {name: (of > 0).tolist() for name, of in taken.items()}
    negative, positive, chance = taken
    claim = f"{negative} eigenvector of an output: "
    return [
        Row.of(
            claim + "part of what the heads added that it takes away",
            taken[negative].tolist(),
            baselines={positive: float(taken[positive].mean())},
        ),
        Row.of_share(
            claim + "share of outputs where it goes against the heads",
            against[negative],
            baselines={name: fmean(against[name]) for name in (positive, chance)},
        ),
    ]


def changed_rows(context: RecipeContext, corpus: Corpus) -> list[Row]:
    """Return what norms, biases and twice the width change of the loss, and of table 1."""
    sizes = context.choose(SMALL, PRESETS["paper"]).model
    changes: dict[str, dict[str, Any]] = {
        "the model": {},
        "with norms": {"norm": "rms"},
        "with biases": {"bias": True},
        "twice as wide": {"d_model": 2 * sizes.d_model, "d_hidden": 2 * sizes.d_hidden},
    }
    losses, words = ({name: list[float]() for name in changes} for _ in range(2))
    for name, changed in changes.items():
        for seed in context.seed_range(SEEDS):
            model = trained(context, QUARTER, seed, **changed)
            losses[name].append(validation_loss(model.model, corpus))
            words[name].append(words_of_source(model))
    own = losses.pop("the model")
    of_words = words.pop("the model")
    rows = [Row.of_range("the model: words of the source before and after girl", of_words)]
    for name, of_seeds in losses.items():
        above = [loss - base for loss, base in zip(of_seeds, own, strict=True)]
        claim = f"{name}: loss above that of the model"
        rows.append(Row.of_range(claim, above, unit="nats", baselines={"the model": median(own)}))
        beside = {"the model": median(of_words)}
        claim = f"{name}: words of the source before and after girl"
        rows.append(Row.of_range(claim, words[name], baselines=beside))
    return rows


def words_of_source(model: ResidualModel) -> float:
    """Return how many words of table 1 are among the ten tokens before and after "girl"."""
    before, after = ({*find(model, "girl", layer=0, k=10).token} for find in (preceding, following))
    return float(len(before & BEFORE) + len(after & AFTER))


def _table(frame: pd.DataFrame, caption: str) -> Table:
    words = [name for name in frame.columns if frame[name].dtype.kind not in "fiu"]
    return Table(frame[[*words, "value"]], caption, {"value": "z.2f"})
