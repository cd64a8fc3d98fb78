"""The processes of `torchrun`: which of them this is, and how it leaves the others."""

import atexit
import gc
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from bilens.errors import BilensError
from bilens.lazy_imports import accelerate


def this_process(cpu: bool = False) -> "accelerate.PartialState":
    """Return accelerate's state of this process, and leave the group when Python ends."""
    atexit.unregister(_leave_group)
    atexit.register(_leave_group)
    # Without a GPU accelerate starts a group only if it is told to use the CPU.
    return accelerate.PartialState(cpu=cpu or not torch.accelerator.is_available())


def from_main_process(call: Callable[[], Any]) -> Any:
    """Return the result of a call in the main process to all of them; its BilensError too.

    The others would wait forever for what is never opened.
    """
    message: list[Any] = [None]
    if this_process().is_main_process:
        try:
            message = [call()]
        except BilensError as error:
            message = [error]
    accelerate.utils.broadcast_object_list(message)
    if isinstance(message[0], BilensError):
        raise message[0]
    return message[0]


@contextmanager
def others_are_needed(remedy: str) -> Iterator[None]:
    """Say in a line, with a remedy, if this process cannot go on because another one has ended."""
    try:
        yield
    except RuntimeError as error:
        # gloo has no class of its own for it, and names the peer; NCCL's errors have one.
        lost = isinstance(error, torch.distributed.DistError) or re.search(
            "(closed|reset) by peer|Broken pipe|Timed out waiting", str(error)
        )
        if not lost or not torch.distributed.is_initialized():
            raise
        raise BilensError(
            "Another process of this training has ended, and none can go on alone. Its own "
            f"message, if it had time for one, says why. {remedy}"
        ) from error


def _leave_group() -> None:
    if torch.distributed.is_initialized():
        # A thread of the group that outlives Python may crash the process. Threads end with the
        # last reference to the group, and trainings that are garbage still have some.
        gc.collect()
        torch.distributed.destroy_process_group()
