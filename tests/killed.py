"""The work of two processes, the second of which is killed; see test_two_processes.py."""

import os
import signal
import sys
from pathlib import Path
from typing import Any

from bilens.errors import BilensError
from bilens.processes import this_process
from bilens.train.language import train_language
from bilens.train.trainer import ResumableTrainer
from tests.models import small_config, small_corpus
from tests.two_processes import TRAINING

step = ResumableTrainer.training_step


def last_step(trainer: ResumableTrainer, *args: Any, **options: Any) -> Any:
    if trainer.state.global_step == 3 and this_process().process_index == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return step(trainer, *args, **options)


if __name__ == "__main__":
    ResumableTrainer.training_step = last_step  # type: ignore[method-assign]
    try:
        train_language(small_config(), small_corpus(), TRAINING, Path(sys.argv[1]), use_cpu=True)
    except BilensError as error:
        sys.exit(f"Error: {error}")
