"""Where commands print: text from a model's files is shown and never obeyed by the terminal."""

import re
from collections.abc import Iterable
from typing import Any

from rich.console import Console
from rich.segment import Segment

__all__ = ["errors", "out", "printable"]

UNPRINTABLE = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]"
)
"""What moves the cursor, starts an escape sequence or turns text around, and halves of pairs.

Tabs and line ends stay.
"""


def printable(text: str) -> str:
    r"""A text with what a terminal would obey written out: `\x1b[2J` instead of an empty screen."""
    return UNPRINTABLE.sub(lambda found: ascii(found[0])[1:-1], text)


class PlainConsole(Console):
    """A console that puts no control character on the terminal but its own."""

    def render(self, *args: Any, **kwargs: Any) -> Iterable[Segment]:
        """The parts of what is printed; Rich's own colours are kept apart from their text."""
        for part in super().render(*args, **kwargs):
            yield part if part.control else part._replace(text=printable(part.text))


out, errors = PlainConsole(), PlainConsole(stderr=True)
