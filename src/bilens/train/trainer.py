"""What trainings through the Hugging Face Trainer share: settings, bar, ctrl-C, checkpoints."""

import json
import math
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from rich.progress import Progress, TaskID
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from bilens.data import Corpus
from bilens.errors import BilensError, CheckpointError
from bilens.train.anneal_settings import AnnealTraining
from bilens.train.interrupt import Interrupt
from bilens.train.language_settings import LanguageTraining
from bilens.train.state import TRAINING_NAME

__all__ = [
    "CHECKPOINTS",
    "Watch",
    "check_settings",
    "check_vocabulary",
    "checkpoint_to_resume",
    "last_checkpoint",
    "trainer_arguments",
]

CHECKPOINTS = "checkpoints"


class Watch(TrainerCallback):
    """Shows how far the training is; ends it on ctrl-C and when the loss is no longer finite."""

    def __init__(self, interrupt: Interrupt, bar: Progress) -> None:
        self.interrupt, self.bar = interrupt, bar
        self.task: TaskID = bar.add_task("training", note="")

    def on_train_begin(
        self, args: Any, state: TrainerState, control: TrainerControl, **rest: Any
    ) -> None:
        """Show how many steps there are, and how many of them are done already."""
        self.bar.update(self.task, total=state.max_steps, completed=state.global_step)

    def on_step_end(
        self, args: Any, state: TrainerState, control: TrainerControl, **rest: Any
    ) -> None:
        """Show the step; save and stop if ctrl-C was pressed in it."""
        self.bar.update(self.task, completed=state.global_step)
        if self.interrupt.requested:
            control.should_save = control.should_training_stop = True

    def on_log(self, args: Any, state: TrainerState, control: TrainerControl, **rest: Any) -> None:
        """Show the loss; stop where it is no number."""
        for name in ("loss", "eval_loss"):
            if name in rest["logs"]:
                self.bar.update(self.task, note=f"{name} {rest['logs'][name]:.4f}")
        if not math.isfinite(rest["logs"].get("loss", 0.0)):
            control.should_training_stop = True


def trainer_arguments(
    training: LanguageTraining | AnnealTraining, run: Path, *, use_cpu: bool, **own: Any
) -> TrainingArguments:
    """What the Trainer is told, the batch shared out over its processes.

    Args:
        training: the settings that every training has.
        run: the directory that checkpoints go below.
        use_cpu: leave GPUs alone.
        own: what one kind of training has besides: its length, schedule and evaluations.

    Raises:
        BilensError: the tracker is not installed, or the batch cannot be shared out evenly.
    """
    tracker = training.report_to
    if tracker != "none" and find_spec(tracker) is None:
        raise BilensError(
            f"report_to={tracker!r} needs the package {tracker}: pip install {tracker}, or leave "
            "report_to out; the metrics are in metrics.jsonl anyway"
        )
    arguments = TrainingArguments(
        output_dir=str(run / CHECKPOINTS),
        learning_rate=training.learning_rate,
        weight_decay=training.weight_decay,
        gradient_accumulation_steps=training.accumulate,
        bf16=training.precision == "bf16",
        fp16=training.precision == "fp16",
        seed=training.seed,
        save_strategy="steps",
        save_steps=training.save_every,
        save_total_limit=2,
        logging_steps=training.log_every,
        logging_nan_inf_filter=False,
        report_to=tracker,
        use_cpu=use_cpu,
        dataloader_drop_last=True,
        dataloader_pin_memory=torch.cuda.is_available() and not use_cpu,
        ddp_find_unused_parameters=False,
        disable_tqdm=True,
        **own,
    )
    share, rest = divmod(training.batch_size, arguments.world_size * training.accumulate)
    if rest or not share:
        raise BilensError(
            f"batch_size={training.batch_size} cannot be shared out evenly over "
            f"{arguments.world_size} processes in accumulate={training.accumulate} parts"
        )
    arguments.per_device_train_batch_size = arguments.per_device_eval_batch_size = share
    return arguments


def check_vocabulary(corpus: Corpus, vocab_size: int) -> None:
    """Raise if a corpus may hold tokens that a model has not.

    Raises:
        BilensError: its tokenizer has more tokens than the model.
    """
    size = len(corpus.tokenizer)
    if size > vocab_size:
        raise BilensError(
            f"The tokenizer of {corpus.name} has {size} tokens; the model has "
            f"vocab_size={vocab_size}"
        )


def last_checkpoint(run: Path) -> Path | None:
    """The latest whole checkpoint below `run`; a half-written one has no trainer_state.json."""
    whole = [path.parent for path in (run / CHECKPOINTS).glob("checkpoint-*/trainer_state.json")]
    return max(whole, key=lambda path: int(path.name.split("-")[-1]), default=None)


def checkpoint_to_resume(run: Path, settings: dict[str, Any]) -> Path:
    """The checkpoint to go on from, of a training with the same settings.

    Raises:
        CheckpointError: there is none, or the settings were others.
    """
    checkpoint = last_checkpoint(run)
    if checkpoint is None or not (run / TRAINING_NAME).is_file():
        raise CheckpointError(
            f"There is nothing to resume in {run}: no whole checkpoint below {CHECKPOINTS}. Train "
            "without --resume."
        )
    check_settings(run, settings)
    return checkpoint


def check_settings(run: Path, settings: dict[str, Any]) -> None:
    """Raise if a run was trained with others.

    Raises:
        CheckpointError: they differ.
    """
    before = json.loads((run / TRAINING_NAME).read_text(encoding="utf-8"))
    for name in sorted(before.keys() | settings.keys()):
        if before.get(name) != settings.get(name):
            raise CheckpointError(
                f"{run} was trained with {name}={before.get(name)!r}, not "
                f"{settings.get(name)!r}. Resume with the same settings, or train elsewhere."
            )
