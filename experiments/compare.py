"""Architectures: the steps and the seconds that each needs to reach the same validation loss.

The post on tensor-transformer variants trains SwiGLU and bilinear MLPs, each with softmax and with
bilinear attention, on the same texts in the same order down to a loss of 3.0. With 500 million
parameters the tensor variants needed about 4 % more steps. Its models have RMS norms and normalised
queries and keys, and so have these. Otherwise the patterns of bilinear attention, products of two
small scores, begin near zero.

Bilinear attention has two sets of queries and keys, a tenth more parameters at that size, which the
post accepts. Here each such model is trained once more with fewer hidden units, as large as the
first model. So are a model with a ReLU and no gate, which Pearce et al. 2024 find behind the
bilinear one, and one with the difference of two softmaxes, which the post found far behind.

Where the loss crosses the target is read off the straight line between two validations. Ratios are
to the first architecture; beside that of steps stands that of all operations. Seconds are as
measured, without validations and checkpoints, and say something of a quiet machine alone. A cost is
missing unless all seeds reached the target, since a mean over the others would be too small.

Small: the grammar to 2.3 nats, 2 seeds, some 30 minutes on two cores. Paper: TinyStories to 3.2
nats, two blocks of width 128, 3 seeds, and SwiGLU at half and twice that width, an hour on one
core. Both resume after ctrl-C.
"""

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

import pandas as pd
import torch
from matplotlib.figure import Figure

from bilens.analysis import Table
from bilens.data import Corpus
from bilens.errors import BilensError
from bilens.nn import LanguageSettings
from bilens.nn.language import LanguageConfig, LanguageModel
from bilens.train import PRESETS, LanguageTraining
from bilens.train.language import train_language
from bilens.transformer import counting_operations
from experiments.context import Outcome, RecipeContext, has_begun
from experiments.curves import Line, line_figure
from experiments.results import Row

MLPS, ATTENTIONS = ("swiglu", "bilinear"), ("softmax", "bilinear")
SOURCE = {"swiglu-bilinear": 1.04}
"""Steps of the post's model over those of SwiGLU with softmax."""
SEEDS = (2, 3)
"""Initialisations at either scale."""
STORIES = (
    LanguageSettings(vocab_size=1024, d_model=128, n_layers=2, n_heads=4, d_hidden=384, n_ctx=128),
    LanguageTraining(epochs=0.3, batch_size=16, learning_rate=3e-3, warmup=0.02),
)
WIDTHS = (64, 256)
"""Widths of other models of two blocks, with thrice as many hidden units."""
NORMS = {"norm": "rms", "qk_norm": True}


class Trained(NamedTuple):
    """An architecture that was trained with several seeds.

    Operations are those of matrix products in a forward pass of one text, of which a step takes
    thrice as many. A curve has a row for each validation: `steps`, `tokens`, `seconds` and `loss`.
    """

    name: str
    parameters: int
    operations: int
    curves: Sequence[pd.DataFrame]


def run(context: RecipeContext) -> Outcome:
    """Train every MLP with every attention, and with as many parameters as the first."""
    data, target = context.choose("grammar", "tinystories"), context.choose(2.3, 3.2)
    grammar = PRESETS["grammar"]
    sizes, training = context.choose((grammar.model, grammar.training), STORIES)
    # A crossing is interpolated between two validations, so that they are frequent.
    training = replace(training, evaluate_every=25, evaluate_texts=256, target_loss=target)
    corpus = context.corpus(data, sizes.n_ctx, sizes.vocab_size)
    settings = {**sizes.settings(), **NORMS, "vocab_size": len(corpus.tokenizer)}
    first = LanguageConfig(**settings)
    configs = variants(first, MLPS, ATTENTIONS)
    others = [
        *variants(first, ["relu"], ["softmax"]),
        *variants(first, ["swiglu"], ["differential"]),
    ]
    configs += resized([*configs, *others])
    folder, seeds = context.models / f"compare-{data}", context.seed_range(SEEDS)
    trained = train_all(configs, corpus, training, folder, seeds)
    rows, tables = stated_rows(trained, target), [summary(trained, target)]
    for width in context.choose((), WIDTHS):
        size = {"d_model": width, "n_heads": width // 32, "d_hidden": 3 * width}
        configs = variants(LanguageConfig(**settings | size), ["swiglu"], ATTENTIONS)
        beside = train_all([*configs, *resized(configs)], corpus, training, folder, seeds)
        rows += stated_rows(beside, target)
        tables.append(summary(beside, target))
    table = pd.concat(tables, ignore_index=True)
    # NaN is no JSON.
    costs = table.astype(object).where(table.notna(), None).to_dict("records")
    figures = {axis: _figure(trained, axis) for axis in ("steps", "seconds")}
    formats = {
        "operations": ",.0f",
        "steps": ",.0f",
        "tokens": ",.0f",
        "seconds": ",.1f",
        "best": ".3f",
    }
    return Outcome(
        {"data": data, "target": target, "architectures": costs},
        figures,
        [Table(table, "", formats | dict.fromkeys(("ratio of steps", "ratio of seconds"), ".3f"))],
        rows=rows,
        settings={"data": data, "target loss, nats": target, "low and high": "range over seeds"},
    )


def stated_rows(trained: Sequence[Trained], target: float) -> list[Row]:
    """Return each architecture's steps as a multiple of those of the first.

    The value is the ratio of the means; low and high are ratios of the same seed.
    """
    first, *others = trained
    costs = summary(trained, target).set_index("architecture")
    steps = {single.name: _steps(single, target) for single in trained}
    rows = []
    for single in others:
        source = SOURCE.get(single.name.rpartition("-")[0])
        ratio = costs.loc[single.name, "ratio of steps"]
        baselines = {"parameters": single.parameters / first.parameters}
        of_token = single.operations / first.operations
        row = Row(
            f"{single.name}: steps over those of {first.name}",
            None,
            n=len(single.curves),
            baselines={**baselines, "operations": None},
            source=source,
        )
        # A cost is missing unless all seeds reached the target.
        if not math.isnan(ratio):
            of_seeds = steps[single.name] / steps[first.name]
            row = replace(
                row,
                value=ratio,
                low=min(of_seeds),
                high=max(of_seeds),
                baselines={**baselines, "operations": of_token * ratio},
                held=None if source is None else bool(ratio <= source),
            )
        rows.append(row)
    return rows


def _steps(architecture: Trained, target: float) -> pd.Series:
    """Return the steps to the target, one for each seed."""
    return pd.Series([crossing(curve, target)["steps"] for curve in architecture.curves])


def variants(
    config: LanguageConfig, mlps: Sequence[str], attentions: Sequence[str]
) -> list[LanguageConfig]:
    """Return the model with each combination of MLP and attention, ordered by MLP."""
    settings = config.to_dict()
    return [
        LanguageConfig(**{**settings, "mlp": mlp, "attention": attention})
        for mlp in mlps
        for attention in attentions
    ]


def of_equal_size(configs: Sequence[LanguageConfig]) -> list[LanguageConfig]:
    """Return the models with hidden widths such that all have as many parameters as the first.

    Parameters are an affine function of hidden units, so each model is within half a unit in each
    block of the first. Raises BilensError if a model without its hidden units is larger already.
    """
    goal = count_parameters(configs[0])
    results = []
    for config in configs:
        narrow, wider = (count_parameters(_with_hidden(config, width)) for width in (1, 2))
        width = round((goal - narrow) / (wider - narrow)) + 1
        if width < 1:
            raise BilensError(
                f"with {config.mlp} MLP and {config.attention} attention the model has {narrow:,} "
                f"parameters with a single hidden unit, more than the {goal:,} of the first "
                "architecture; make d_hidden larger"
            )
        results.append(_with_hidden(config, width))
    return results


def resized(configs: Sequence[LanguageConfig]) -> list[LanguageConfig]:
    """Return the models that are not as large as the first one, made as large."""
    pairs = zip(configs, of_equal_size(configs), strict=True)
    return [equal for config, equal in pairs if equal.d_hidden != config.d_hidden]


def count_parameters(config: LanguageConfig) -> int:
    """Return the number of parameters of a model, without allocating it."""
    with torch.device("meta"):
        model = LanguageModel(config)
    return sum(parameter.numel() for parameter in model.parameters())


def count_operations(config: LanguageConfig) -> int:
    """Return the operations of a forward pass of one text, by torch's own counter."""
    model, ids = LanguageModel(config), torch.zeros(1, config.n_ctx, dtype=torch.long)
    with torch.no_grad(), counting_operations() as counter:
        model(ids)
    return counter.get_total_flops()


def train_all(
    configs: Sequence[LanguageConfig],
    corpus: Corpus,
    training: LanguageTraining,
    folder: Path,
    seeds: Sequence[int],
) -> list[Trained]:
    """Train each model with each seed until its validation loss reaches the target.

    With one seed all of them see the same batches in the same order. Finished trainings of an
    earlier call are reused and stopped ones are resumed.
    """
    tokens = training.batch_size * len(corpus.train[0]["input_ids"])
    results = []
    for config in configs:
        name = f"{config.mlp}-{config.attention}-{config.d_hidden}"
        curves = []
        for seed in seeds:
            run, settings = folder / f"{name}-seed{seed}", replace(training, seed=seed)
            _, history = train_language(config, corpus, settings, run, resume=has_begun(run))
            rows = [
                (record["step"], record["step"] * tokens, record["seconds"], record["eval_loss"])
                for record in history
                if "eval_loss" in record
            ]
            curves.append(pd.DataFrame(rows, columns=["steps", "tokens", "seconds", "loss"]))
        sizes = count_parameters(config), count_operations(config)
        results.append(Trained(name, *sizes, curves))
    return results


def crossing(curve: pd.DataFrame, target: float) -> pd.Series:
    """Return steps, tokens and seconds until the loss first reached the target, or else NaN."""
    costs = curve[["steps", "tokens", "seconds"]].astype(float)
    reached = (curve["loss"] <= target).to_numpy()
    after = int(reached.argmax())
    if not reached.any():
        return costs.iloc[0] * float("nan")
    if after == 0:
        return costs.iloc[0]
    above, below = curve["loss"].iloc[after - 1], curve["loss"].iloc[after]
    share = (above - target) / (above - below)
    return costs.iloc[after - 1] + share * (costs.iloc[after] - costs.iloc[after - 1])


def summary(trained: Sequence[Trained], target: float) -> pd.DataFrame:
    """Return a row for each architecture: mean costs up to the target, ratios to the first."""
    rows: list[dict[str, Any]] = []
    for architecture in trained:
        costs = pd.DataFrame([crossing(curve, target) for curve in architecture.curves])
        mean = costs.mean(skipna=False)
        paces = [
            curve["seconds"].iloc[-1] / curve["steps"].iloc[-1] for curve in architecture.curves
        ]
        rows.append(
            {
                "architecture": architecture.name,
                "parameters": architecture.parameters,
                "operations": architecture.operations,
                "steps": mean["steps"],
                "±": costs["steps"].std(skipna=False),
                "tokens": mean["tokens"],
                "seconds of a step": fmean(paces),
                "seconds": mean["seconds"],
                "best": fmean(curve["loss"].min() for curve in architecture.curves),
                "seeds that missed": int(costs["steps"].isna().sum()),
            }
        )
    table = pd.DataFrame(rows)
    for cost in ("steps", "seconds"):
        table.insert(len(table.columns) - 2, f"ratio of {cost}", table[cost] / table[cost].iloc[0])
    return table


def _figure(trained: Sequence[Trained], axis: str) -> Figure:
    """Draw the mean validation losses over the validations that all seeds had."""
    lines = []
    for architecture in trained:
        common = min(len(curve) for curve in architecture.curves)
        losses = pd.DataFrame([curve["loss"].iloc[:common] for curve in architecture.curves])
        places = pd.DataFrame([curve[axis].iloc[:common] for curve in architecture.curves])
        x, middle, low, high = places.mean(), losses.mean(), losses.min(), losses.max()
        lines.append(Line(architecture.name, *(part.tolist() for part in (x, middle, low, high))))
    title = f"Validation loss by {axis}, with the range of the seeds"
    return line_figure(lines, title=title, x_title=axis, y_title="nats a token")


def _with_hidden(config: LanguageConfig, width: int) -> LanguageConfig:
    return LanguageConfig(**{**config.to_dict(), "d_hidden": width})
