"""How long a training has taken, without its validations and checkpoints, over all its parts."""

import time
from typing import Any, cast

import torch
from transformers import TrainerCallback, TrainerControl, TrainerState

__all__ = ["Clock"]

NAME = "Clock"


class Clock(TrainerCallback):
    """Adds up the seconds from step to step and writes them into every record of the metrics.

    A checkpoint keeps them, so that a training that goes on counts on.
    """

    def on_train_begin(
        self, args: Any, state: TrainerState, control: TrainerControl, **rest: Any
    ) -> None:
        """Start from what the checkpoint says."""
        # What a checkpoint keeps; its annotation is that of what it is made from.
        self.kept = cast(dict[str, Any], state.stateful_callbacks)
        self.seconds = self.kept.get(NAME, {"seconds": 0.0})["seconds"]
        self.since = time.perf_counter()

    def on_step_end(
        self, args: Any, state: TrainerState, control: TrainerControl, **rest: Any
    ) -> None:
        """Count the step, and on a GPU wait for it where something follows that is not counted."""
        if torch.cuda.is_available() and (control.should_evaluate or control.should_save):
            torch.cuda.synchronize()
        now = time.perf_counter()
        self.seconds += now - self.since
        self.since = now
        self.kept[NAME] = {"seconds": self.seconds}

    def on_log(self, args: Any, state: TrainerState, control: TrainerControl, **rest: Any) -> None:
        """Write the seconds into the record."""
        state.log_history[-1]["seconds"] = self.seconds

    def on_evaluate(
        self, args: Any, state: TrainerState, control: TrainerControl, **rest: Any
    ) -> None:
        """Leave the validation out."""
        self.since = time.perf_counter()

    def on_save(self, args: Any, state: TrainerState, control: TrainerControl, **rest: Any) -> None:
        """Leave the checkpoint out."""
        self.since = time.perf_counter()
