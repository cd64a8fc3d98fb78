"""What several commands share: their arguments, and the device."""

from pathlib import Path
from typing import Annotated

import torch
import tyro

from bilens.errors import BilensError

__all__ = ["DataDir", "ModelName", "RunDir", "choose_device"]

DataDir = Path | None
ModelName = Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="MODEL")]
RunDir = Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="RUN")]


def choose_device(name: str) -> torch.device:
    """A device by its name; auto takes a GPU where there is one.

    Raises:
        BilensError: there is no such device here.
    """
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        raise BilensError(f"--device={name} cannot be used here: {reason}") from error
    return device
