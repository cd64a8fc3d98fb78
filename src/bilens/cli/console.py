"""The console of the commands, arguments that several of them share, and the device.

The terminal shows text from a model's files and never obeys it. Colours and frames are for
terminals; NO_COLOR takes the colours away.
"""

import os
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro
from rich import box
from rich.console import Console
from rich.segment import Segment
from rich.table import Table

from bilens.errors import BilensError

if TYPE_CHECKING:
    import torch


def printable(text: str) -> str:
    r"""Return a text with control characters written out: `\x1b[2J` instead of an empty screen."""
    # Characters that move the cursor, start an escape sequence or reverse text, and halves of
    # pairs. Tabs and line ends stay.
    unprintable = "[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]"
    return re.sub(unprintable, lambda match: ascii(match[0])[1:-1], text)


class PlainConsole(Console):
    """A console that puts no control character on the terminal but its own."""

    def __init__(self, **settings: Any) -> None:
        plain: dict[str, Any] = {"markup": False, "highlight": False, "soft_wrap": True}
        if os.environ.get("NO_COLOR"):
            plain["color_system"] = None  # nor bold letters, which rich leaves
        super().__init__(**{**plain, **settings})
        if "width" not in settings and not self.is_terminal:
            # Pipes and files get whole lines, which tools can split, however long they are.
            self.width = 100_000

    def render(self, *args: Any, **kwargs: Any) -> Iterable[Segment]:
        """Return the printed segments; Rich's own colours are separate from their text."""
        for part in super().render(*args, **kwargs):
            yield part if part.control else part._replace(text=printable(part.text))

    def on_broken_pipe(self) -> None:
        """Go on without a reader, such as `head`, that has enough: files are yet to be written."""
        os.dup2(os.open(os.devnull, os.O_WRONLY), self.file.fileno())


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
    rows, has_frame = list(rows), out.is_terminal
    table = Table(box=box.HEAVY_HEAD if has_frame else None, pad_edge=has_frame)
    for i, name in enumerate(header):
        is_word = i < words if isinstance(words, int) else words[i]
        justify = "left" if is_word else "right"
        table.add_column(name, justify=justify, overflow="fold")  # type: ignore[arg-type]
    for row in rows:
        table.add_row(*row)
    if title:
        out.print(title)
    columns = zip(header, *rows, strict=True)
    longest = [max(map(len, " ".join(cells).split()), default=0) for cells in columns]
    if has_frame and sum(longest) + 3 * len(longest) + 1 > out.width:
        # Too narrow for the longest word of each column: a line for each row.
        for row in rows:
            cells = zip(header, row, strict=True)
            pairs = ", ".join(f"{name} {cell}" for name, cell in cells if cell)
            out.print(pairs, soft_wrap=False)
    else:
        out.print(table)


MODEL_HELP = (
    "run directory, folder or name of a model of a known family, .gguf file, or story, the model "
    "that comes with bilens."
)
ModelName = Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="MODEL", help=MODEL_HELP)]
PRETRAINED_HELP = (
    "folder of a Hugging Face or bilens model, the name of a repository, or a .gguf file."
)
PretrainedName = Annotated[ModelName, tyro.conf.arg(help=PRETRAINED_HELP)]
RunDir = Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="RUN")]
DEVICE_HELP = "auto takes a GPU if the machine has one; cpu, cuda:1, ..."
Device = Annotated[str, tyro.conf.arg(help=DEVICE_HELP)]
TRAINING_DEVICE_HELP = "auto takes a GPU if the machine has one; cpu ignores it."
TrainingDevice = Annotated[Literal["auto", "cpu"], tyro.conf.arg(help=TRAINING_DEVICE_HELP)]
TEXT_DIR_HELP = (
    "folder that holds tinystories; by default the environment variable BILENS_DATA, and without "
    "that the Hugging Face hub."
)
TextDir = Annotated[Path | None, tyro.conf.arg(help=TEXT_DIR_HELP)]


def choose_device(name: str) -> "torch.device":
    """Return a device by its name; auto takes a GPU if the machine has one."""
    import torch

    from bilens.models import check_device

    if name == "auto":
        # Under torchrun each process has a device of its own.
        local = int(os.environ.get("LOCAL_RANK", "0"))
        if torch.cuda.is_available():
            return torch.device("cuda", local % torch.cuda.device_count())
        return torch.device("cpu")
    return check_device(name, "--device", ("auto",))


def is_own(path: Path) -> bool:
    """Return True for a file of bilens, and for a folder with one, in it or in folders of it."""
    records = ("training.json", "processing.json", "comparison.json")
    if path.name in (*records, "stages"):
        return True
    if path.is_dir():
        visible = (entry for entry in path.iterdir() if not entry.name.startswith("."))
        return any(map(is_own, visible))
    if path.suffix == ".html" or path.name == "README.md":
        with path.open("rb") as file:
            return b"bilens" in file.read(2000)
    return False


def is_empty(path: Path) -> bool:
    """Return True for a file that is not there, or holds nothing."""
    return not path.exists() or (path.is_file() and not path.stat().st_size)


def check_own(path: Path, page: Path | None = None) -> None:
    """Raise unless a page, or a path that nobody named, is new, empty, or was written by bilens.

    `page` is the page that the path belongs to, if it lies beside one, which says who wrote it. A
    shell makes the file that standard output goes to before anything runs.
    """
    is_free = not any(path.iterdir()) if path.is_dir() else is_empty(path)
    if not is_free and not ((page or path).exists() and is_own(page or path)):
        raise BilensError(
            f"{path} exists, and bilens did not write it; move it, or choose another --output"
        )


def own_place(output: Path | None, default: str | Path, *, resume: bool = False) -> Path:
    """Return where a command writes: `output`, or a default place that is new or of bilens."""
    if output is None and not resume:
        check_own(Path(default))
    return output or Path(default)
