"""The processes of `torchrun`, and how they part."""

import atexit
import gc

import torch

from bilens.lazy_imports import accelerate


def processes(cpu: bool = False) -> "accelerate.PartialState":
    """Return this process among all of them, and leave their group when Python ends.

    Args:
        cpu: ignore GPUs. Without it processes on a machine that has none would work alone.
    """
    atexit.unregister(_leave)
    atexit.register(_leave)
    return accelerate.PartialState(cpu=cpu or not torch.accelerator.is_available())


def _leave() -> None:
    if torch.distributed.is_initialized():
        # A thread of the group that outlives Python ends the process with an error. Threads end
        # with the last reference to the group, and trainings that are garbage still have some.
        gc.collect()
        torch.distributed.destroy_process_group()
