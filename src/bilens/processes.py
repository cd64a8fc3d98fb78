"""The processes of `torchrun`: which of them this is, and how it leaves the others."""

import atexit
import gc
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
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


@contextmanager
def taking_turns(doing: str) -> Iterator[tuple[int, int]]:
    """Yield the number of this process and that of all, and at the end wait for the others.

    Raises:
        BilensError: another process has ended before.
    """
    if int(os.environ.get("WORLD_SIZE") or 1) == 1:
        yield 0, 1
        return
    state = this_process()
    # Of gloo, which needs no GPU. Turns may take days, as no step of a training does.
    group = torch.distributed.new_group(backend="gloo", timeout=timedelta(days=30))
    yield state.process_index, state.num_processes
    try:
        torch.distributed.barrier(group)
    except RuntimeError as error:
        raise BilensError(
            f"Another process of {doing} has ended. Its own message, if it had time for one, says "
            "why. Start the same command again: it goes on from here"
        ) from error


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


def _leave_group() -> None:
    if torch.distributed.is_initialized():
        # A thread of the group that outlives Python may crash the process. Threads end with the
        # last reference to the group, and trainings that are garbage still have some.
        gc.collect()
        torch.distributed.destroy_process_group()
