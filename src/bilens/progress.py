"""How far long work is: a bar in a terminal or notebook, else a line every half a minute."""

import os
import time
from importlib.util import find_spec
from typing import Any

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
)

__all__ = ["progress_bar", "tell"]

PACE = 30.0
"""Seconds between two lines."""


def progress_bar() -> Progress:
    """A progress display on standard error.

    Of the processes that `torchrun` starts, the first alone shows anything.
    """
    console = Console(stderr=True)
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[note]}"),
    )
    # Notebooks redraw a bar by ipywidgets, which Jupyter and Colab bring.
    notebook = console.is_jupyter and find_spec("ipywidgets") is not None
    shown = _is_first_process() and (console.is_terminal or notebook)
    return _Display(*columns, console=console, disable=not shown, transient=True)


def tell(text: str) -> None:
    """Say something to the person who waits, on standard error and once for all processes."""
    if _is_first_process():
        Console(stderr=True).print(text, markup=False, highlight=False, soft_wrap=True)


class _Display(Progress):
    """A bar where one can be drawn; lines at a steady pace where there is no place for it."""

    told = time.monotonic()

    def start(self) -> None:
        self.told = time.monotonic()
        super().start()

    def update(self, task_id: TaskID, **fields: Any) -> None:
        super().update(task_id, **fields)
        self._tell(task_id)

    def advance(self, task_id: TaskID, advance: float = 1) -> None:
        super().advance(task_id, advance)
        self._tell(task_id)

    def _tell(self, task_id: TaskID) -> None:
        if not self.disable or time.monotonic() - self.told < PACE:
            return
        self.told = time.monotonic()
        task = self._tasks[task_id]
        whole = "" if task.total is None else f" of {task.total:,.0f}"
        parts = [f"{task.completed:,.0f}{whole}"]
        if task.time_remaining is not None:
            parts.append(f"about {task.time_remaining:,.0f} s left")
        tell(f"{task.description}: {', '.join([*parts, *filter(None, [task.fields['note']])])}")


def _is_first_process() -> bool:
    return os.environ.get("RANK", "0") == "0"
