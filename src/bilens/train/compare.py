"""Train several architectures on the same texts in the same order, as far as a target loss."""

import shutil
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pandas as pd
import torch
from accelerate import PartialState

from bilens.data import Corpus
from bilens.errors import BilensError
from bilens.nn.language import LanguageConfig, LanguageModel
from bilens.train.comparison import Comparison
from bilens.train.language import train_language
from bilens.train.language_settings import LanguageTraining
from bilens.train.run_directory import CHECKPOINTS, is_begun

__all__ = ["Comparison", "compare_architectures", "count_parameters", "of_equal_size", "variants"]


def variants(
    config: LanguageConfig, mlps: Sequence[str], attentions: Sequence[str]
) -> list[LanguageConfig]:
    """The model with every MLP and every attention, MLPs changing last.

    Args:
        config: all else that it is made of.
        mlps: names of MLPs.
        attentions: names of attentions.

    Raises:
        BilensError: a name is unknown, or does not fit the rest.
    """
    settings = config.to_dict()
    return [
        LanguageConfig(**{**settings, "mlp": mlp, "attention": attention})
        for mlp in mlps
        for attention in attentions
    ]


def of_equal_size(configs: Sequence[LanguageConfig]) -> list[LanguageConfig]:
    """The models with as many hidden units each as give it the parameters of the first.

    What one hidden unit more costs, parameters say themselves: they grow along a straight line.
    All end within half a unit in each block of the first.

    Args:
        configs: models of different parts.

    Raises:
        BilensError: the other parts of a model alone have more parameters than the first model.
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
    call is not trained again, and what was stopped goes on. Of a finished training its checkpoints
    are removed; the model stays.

    Args:
        configs: models that differ in MLP or attention.
        corpus: texts as token ids.
        training: how to train them all; its `target_loss` is where each training ends, at the
            latest after its `epochs`.
        run: the directory to write to, with one of `train_language` for each model and seed in it.
        seeds: of the initial weights and of the order of the texts.
        use_cpu: leave GPUs alone.
        done: is told of each training that has ended, by its rows of `Comparison.validations`.

    Raises:
        BilensError: there is no target, no architecture or no seed, one of them is there twice, or
            a model cannot be trained (see `train_language`).
        CheckpointError: `run` holds trainings with other settings.
        KeyboardInterrupt: ctrl-C, after a checkpoint was saved; the same call goes on from there.

    Source:
        The post on tensor-transformer variants, which compares at a loss of 3.0.
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
