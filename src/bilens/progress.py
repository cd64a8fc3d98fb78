"""Progress bars: what is being done, how far, how long still; silent when nobody watches."""

import sys

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
)

__all__ = ["progress_bar"]


def progress_bar() -> Progress:
    """A progress display on standard error, off when standard output is no terminal."""
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[note]}"),
        console=Console(stderr=True),
        disable=not sys.stdout.isatty(),
        transient=True,
    )
