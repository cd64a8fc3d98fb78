"""Arguments that several commands share, and the device."""

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro

from bilens.errors import BilensError

if TYPE_CHECKING:
    import torch

DataDir = Path | None
ModelName = Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="MODEL")]
RunDir = Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="RUN")]
Device = Annotated[
    str, tyro.conf.arg(help="auto takes a GPU if the machine has one; cpu, cuda:1, ...")
]


def choose_device(name: str) -> "torch.device":
    """Return a device by its name; auto takes a GPU if the machine has one.

    Raises:
        BilensError: this machine has no such device.
    """
    import torch

    from bilens.models import check_device

    if name == "auto":
        # Under torchrun each process has a device of its own.
        local = int(os.environ.get("LOCAL_RANK", "0"))
        if torch.cuda.is_available():
            return torch.device("cuda", local % torch.cuda.device_count())
        return torch.device("cpu")
    return check_device(name, "--device")


def is_own(path: Path) -> bool:
    """Return True for a file of bilens, and for a folder with one, in it or in folders of it."""
    if path.name in (
        "training.json",
        "processing.json",
        "spectra.json",
        "comparison.json",
        "stages",
    ):
        return True
    if path.is_dir():
        visible = (entry for entry in path.iterdir() if not entry.name.startswith("."))
        return any(map(is_own, visible))
    if path.suffix == ".html" or path.name == "README.md":
        with path.open("rb") as file:
            return b"bilens" in file.read(2000)
    return False


def check_own(path: Path, page: Path | None = None) -> None:
    """Raise unless a path that nobody named is new, an empty folder, or was written by bilens.

    Args:
        path: the path.
        page: the page that it belongs to, if it lies beside one, which says who wrote it.

    Raises:
        BilensError: the path holds something else.
    """
    is_free = not any(path.iterdir()) if path.is_dir() else not path.exists()
    if not is_free and not ((page or path).exists() and is_own(page or path)):
        raise BilensError(
            f"{path} exists, and bilens did not write it; move it, or choose another --output"
        )
