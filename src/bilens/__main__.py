"""Entry point of the command `bilens`, and of `python -m bilens`, which torchrun needs."""

import gc
import os
import signal
import sys
from itertools import count
from types import FrameType
from typing import Any

_LATER = count()


def _interrupt(signum: int, frame: FrameType | None) -> None:
    """Raise KeyboardInterrupt behind the imports: some libraries take it for a missing module."""
    while frame is not None and not frame.f_code.co_filename.startswith("<frozen importlib"):
        frame = frame.f_back
    # At most 5 seconds later, should an import be the program of a user.
    if frame is None or not hasattr(signal, "setitimer") or next(_LATER) >= 100:
        raise KeyboardInterrupt
    _interrupt_later()


def _interrupt_later() -> None:
    signal.signal(signal.SIGALRM, _interrupt)
    signal.setitimer(signal.ITIMER_REAL, 0.05)


def _on_unraisable(unraisable: Any) -> None:
    """Raise KeyboardInterrupt again, if it came where none can be raised, as in __del__."""
    if issubclass(unraisable.exc_type, KeyboardInterrupt) and hasattr(signal, "setitimer"):
        _interrupt_later()
    else:
        sys.__unraisablehook__(unraisable)


def main() -> None:
    """Run one command; exit with status 130 on ctrl-C, during imports too."""
    # Not if ctrl-C is ignored, as of a command in the background of a script.
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _interrupt)
        sys.unraisablehook = _on_unraisable
    # Imports make a million objects that stay: 0.8 s of the 9.2 s of `bilens eigenvectors`.
    gc.set_threshold(100_000)
    try:
        from bilens.cli import main as run  # noqa: PLC0415

        try:
            run()
        finally:
            if sys.stdout is not None:
                sys.stdout.flush()
    except KeyboardInterrupt:
        sys.exit(130)
    except OSError as error:
        # Nothing is left to flush when Python ends. A reader such as `head` has enough of it.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        is_read = isinstance(error, BrokenPipeError)
        sys.exit(141 if is_read else f"error: standard output: {error.strerror}")


if __name__ == "__main__":
    main()
