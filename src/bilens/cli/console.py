"""Arguments that several commands share, and the device."""

import os
from pathlib import Path
from typing import Annotated

import torch
import tyro

from bilens.models import check_device

DataDir = Path | None
ModelName = Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="MODEL")]
RunDir = Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="RUN")]
Device = Annotated[
    str, tyro.conf.arg(help="auto takes a GPU if the machine has one; cpu, cuda:1, ...")
]


def choose_device(name: str) -> torch.device:
    """Return a device by its name; auto takes a GPU if the machine has one.

    Raises:
        BilensError: this machine has no such device.
    """
    if name == "auto":
        # Under torchrun each process has a device of its own.
        local = int(os.environ.get("LOCAL_RANK", "0"))
        if torch.cuda.is_available():
            return torch.device("cuda", local % torch.cuda.device_count())
        return torch.device("cpu")
    return check_device(name, "--device")
