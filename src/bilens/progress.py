"""Progress of long work: a bar in a terminal or notebook, or else a line every half minute.

Lines go to the logger "bilens", whose level is that of BILENS_VERBOSITY, or info. A program that
configures logging has them in its own handlers; otherwise they go to standard error.
"""

import logging
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any

from rich import progress
from rich.console import Console

from bilens.errors import BilensError

PACE = 30.0
"""Seconds between two lines."""


class _StandardError(logging.Handler):
    """Prints lines of a program that has configured no logging."""

    def emit(self, record: logging.LogRecord) -> None:
        # The stream of this moment: notebooks and tests exchange it.
        if not logging.getLogger().handlers and sys.stderr is not None:
            print(self.format(record), file=sys.stderr)  # noqa: T201


logger = logging.getLogger("bilens")
"""The logger of everything; only rank 0 of `torchrun` logs."""
logger.addFilter(lambda _: _is_first_process())
logger.addHandler(_StandardError())
try:
    logger.setLevel(os.environ.get("BILENS_VERBOSITY", "info").upper())
except ValueError as error:
    raise BilensError(
        f"BILENS_VERBOSITY={os.environ['BILENS_VERBOSITY']}, expected one of debug, info, warning, "
        "error, critical"
    ) from error


def progress_bar() -> progress.Progress:
    """Return a progress display on standard error; only rank 0 of `torchrun` shows it."""
    console = Console(stderr=True)
    columns = (
        progress.TextColumn("{task.description}"),
        progress.BarColumn(),
        progress.MofNCompleteColumn(),
        progress.TimeRemainingColumn(),
        progress.TextColumn("{task.fields[note]}"),
    )
    # Notebooks redraw a bar by ipywidgets, which Jupyter and Colab bring.
    notebook = console.is_jupyter and find_spec("ipywidgets") is not None
    is_drawn = console.is_terminal or notebook
    shown = is_drawn and _is_first_process() and logger.isEnabledFor(logging.INFO)
    return _Display(*columns, console=console, disable=not shown, transient=True)


class _Display(progress.Progress):
    """A bar where one can be drawn, or else lines at a steady pace."""

    last_line = time.monotonic()

    def start(self) -> None:
        self.last_line = time.monotonic()
        super().start()

    def update(self, task_id: progress.TaskID, **fields: Any) -> None:
        super().update(task_id, **fields)
        self._print_line(task_id)

    def advance(self, task_id: progress.TaskID, advance: float = 1) -> None:
        super().advance(task_id, advance)
        self._print_line(task_id)

    def _print_line(self, task_id: progress.TaskID) -> None:
        if not self.disable or time.monotonic() - self.last_line < PACE:
            return
        self.last_line = time.monotonic()
        task = next(task for task in self.tasks if task.id == task_id)
        total = "" if task.total is None else f" of {task.total:,.0f}"
        parts = [f"{task.completed:,.0f}{total}"]
        if task.time_remaining is not None:
            parts.append(f"about {task.time_remaining:,.0f} s left")
        parts += filter(None, [task.fields["note"]])
        logger.info("%s: %s", task.description, ", ".join(parts))


def _is_first_process() -> bool:
    return os.environ.get("RANK", "0") == "0"


@contextmanager
def no_progress() -> Iterator[None]:
    """Hide the bars of transformers for reading and writing a model's files."""
    from transformers.utils import logging  # noqa: PLC0415  it takes seconds to import

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()
