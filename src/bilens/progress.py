"""Progress of long work: a bar in a terminal or notebook, or else lines in the log.

Lines go to the logger "bilens", whose level is that of BILENS_VERBOSITY, or info. A program that
configures logging has them in its own handlers; otherwise they go to standard error.
"""

import logging
import os
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from importlib import import_module
from importlib.util import find_spec
from io import StringIO
from typing import Any

from tqdm.std import tqdm

from bilens.errors import BilensError

FIRST, PACE = 5.0, 30.0
"""Seconds before the first line, and between two."""


class _StandardError(logging.Handler):
    """Prints lines of a program that has configured no logging."""

    def emit(self, record: logging.LogRecord) -> None:
        # The stream of this moment: notebooks and tests exchange it.
        if not logging.getLogger().handlers and sys.stderr is not None:
            print(self.format(record), file=sys.stderr)  # noqa: T201


logger = logging.getLogger("bilens")
"""The logger of everything; only rank 0 of `torchrun` logs."""
logger.addFilter(lambda _: is_first_process())
logger.addHandler(_StandardError())
try:
    logger.setLevel(os.environ.get("BILENS_VERBOSITY", "info").upper())
except ValueError as error:
    raise BilensError(
        f"BILENS_VERBOSITY={os.environ['BILENS_VERBOSITY']}, expected one of debug, info, warning, "
        "error, critical"
    ) from error


def progress_bar(
    name: str, items: Iterable[Any] | None = None, *, total: float | None = None
) -> Any:
    """Return a bar of tqdm on standard error, around `items` if there are some.

    Only rank 0 of `torchrun` shows it. Where none can be drawn it logs lines.
    """
    is_shown = is_first_process() and logger.isEnabledFor(logging.INFO)
    # Each step counts, since one may take minutes; what takes less than a second shows no bar.
    settings = {
        "desc": name,
        "total": total,
        "leave": False,
        "disable": not is_shown,
        "miniters": 1,
        "delay": FIRST / 5,
    }
    if is_drawn_in_notebook():
        return import_module("tqdm.notebook").tqdm(items, **settings)
    if sys.stderr is not None and sys.stderr.isatty():
        return tqdm(items, dynamic_ncols=True, **settings)
    settings["delay"] = FIRST
    return _Lines(items, file=StringIO(), mininterval=FIRST, **settings)


def is_drawn_in_notebook() -> bool:
    """Return True in a notebook that can redraw a bar, by ipywidgets."""
    return "ipykernel" in sys.modules and find_spec("ipywidgets") is not None


class _Lines(tqdm):
    """A bar as lines of the log, the first after 5 seconds.

    `tqdm.contrib.logging` does the opposite: it prints the lines of a log above a bar.
    """

    monitor_interval = 0  # no thread: there is nothing to redraw

    def __iter__(self) -> Iterator[Any]:
        """Yield the items; that of tqdm counts some twice after its pace has changed."""
        with self:
            for item in self.iterable:
                yield item
                self.update()

    def display(self, msg: str | None = None, pos: int | None = None) -> None:
        """Log a line; tqdm calls it at its pace, and with an empty message at the end."""
        if msg is not None:
            return
        self.mininterval = PACE
        count = f"{self.n:,.0f}" if self.total is None else f"{self.n:,.0f} of {self.total:,.0f}"
        parts = [count]
        if self.total is not None and self.n > self.initial:
            seconds = (self.total - self.n) * self.format_dict["elapsed"] / (self.n - self.initial)
            parts.append(f"about {seconds:,.0f} s left")
        logger.info("%s: %s", self.desc, ", ".join(filter(None, [*parts, self.postfix])))


def is_first_process() -> bool:
    """Return True but for the other processes of `torchrun`."""
    return os.environ.get("RANK", "0") == "0"


@contextmanager
def no_progress() -> Iterator[None]:
    """Hide the bars of transformers for reading and writing a model's files."""
    from transformers.utils import logging  # noqa: PLC0415  it takes seconds to import

    is_shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if is_shown:
            logging.enable_progress_bar()
