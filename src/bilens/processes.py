"""The processes of `torchrun`: which of them this is, and how it leaves the others.

accelerate's own calls give up when a group has waited for half an hour, and do not tell the others
of an error in one process.
"""

import atexit
import gc
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import cache
from typing import Any, TypeVar

import torch

from bilens.errors import BilensError
from bilens.lazy_imports import accelerate

Result = TypeVar("Result")


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
    turn = this_turn()
    group = None if turn[1] == 1 else _joined()
    yield turn
    if group is not None:
        with _waiting_for_others(doing, "; it goes on from here"):
            torch.distributed.barrier(group)


def this_turn() -> tuple[int, int]:
    """Return the number of this process of `torchrun`, and that of all; 0 and 1 without it."""
    count = int(os.environ.get("WORLD_SIZE") or 1)
    return int(os.environ.get("RANK") or 0) % count, count


def in_all_processes(
    doing: str, call: Callable[[], Result], *, divided: bool = True
) -> list[Result]:
    """Return the result of a call in each process, in their order, to all of them.

    It is that of this process alone without others, or where the work is not divided.

    Raises:
        BilensError: that of the first process with one, or another process has ended before.
    """
    count = this_turn()[1]
    if count == 1 or not divided:
        return [call()]
    # Before the call, which may take longer in one than another waits to meet it.
    group, outcomes = _joined(), list[Any]([None] * count)
    own: tuple[Result | None, BilensError | None]
    try:
        own = call(), None
    except BilensError as error:
        own = None, error
    with _waiting_for_others(doing):
        torch.distributed.all_gather_object(outcomes, own, group)
    for _, problem in outcomes:
        if problem is not None:
            raise problem
    return [result for result, _ in outcomes]


@contextmanager
def _waiting_for_others(task: str, remedy: str = "") -> Iterator[None]:
    """Say in this block that another process has ended."""
    try:
        yield
    except RuntimeError as error:
        raise BilensError(
            f"Another process of {task} has ended. Its own message, if it had time for one, says "
            f"why. Start the same command again{remedy}"
        ) from error


@cache
def _joined() -> Any:
    """Return the group of all processes, which stays until Python ends."""
    this_process()
    # Of gloo, which needs no GPU. Work may take days, as no step of a training does.
    return torch.distributed.new_group(backend="gloo", timeout=timedelta(days=30))


def from_main_process(call: Callable[[], Any]) -> Any:
    """Return the result of a call in the main process to all of them; its BilensError too.

    The others would wait forever for what is never opened.
    """
    is_first = this_turn()[0] == 0
    return in_all_processes("this command", call if is_first else lambda: None)[0]


def _leave_group() -> None:
    _joined.cache_clear()
    if torch.distributed.is_initialized():
        # A thread of the group that outlives Python may crash the process. Threads end with the
        # last reference to the group, and trainings that are garbage still have some.
        gc.collect()
        torch.distributed.destroy_process_group()
