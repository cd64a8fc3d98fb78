"""Ctrl-C between two steps instead of in the middle of one."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

__all__ = ["Interrupt", "interrupt_between_steps"]


class Interrupt:
    """Whether ctrl-C was pressed."""

    requested = False


@contextmanager
def interrupt_between_steps() -> Iterator[Interrupt]:
    """Turn ctrl-C into a request that the loop inside the block looks at between steps.

    A second ctrl-C interrupts at once. Outside of the main thread nothing changes, since Python
    delivers signals there alone.
    """
    interrupt = Interrupt()
    if threading.current_thread() is not threading.main_thread():
        yield interrupt
        return

    def note(number: int, frame: FrameType | None) -> None:
        if interrupt.requested:
            raise KeyboardInterrupt
        interrupt.requested = True

    before = signal.signal(signal.SIGINT, note)
    try:
        yield interrupt
    finally:
        signal.signal(signal.SIGINT, before)
