"""What every training through the Hugging Face Trainer needs: its bar, ctrl-C, its checkpoints."""

import json
import math
from pathlib import Path
from typing import Any

from rich.progress import Progress, TaskID
from transformers import TrainerCallback, TrainerControl, TrainerState

from bilens.errors import CheckpointError
from bilens.train.interrupt import Interrupt
from bilens.train.state import TRAINING_NAME

__all__ = ["CHECKPOINTS", "Watch", "checkpoint_to_resume", "last_checkpoint"]

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
    path = run / TRAINING_NAME
    if checkpoint is None or not path.is_file():
        raise CheckpointError(
            f"There is nothing to resume in {run}: no whole checkpoint below {CHECKPOINTS}. Train "
            "without --resume."
        )
    before = json.loads(path.read_text(encoding="utf-8"))
    for name in sorted(before.keys() | settings.keys()):
        if before.get(name) != settings.get(name):
            raise CheckpointError(
                f"{run} was trained with {name}={before.get(name)!r}, not "
                f"{settings.get(name)!r}. Resume with the same settings, or train elsewhere."
            )
    return checkpoint
