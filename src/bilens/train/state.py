"""What a step of training depends on, as one file of a checkpoint without pickle."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from bilens.files import write_safetensors

__all__ = ["load_state", "part", "save_state"]

STATE_NAME = "training_state.safetensors"


def save_state(folder: Path, record: Mapping[str, Any], **parts: Mapping[str, Tensor]) -> None:
    """Write named tensors in parts, and a record such as JSON holds them."""
    tensors = {f"{kind}.{name}": t for kind, part in parts.items() for name, t in part.items()}
    write_safetensors(folder / STATE_NAME, tensors, {"record": json.dumps(record)})


def load_state(folder: Path, device: torch.device) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The record, and the tensors by part and name."""
    with safe_open(folder / STATE_NAME, "pt", str(device)) as file:
        # Copied, as the memory of a mapped file is aligned otherwise, and sums would differ.
        tensors = {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118
        return json.loads(file.metadata()["record"]), tensors


def part(tensors: Mapping[str, Tensor], kind: str) -> dict[str, Tensor]:
    """The tensors of one part by their names."""
    start = f"{kind}."
    return {name.removeprefix(start): t for name, t in tensors.items() if name.startswith(start)}
