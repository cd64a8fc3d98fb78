"""The processes of `torchrun`: which of them this is, and how it leaves the others."""

import atexit
import gc

import torch

from bilens.lazy_imports import accelerate


def this_process(cpu: bool = False) -> "accelerate.PartialState":
    """Return accelerate's state of this process, and leave the group when Python ends.

    Args:
        cpu: ignore GPUs.
    """
    atexit.unregister(_leave_group)
    atexit.register(_leave_group)
    # Without a GPU accelerate starts a group only if it is told to use the CPU.
    return accelerate.PartialState(cpu=cpu or not torch.accelerator.is_available())


def _leave_group() -> None:
    if torch.distributed.is_initialized():
        # A thread of the group that outlives Python may crash the process. Threads end with the
        # last reference to the group, and trainings that are garbage still have some.
        gc.collect()
        torch.distributed.destroy_process_group()
