"""Anneal a pretrained gated model into a bilinear one, through the Hugging Face Trainer."""

import json
import math
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch.nn.utils.rnn import pad_sequence
from transformers import (
    PreTrainedModel,
    PrinterCallback,
    Trainer,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    set_seed,
)

from bilens.checks import check_weights
from bilens.convert import Swish, give_swish, save_model
from bilens.data import Corpus
from bilens.errors import BilensError
from bilens.files import write_json, write_text
from bilens.nn.language.no_progress import no_progress
from bilens.progress import progress_bar
from bilens.train.anneal_settings import SCHEDULES, AnnealTraining
from bilens.train.classifier import METRICS_NAME
from bilens.train.interrupt import interrupt_between_steps
from bilens.train.state import TRAINING_NAME
from bilens.train.trainer import (
    Watch,
    check_vocabulary,
    checkpoint_to_resume,
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
    FSDP). Ctrl-C saves a checkpoint between two steps.

    Args:
        model: any causal language model whose MLPs are up(x) * activation(gate(x)). It is trained
            in place.
        corpus: texts in its tokens.
        training: how to train it.
        run: the directory to write to; checkpoints go below it.
        schedule: your own function from the share of the annealing that is done to the share of
            beta that is left, in the place of `training.schedule`.
        resume: go on from the last checkpoint in `run`.
        use_cpu: leave GPUs alone.

    Returns:
        The metrics as they were logged: the losses, each with the beta.

    Raises:
        BilensError: the model is not gated, the corpus does not fit it, the batch cannot be shared
            out evenly, or the loss is no longer finite.
        CheckpointError: a weight is NaN or infinite, or `resume` finds nothing it can go on from.
        KeyboardInterrupt: ctrl-C, after a checkpoint was saved.

    Source:
        Pearce et al. 2024, section 6.3 and appendix D.
    """
    check_weights(model)
    _check_corpus(model, corpus, training)
    settings = {"data": corpus.name, **asdict(training), "model": model.config.to_diff_dict()}
    if schedule is not None:
        settings["schedule"] = getattr(schedule, "__name__", repr(schedule))
    settings = json.loads(json.dumps(settings))
    checkpoint = checkpoint_to_resume(run, settings) if resume else None
    set_seed(training.seed)
    fall = _Fall(give_swish(model), schedule or SCHEDULES[training.schedule], training)
    model.config.use_cache = False
    with interrupt_between_steps() as interrupt, progress_bar() as bar, no_progress():
        trainer = _Annealer(
            model=model,
            args=trainer_arguments(
                training,
                run,
                use_cpu=use_cpu,
                max_steps=training.steps,
                lr_scheduler_type=DECAYS[training.decay],
                warmup_steps=training.warmup,
                optim="adamw_torch",
                activation_checkpointing=training.checkpointing,
                eval_strategy="steps",
                eval_steps=training.evaluate_every or training.steps,
            ),
            data_collator=_collate,
            train_dataset=corpus.train,
            eval_dataset=corpus.validation,
            processing_class=corpus.tokenizer,
            # The fall of beta comes first, so that whatever follows a step has the next beta.
            callbacks=[fall, Watch(interrupt, bar)],
        )
        trainer.swish = fall.swish
        trainer.remove_callback(PrinterCallback)
        if trainer.is_world_process_zero():
            write_json(run / TRAINING_NAME, settings)
        trainer.train(resume_from_checkpoint=str(checkpoint) if checkpoint else None)
    history: list[dict[str, Any]] = trainer.state.log_history
    if any(not math.isfinite(record.get("loss", 0.0)) for record in history):
        raise BilensError("The loss became infinite or NaN; lower learning_rate")
    if interrupt.requested:
        raise KeyboardInterrupt
    model.config.use_cache = True
    # Under FSDP each process holds a part of every weight, and all of them have to hand it over.
    state = trainer.accelerator.get_state_dict(trainer.model) if trainer.is_fsdp_enabled else None
    if trainer.is_world_process_zero():
        save_model(run, model, corpus.tokenizer, state)
        write_text(run / METRICS_NAME, "".join(json.dumps(record) + "\n" for record in history))
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
        self._set(state.global_step)

    def on_step_end(
        self, args: Any, state: TrainerState, control: TrainerControl, **rest: Any
    ) -> None:
        self._set(state.global_step)
        if state.global_step >= state.max_steps:
            control.should_log = control.should_evaluate = True

    def _set(self, step: int) -> None:
        self.swish.beta = self.start * self.schedule(min(1.0, step / self.steps))


class _Annealer(Trainer):
    """The Trainer, whose records hold the beta."""

    swish: Swish

    def log(self, logs: dict[str, float], *rest: Any, **named: Any) -> None:
        super().log({**logs, "beta": self.swish.beta}, *rest, **named)


def _collate(rows: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    texts = [row["input_ids"] for row in rows]
    # Padding stands behind the text, which does not see it, and has no loss.
    labels = pad_sequence(texts, batch_first=True, padding_value=IGNORED)
    return {"input_ids": labels.clamp_min(0), "labels": labels}


def _check_corpus(model: PreTrainedModel, corpus: Corpus, training: AnnealTraining) -> None:
    check_vocabulary(corpus, model.config.vocab_size)
    if len(corpus.train) < training.batch_size:
        raise BilensError(
            f"{corpus.name} has {len(corpus.train)} texts to train on, fewer than the "
            f"batch_size={training.batch_size}; give more text, or a smaller batch"
        )
