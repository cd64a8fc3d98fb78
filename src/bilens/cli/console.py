"""What several commands share: where they print, the device, and the run they open."""

import json
from pathlib import Path
from typing import Annotated, Any

import torch
import tyro
from rich.console import Console

from bilens.errors import BilensError, CheckpointError
from bilens.train import TRAINING_NAME

__all__ = ["DataDir", "ModelName", "RunDir", "choose_device", "out", "read_training"]

out = Console()
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


def read_training(run: Path) -> dict[str, Any]:
    """What a run was trained on and with.

    Raises:
        CheckpointError: it does not say.
    """
    path = run / TRAINING_NAME
    try:
        settings = json.loads(path.read_text(encoding="utf-8"))
        settings["data"]
    except (OSError, json.JSONDecodeError, KeyError, TypeError) as error:
        raise CheckpointError(
            f"{path} is missing or damaged, so the data that {run} was trained on is unknown; "
            "expected a directory that `bilens train` wrote"
        ) from error
    found: dict[str, Any] = settings
    return found
