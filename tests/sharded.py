"""The work of each of two processes that share out the weights; see test_two_processes.py.

accelerate shards on GPUs only. Torch does so on a CPU too, so these processes say that they have a
GPU each, and compute on the CPU.
"""

import os
import sys
from pathlib import Path
from typing import Any

from accelerate import PartialState
from accelerate.utils import DistributedType

from bilens.train.trainer import ResumableTrainer
from tests.two_processes import tensorise_gated

os.environ |= {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2"}
os.environ |= {"FSDP_AUTO_WRAP_POLICY": "NO_WRAP", "FSDP_STATE_DICT_TYPE": "FULL_STATE_DICT"}
enter, train = PartialState.__init__, ResumableTrainer.train


def with_gpu(state: PartialState, *args: Any, **options: Any) -> None:
    enter(state, *args, **options)
    if state.distributed_type == DistributedType.MULTI_CPU:
        state.distributed_type = DistributedType.MULTI_GPU


def sharded(trainer: ResumableTrainer, **options: Any) -> Any:
    # After a validation the weights are whole again, until the next step.
    assert trainer.is_fsdp_enabled
    return train(trainer, **options)


if __name__ == "__main__":
    PartialState.__init__ = with_gpu  # type: ignore[method-assign]
    ResumableTrainer.train = sharded  # type: ignore[method-assign, assignment]
    tensorise_gated(Path(sys.argv[1]))
