"""The console of the commands: the terminal shows text from a model's files and never obeys it.

Colours and frames are for terminals; NO_COLOR takes the colours away.
"""

import re
from collections.abc import Iterable, Sequence
from typing import Any

from rich import box
from rich.console import Console
from rich.segment import Segment
from rich.table import Table


def printable(text: str) -> str:
    r"""Return a text with control characters written out: `\x1b[2J` instead of an empty screen."""
    # Characters that move the cursor, start an escape sequence or reverse text, and halves of
    # pairs. Tabs and line ends stay.
    unprintable = "[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]"
    return re.sub(unprintable, lambda match: ascii(match[0])[1:-1], text)


class PlainConsole(Console):
    """A console that puts no control character on the terminal but its own."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**{"markup": False, "highlight": False, "soft_wrap": True, **settings})
        if "width" not in settings and not self.is_terminal:
            # Pipes and files get whole lines, which tools can split, however long they are.
            self.width = 100_000

    def render(self, *args: Any, **kwargs: Any) -> Iterable[Segment]:
        """Return the printed segments; Rich's own colours are separate from their text."""
        for part in super().render(*args, **kwargs):
            yield part if part.control else part._replace(text=printable(part.text))


out, errors = PlainConsole(), PlainConsole(stderr=True)


def show_table(
    header: Sequence[str],
    rows: Iterable[Sequence[str]],
    title: str = "",
    *,
    words: int | Sequence[bool] = 1,
) -> None:
    """Print cells under a header: in a frame, or as plain columns without a terminal.

    Args:
        header: one name for each column.
        rows: their cells.
        title: above the table.
        words: how many columns hold words, which come first, or whether each does; words are at
            the left of their column, numbers at the right.
    """
    framed = out.is_terminal
    table = Table(box=box.HEAVY_HEAD if framed else None, pad_edge=framed)
    for number, name in enumerate(header):
        is_word = number < words if isinstance(words, int) else words[number]
        justify = "left" if is_word else "right"
        table.add_column(name, justify=justify, overflow="fold")  # type: ignore[arg-type]
    for row in rows:
        table.add_row(*row)
    if title:
        out.print(title)
    out.print(table)
