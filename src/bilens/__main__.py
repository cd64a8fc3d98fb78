"""Entry point of the command `bilens`, and of `python -m bilens`, which torchrun needs."""

import atexit
import gc
import os
import sys
import threading


def main() -> None:
    """Run one command; exit with status 130 on ctrl-C, during imports too."""
    # Imports make a million objects that stay, and the collector would look through them again and
    # again, for a fifth of the time. It begins when the command does, and runs rarely.
    gc.disable()
    gc.set_threshold(100_000)
    try:
        from bilens.cli import main as run  # noqa: PLC0415
    except KeyboardInterrupt:
        sys.exit(130)
    try:
        run()
        sys.stdout.flush()
        sys.stderr.flush()
        end()
    except BrokenPipeError:
        # The reader, such as `head`, has enough: nothing is left to flush when Python ends.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(141)


def end() -> None:
    """End the process now: to free all objects of its imports takes Python a second or more.

    With threads that still work it ends as usual, when they do.
    """
    main_thread = threading.main_thread()
    if all(thread.daemon or thread is main_thread for thread in threading.enumerate()):
        atexit._run_exitfuncs()
        sys.stdout.flush()
        os._exit(0)


if __name__ == "__main__":
    main()
