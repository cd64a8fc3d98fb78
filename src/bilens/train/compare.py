"""Train several architectures on the same texts in the same order, as far as a target loss."""

import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import pandas as pd
import torch
from accelerate import PartialState

from bilens.data import Corpus
from bilens.errors import BilensError
from bilens.nn.language import LanguageConfig, LanguageModel
from bilens.train.language import train_language
from bilens.train.run_directory import CHECKPOINTS, is_begun
from bilens.train.settings import LanguageTraining

__all__ = [
    "ARCHITECTURE",
    "COST",
    "Comparison",
    "compare_architectures",
    "count_parameters",
    "of_equal_size",
    "variants",
]

ARCHITECTURE = ["mlp", "attention", "d_hidden", "parameters"]
"""The columns that tell architectures apart."""
COST = ["steps", "tokens", "seconds"]
"""The columns that say what a training took until a row."""
SEED = [*ARCHITECTURE, "seed"]


@dataclass(frozen=True, eq=False)
class Comparison:
    """Architectures trained on the same texts in the same order.

    Attributes:
        data: what they were trained on.
        target: the validation loss to reach, in nats a token.
        validations: a row for each validation of each training, in order: the architecture (`mlp`,
            `attention`, `d_hidden`, `parameters`), the `seed`, the `steps` of the optimizer, the
            `tokens` trained on and the `seconds` that took without validations and checkpoints,
            and the `loss`. Ratios refer to the first architecture.
    """

    data: str
    target: float
    validations: pd.DataFrame

    def crossings(self) -> pd.DataFrame:
        """What each training took until its loss first reached the target; NaN where it did not.

        Read off the straight line between two validations.
        """

        def crossing(curve: pd.DataFrame) -> pd.Series:
            reached = (curve["loss"] <= self.target).to_numpy()
            after = int(reached.argmax()) if reached.any() else None
            if after is None:
                return pd.Series(float("nan"), COST)
            b = curve.iloc[after]
            a = curve.iloc[after - 1] if after else b
            share = (a["loss"] - self.target) / (a["loss"] - b["loss"]) if after else 0.0
            return a[COST] + share * (b[COST] - a[COST])

        columns = self.validations.groupby(SEED, sort=False)[[*COST, "loss"]]
        return columns.apply(crossing).astype(float).reset_index()

    def mean_curves(self) -> pd.DataFrame:
        """For each architecture the mean over seeds of each validation that all of them had."""
        number = self.validations.groupby(SEED, sort=False).cumcount().rename("number")
        groups = self.validations.groupby([*ARCHITECTURE, number], sort=False)
        mean, seeds = groups[[*COST, "loss"]].mean(), groups.size()
        complete = seeds == seeds.groupby(ARCHITECTURE, sort=False).transform("max")
        return mean[complete].sort_index(level="number", sort_remaining=False).reset_index()

    def summary(self) -> pd.DataFrame:
        """A row for each architecture, in order.

        The columns are those of the architecture; `seeds`, and how many of them `reached` the
        target; the mean `steps`, `tokens` and `seconds` that it took, the standard `deviation` of
        the steps, and `steps_ratio` and `seconds_ratio`, NaN unless every seed reached it, since
        those that did not would be missing from the mean; `seconds_per_step`; and `best`, the mean
        of the seeds' smallest losses.
        """
        crossings = self.crossings().groupby(ARCHITECTURE, sort=False)
        table = crossings[COST].agg(lambda values: values.mean(skipna=False))
        table["deviation"] = crossings["steps"].agg(lambda values: values.std(skipna=False))
        table["seeds"], table["reached"] = crossings.size(), crossings["steps"].count()
        table["steps_ratio"] = table["steps"] / table["steps"].iloc[0]
        table["seconds_ratio"] = table["seconds"] / table["seconds"].iloc[0]
        each = self.validations.groupby(SEED, sort=False)
        last = each.last()
        pace = last["seconds"] / last["steps"]
        table["seconds_per_step"] = pace.groupby(ARCHITECTURE, sort=False).mean()
        table["best"] = each["loss"].min().groupby(ARCHITECTURE, sort=False).mean()
        return table.reset_index()


def variants(
    config: LanguageConfig, mlps: Sequence[str], attentions: Sequence[str]
) -> list[LanguageConfig]:
    """The model with every MLP and every attention of these names, MLPs changing last."""
    settings = config.to_dict()
    return [
        LanguageConfig(**{**settings, "mlp": mlp, "attention": attention})
        for mlp in mlps
        for attention in attentions
    ]


def of_equal_size(configs: Sequence[LanguageConfig]) -> list[LanguageConfig]:
    """The models with as many hidden units each as give it the parameters of the first.

    Parameters grow along a straight line with hidden units, so all end within half a unit in each
    block of the first. Raises BilensError where the other parts alone are larger than that.
    """
    goal = count_parameters(configs[0])
    found = []
    for config in configs:
        one, two = (count_parameters(_with_hidden(config, width)) for width in (1, 2))
        width = round((goal - one) / (two - one)) + 1
        if width < 1:
            raise BilensError(
                f"equal_parameters: with {config.mlp} MLP and {config.attention} attention the "
                f"model has {one:,} parameters with a single hidden unit, more than the {goal:,} "
                "of the first architecture; make d_hidden larger"
            )
        found.append(_with_hidden(config, width))
    return found


def count_parameters(config: LanguageConfig) -> int:
    """How many parameters a model has, without making it."""
    with torch.device("meta"):
        model = LanguageModel(config)
    return sum(parameter.numel() for parameter in model.parameters())


def compare_architectures(
    configs: Sequence[LanguageConfig],
    corpus: Corpus,
    training: LanguageTraining,
    run: Path,
    *,
    seeds: Sequence[int] = (0,),
    use_cpu: bool = False,
    done: Callable[[pd.DataFrame], None] = lambda curve: None,
) -> Comparison:
    """Train each model with each seed until its validation loss reaches the target.

    With one seed all of them see the same batches in the same order. What was trained by an earlier
    call is not trained again, and what was stopped goes on. Of a finished training the model stays,
    its checkpoints are removed.

    Args:
        configs: models that differ in MLP or attention.
        corpus: texts as token ids.
        training: how to train them all, until its `target_loss`, or its `epochs` at the latest.
        run: the directory to write to, with one of `train_language` for each model and seed in it.
        seeds: of the initial weights and of the order of the texts.
        use_cpu: leave GPUs alone.
        done: is told of each training that has ended, by its rows of `Comparison.validations`.

    Raises:
        BilensError: there is no target, no architecture or no seed, one of them is there twice, or
            a model cannot be trained (see `train_language`).
        CheckpointError: `run` holds trainings with other settings.
        KeyboardInterrupt: ctrl-C, after a checkpoint was saved; the same call goes on from there.

    Source: The post on tensor-transformer variants, which compares at a loss of 3.0.
    """
    if training.target_loss is None:
        raise BilensError("target_loss=None, expected the validation loss to compare at")
    names = [f"{config.mlp}-{config.attention}" for config in configs]
    for what, some in (("configs", names), ("seeds", seeds)):
        if not some or len(set(some)) < len(some):
            raise BilensError(f"{what}={list(some)}, expected at least one and none of them twice")
    tokens = training.batch_size * len(corpus.train[0]["input_ids"])
    curves = []
    for seed in seeds:
        for name, config in zip(names, configs, strict=True):
            one, folder = replace(training, seed=seed), run / f"{name}-seed{seed}"
            resume = is_begun(folder)
            _, history = train_language(config, corpus, one, folder, resume=resume, use_cpu=use_cpu)
            if PartialState().is_main_process:
                shutil.rmtree(folder / CHECKPOINTS, ignore_errors=True)
            found = pd.DataFrame([record for record in history if "eval_loss" in record])
            curve = pd.DataFrame(
                {
                    "mlp": config.mlp,
                    "attention": config.attention,
                    "d_hidden": config.d_hidden,
                    "parameters": count_parameters(config),
                    "seed": seed,
                    "steps": found["step"],
                    "tokens": found["step"] * tokens,
                    "seconds": found["seconds"],
                    "loss": found["eval_loss"],
                }
            )
            curves.append(curve)
            done(curve)
    return Comparison(corpus.name, training.target_loss, pd.concat(curves, ignore_index=True))


def _with_hidden(config: LanguageConfig, width: int) -> LanguageConfig:
    return LanguageConfig(**{**config.to_dict(), "d_hidden": width})
