"""Anneal a pretrained gated model into a bilinear one, through the Hugging Face Trainer."""

from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedModel, TrainerCallback, TrainerControl, TrainerState

from bilens.checks import check_weights
from bilens.convert import Swish, give_swish
from bilens.data import Corpus
from bilens.train.anneal_settings import SCHEDULES, AnnealTraining
from bilens.train.trainer import (
    alone_with_seed,
    check_vocabulary,
    run_trainer,
    steps_per_epoch,
    trainer_arguments,
)

__all__ = ["AnnealTraining", "anneal"]

IGNORED = -100
DECAYS = {"none": "constant_with_warmup", "linear": "linear", "cosine": "cosine"}


def anneal(
    model: PreTrainedModel,
    corpus: Corpus,
    training: AnnealTraining,
    run: Path,
    *,
    schedule: Callable[[float], float] | None = None,
    resume: bool = False,
    use_cpu: bool = False,
) -> list[dict[str, Any]]:
    """Train a gated model while the beta of its Swish falls to 0, and save it in `run`.

        beta(step) = beta_0 schedule(step / (annealing * steps)),  beta_0 = 1 (SiLU), 1.702 (GELU)

    The beta is set before each step and after the last one; it follows from the number of the step
    alone, so a resumed training has the same. Started by `torchrun` or `accelerate launch`, every
    process calls this, and the Trainer shares the batches out in the way that it was told to (DDP,
    FSDP). Ctrl-C saves a checkpoint between two steps. An annealing that has ended is not trained
    again: `resume` then gives what it found.

    Args:
        model: any causal language model whose MLPs are up(x) * activation(gate(x)). It is trained
            in place.
        corpus: texts in its tokens.
        training: how to train it.
        run: the directory to write to; checkpoints go below it.
        schedule: your own function from the share of the annealing that is done to the share of
            beta that is left, in place of `training.schedule`.
        resume: go on from the newest whole checkpoint in `run`.
        use_cpu: leave GPUs alone.

    Returns:
        The metrics as they were logged: the losses, each with the beta.

    Raises:
        BilensError: the model is not gated, the corpus does not fit it, the batch cannot be shared
            out evenly, or the training diverged.
        CheckpointError: a weight is NaN or infinite; `run` holds a training and `resume` was not
            asked for; `resume` finds nothing it can go on from; or the system refuses.
        KeyboardInterrupt: ctrl-C, after a checkpoint was saved.

    Source:
        Pearce et al. 2024, section 6.3 and appendix D.
    """
    check_weights(model)
    check_vocabulary(corpus, model.config.vocab_size)
    with alone_with_seed(training.seed):
        arguments = trainer_arguments(
            training,
            run,
            use_cpu=use_cpu,
            max_steps=training.steps,
            lr_scheduler_type=DECAYS[training.decay],
            optim="adamw_torch",
            activation_checkpointing=training.checkpointing,
        )
        steps_per_epoch(arguments, corpus)
        arguments.eval_steps = training.evaluate_every or training.steps
        shape = model.config.to_diff_dict()
        shape.pop("transformers_version", None)
        settings = {"data": corpus.name, **asdict(training), "model": shape}
        if schedule is not None:
            settings["schedule"] = getattr(schedule, "__name__", repr(schedule))
        fall = _Fall(give_swish(model), schedule or SCHEDULES[training.schedule], training)
        history = run_trainer(
            model,
            corpus,
            settings,
            run,
            arguments,
            resume=resume,
            extra=lambda: {"beta": fall.swish.beta},
            data_collator=_collate,
            eval_dataset=corpus.validation,
            # The fall of beta comes first, so that whatever follows a step has the next beta.
            callbacks=[fall],
        )
    fall.set(training.steps)
    model.eval()
    return history


class _Fall(TrainerCallback):
    """Sets beta for the step that comes."""

    def __init__(
        self, swish: Swish, schedule: Callable[[float], float], training: AnnealTraining
    ) -> None:
        self.swish, self.schedule = swish, schedule
        self.start, self.steps = swish.beta, training.annealing * training.steps

    def on_train_begin(
        self, args: Any, state: TrainerState, control: TrainerControl, **rest: Any
    ) -> None:
        self.set(state.global_step)

    def on_step_end(
        self, args: Any, state: TrainerState, control: TrainerControl, **rest: Any
    ) -> None:
        self.set(state.global_step)

    def set(self, step: int) -> None:
        self.swish.beta = self.start * self.schedule(min(1.0, step / self.steps))


def _collate(rows: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    texts = [row["input_ids"] for row in rows]
    # Padding stands behind the text, which does not see it, and has no loss.
    labels = pad_sequence(texts, batch_first=True, padding_value=IGNORED)
    return {"input_ids": labels.clamp_min(0), "labels": labels}
