"""Train language models: one, or several architectures on the same texts down to a target loss."""

import math
import shutil
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from torch import nn

from bilens.data import Corpus
from bilens.errors import BilensError
from bilens.nn.language import LanguageConfig, LanguageModel
from bilens.processes import this_process
from bilens.train.run_directory import CHECKPOINTS, is_begun
from bilens.train.settings import LanguageTraining, check_precision
from bilens.train.trainer import (
    alone_with_seed,
    check_vocabulary,
    run_trainer,
    steps_per_epoch,
    trainer_arguments,
)

MUON = "muon"


def train_language(
    config: LanguageConfig,
    corpus: Corpus,
    training: LanguageTraining,
    run: Path,
    *,
    resume: bool = False,
    use_cpu: bool = False,
) -> tuple[LanguageModel, list[dict[str, Any]]]:
    """Train a language model on `corpus` and save it with its tokenizer in `run`.

    Under `torchrun` or `accelerate launch` every process calls this function, and the Trainer
    shares the batches out (DDP, FSDP). The result is that of one process within the rounding of
    sums. Ctrl-C saves a checkpoint between two steps. `resume` of a finished training returns its
    result.

    Args:
        config: architecture and sizes; its ids of text ends and padding become the tokenizer's.
        corpus: texts as token ids.
        training: settings of the training.
        run: the directory to write to; checkpoints go below it.
        resume: resume from the newest intact checkpoint in `run`.
        use_cpu: ignore GPUs.

    Returns:
        The trained model in evaluation mode, and the logged metrics. Each record has the seconds
        of its steps, without validations and checkpoints.

    Raises:
        BilensError: the corpus does not fit the model, the batch cannot be shared out evenly, or
            the training diverged.
        CheckpointError: `run` holds a training and `resume` is False, or no training and it is
            True.
        KeyboardInterrupt: ctrl-C, after a checkpoint was saved.
    """
    check_precision(config.attention, training.precision)
    check_vocabulary(corpus, config.vocab_size)
    length = len(corpus.train[0]["input_ids"])
    if length > config.n_ctx:
        raise BilensError(
            f"The texts of {corpus.name} are {length} tokens long; the model has "
            f"n_ctx={config.n_ctx}"
        )
    with alone_with_seed(training.seed):
        arguments = trainer_arguments(
            training,
            run,
            use_cpu=use_cpu,
            lr_scheduler_type="linear",
            # The Trainer requires a name that it knows even if it is handed an optimizer.
            optim="adamw_torch" if training.optimizer == MUON else training.optimizer,
        )
        steps = steps_per_epoch(arguments, corpus)
        # Rounded, as 0.3 times 10 is a little more than 3.
        arguments.max_steps = math.ceil(round(training.epochs * steps, 6))
        arguments.eval_steps = training.evaluate_every or steps
        settings = {"data": corpus.name, **asdict(training), "model": config.settings()}
        names = ("bos_token_id", "eos_token_id", "pad_token_id")
        tokens = {name: getattr(corpus.tokenizer, name) for name in names}
        texts = min(training.evaluate_texts or len(corpus.validation), len(corpus.validation))
        model = LanguageModel(LanguageConfig(**{**config.to_dict(), **tokens}))
        muon = None
        if training.optimizer == MUON:
            rates = {"lr": training.learning_rate, "weight_decay": training.weight_decay}
            muon = MuonWithAdamW(model, **rates)
        history = run_trainer(
            model,
            corpus,
            settings,
            run,
            arguments,
            resume=resume,
            target=training.target_loss,
            eval_dataset=corpus.validation.select(range(texts)),
            optimizers=(muon, None),
        )
    return model.eval(), history  # type: ignore[no-untyped-call]


class MuonWithAdamW(torch.optim.Optimizer):
    """Muon for the matrices inside the blocks, and AdamW for all other weights, as one optimizer.

        W <- (1 - lr decay) W - 0.2 sqrt(max(n_out, n_in)) lr U V',  momentum = U S V'

    U V' has all singular values equal, so a step is equally large in all directions. It comes from
    torch's Muon, which approximates it by five Newton-Schulz iterations in bfloat16. The factor
    makes the step as large as one of AdamW, so that both share one learning rate and one schedule.
    AdamW trains embeddings, unembedding, norms and biases. Gains and biases do not decay.

    Args:
        model: the model to train.
        lr: learning rate.
        weight_decay: weight decay of matrices, embeddings and the unembedding.

    Source: Jordan 2024, *Muon*; the factor: Liu et al. 2025, *Muon is Scalable for LLM Training*.
    """

    def __init__(self, model: LanguageModel, *, lr: float, weight_decay: float) -> None:
        matrices = [weight for weight in model.blocks.parameters() if weight.ndim == 2]
        inside = set(matrices)
        outside = [weight for weight in model.parameters() if weight not in inside]
        self.muon = torch.optim.Muon(
            matrices, lr=lr, weight_decay=weight_decay, adjust_lr_fn="match_rms_adamw"
        )
        self.adamw = torch.optim.AdamW(
            [
                _group([weight for weight in outside if weight.ndim > 1], weight_decay),
                _group([weight for weight in outside if weight.ndim == 1], 0.0),
            ],
            lr=lr,
        )
        super().__init__([*self.muon.param_groups, *self.adamw.param_groups], {})

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take a step of both optimizers."""
        loss = None if closure is None else closure()
        # Loading a state replaces the groups and the state of this object: share them again.
        self.muon.param_groups, self.adamw.param_groups = (
            self.param_groups[:1],
            self.param_groups[1:],
        )
        self.muon.state = self.adamw.state = self.state
        self.muon.step()
        self.adamw.step()
        return loss


def _group(weights: list[nn.Parameter], weight_decay: float) -> dict[str, Any]:
    return {"params": weights, "weight_decay": weight_decay}


ARCHITECTURE = ["mlp", "attention", "d_hidden", "parameters"]
"""Columns that identify an architecture."""
COST = ["steps", "tokens", "seconds"]
"""Columns with the cost of a training up to a row."""
SEED = [*ARCHITECTURE, "seed"]


@dataclass(frozen=True, eq=False)
class Comparison:
    """Architectures trained on the same texts in the same order.

    Attributes:
        data: name of the corpus.
        target: the validation loss to reach, in nats a token.
        validations: a row for each validation of each training, in order. The columns are the
            architecture (`mlp`, `attention`, `d_hidden`, `parameters`), `seed`, `steps` of the
            optimizer, trained `tokens`, `seconds` without validations and checkpoints, and `loss`.
    """

    data: str
    target: float
    validations: pd.DataFrame

    def crossings(self) -> pd.DataFrame:
        """Return the cost of each training until its loss first reached the target, else NaN.

        Costs are interpolated linearly between two validations.
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
        """Return the mean over seeds of each validation that all seeds had, by architecture."""
        number = self.validations.groupby(SEED, sort=False).cumcount().rename("number")
        groups = self.validations.groupby([*ARCHITECTURE, number], sort=False)
        mean, seeds = groups[[*COST, "loss"]].mean(), groups.size()
        complete = seeds == seeds.groupby(ARCHITECTURE, sort=False).transform("max")
        return mean[complete].sort_index(level="number", sort_remaining=False).reset_index()

    def summary(self) -> pd.DataFrame:
        """Return a row for each architecture, in order.

        The columns after the architecture's are:

        - `seeds`, and how many of them `reached` the target.
        - `steps`, `tokens` and `seconds`: mean costs up to the target.
        - `deviation`: standard deviation of the steps.
        - `steps_ratio` and `seconds_ratio`: relative to the first architecture.
        - `seconds_per_step`.
        - `best`: mean of the seeds' smallest losses.

        Costs and ratios are NaN unless every seed reached the target: a mean over the others would
        be too small.
        """
        crossings = self.crossings().groupby(ARCHITECTURE, sort=False)
        table = crossings[COST].agg(lambda values: values.mean(skipna=False))
        table["deviation"] = crossings["steps"].agg(lambda values: values.std(skipna=False))
        table["seeds"], table["reached"] = crossings.size(), crossings["steps"].count()
        table["steps_ratio"] = table["steps"] / table["steps"].iloc[0]
        table["seconds_ratio"] = table["seconds"] / table["seconds"].iloc[0]
        trainings = self.validations.groupby(SEED, sort=False)
        last = trainings.last()
        pace = last["seconds"] / last["steps"]
        table["seconds_per_step"] = pace.groupby(ARCHITECTURE, sort=False).mean()
        table["best"] = trainings["loss"].min().groupby(ARCHITECTURE, sort=False).mean()
        return table.reset_index()


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
    resized = []
    for config in configs:
        narrow, wider = (count_parameters(_with_hidden(config, width)) for width in (1, 2))
        width = round((goal - narrow) / (wider - narrow)) + 1
        if width < 1:
            raise BilensError(
                f"equal_parameters: with {config.mlp} MLP and {config.attention} attention the "
                f"model has {narrow:,} parameters with a single hidden unit, more than the "
                f"{goal:,} of the first architecture; make d_hidden larger"
            )
        resized.append(_with_hidden(config, width))
    return resized


def count_parameters(config: LanguageConfig) -> int:
    """Return the number of parameters of a model, without allocating it."""
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

    With one seed all of them see the same batches in the same order. Finished trainings of an
    earlier call are reused and stopped ones are resumed. A finished training keeps its model;
    its checkpoints are removed.

    Args:
        configs: models that differ in MLP or attention.
        corpus: texts as token ids.
        training: settings of all trainings; each ends at `target_loss` or after `epochs`.
        run: the directory to write to; each model and seed has its own directory in it.
        seeds: seeds of the initial weights and of the order of the texts.
        use_cpu: ignore GPUs.
        done: called after each training with its rows of `Comparison.validations`.

    Raises:
        BilensError: target, architectures or seeds are missing or repeated, or a model cannot be
            trained (see `train_language`).
        CheckpointError: `run` holds trainings with other settings.
        KeyboardInterrupt: ctrl-C, after a checkpoint was saved; the same call resumes from it.

    Source: The post on tensor-transformer variants, which compares at a loss of 3.0.
    """
    if training.target_loss is None:
        raise BilensError("target_loss=None, expected the validation loss to compare at")
    names = [f"{config.mlp}-{config.attention}" for config in configs]
    for argument, values in (("configs", names), ("seeds", seeds)):
        if not values or len(set(values)) < len(values):
            raise BilensError(
                f"{argument}={list(values)}, expected at least one and none of them twice"
            )
    tokens = training.batch_size * len(corpus.train[0]["input_ids"])
    curves = []
    for seed in seeds:
        for name, config in zip(names, configs, strict=True):
            settings, folder = replace(training, seed=seed), run / f"{name}-seed{seed}"
            _, history = train_language(
                config, corpus, settings, folder, resume=is_begun(folder), use_cpu=use_cpu
            )
            if this_process().is_main_process:
                shutil.rmtree(folder / CHECKPOINTS, ignore_errors=True)
            records = pd.DataFrame([record for record in history if "eval_loss" in record])
            curve = pd.DataFrame(
                {
                    "mlp": config.mlp,
                    "attention": config.attention,
                    "d_hidden": config.d_hidden,
                    "parameters": count_parameters(config),
                    "seed": seed,
                    "steps": records["step"],
                    "tokens": records["step"] * tokens,
                    "seconds": records["seconds"],
                    "loss": records["eval_loss"],
                }
            )
            curves.append(curve)
            done(curve)
    return Comparison(corpus.name, training.target_loss, pd.concat(curves, ignore_index=True))


def _with_hidden(config: LanguageConfig, width: int) -> LanguageConfig:
    return LanguageConfig(**{**config.to_dict(), "d_hidden": width})
