"""The weights of other people's checkpoints as they were saved: in one file or several."""

import json
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor
from transformers.utils.hub import cached_file

from bilens.errors import CheckpointError

__all__ = ["WEIGHT_FILES", "read_weights", "shard_names"]

WEIGHT_FILES = (
    "model.safetensors",
    "model.safetensors.index.json",
    "pytorch_model.bin",
    "pytorch_model.bin.index.json",
)
"""Where weights may be, in the order of looking; an index names the files that share them."""
DAMAGED = (SafetensorError, UnpicklingError, RuntimeError, EOFError)
DAMAGED += (KeyError, TypeError, ValueError)  # type: ignore[assignment]


def read_weights(source: str | Path, **place: Any) -> dict[str, Tensor]:
    """All weights of a checkpoint under the names of those who saved it.

    Files that torch wrote are read with `weights_only=True`: tensors, and nothing that runs.

    Raises:
        CheckpointError: there are none, a file is missing, or damaged.
    """
    path = _first(source, **place)
    try:
        names = shard_names(path) if path.suffix == ".json" else [path.name]
        found: dict[Any, Any] = {}
        for name in names:
            found |= _read(Path(str(cached_file(str(source), name, **place))))
    except DAMAGED as error:
        raise CheckpointError(f"{path}: the weights cannot be read: {error}") from error
    except OSError as error:
        raise CheckpointError(f"{source}: weights are missing: {error}") from error
    strange = [name for name, weight in found.items() if not isinstance(weight, Tensor)]
    if strange:
        raise CheckpointError(
            f"{path} holds more than weights: {', '.join(map(str, strange[:5]))}. Save the model's "
            "state_dict() alone."
        )
    return found


def shard_names(index: Path) -> list[str]:
    """The files that an index names, which stand beside it.

    Raises:
        CheckpointError: it names a file elsewhere, or is damaged.
    """
    try:
        names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
        elsewhere = [name for name in names if Path(name).name != name or name in ("", "..")]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{index} is damaged and names no files: {error!r}") from error
    if elsewhere:
        raise CheckpointError(
            f"{index} names {elsewhere[0]!r}, expected files beside itself and none elsewhere"
        )
    return names


def _first(source: str | Path, **place: Any) -> Path:
    for name in WEIGHT_FILES:
        try:
            found = cached_file(
                str(source), name, _raise_exceptions_for_missing_entries=False, **place
            )
        except OSError as error:
            raise CheckpointError(f"{source}: weights are missing: {error}") from error
        if found is not None:
            return Path(found)
    raise CheckpointError(f"{source} holds no weights; expected one of {', '.join(WEIGHT_FILES)}")


def _read(path: Path) -> dict[Any, Any]:
    if path.suffix == ".safetensors":
        return load_file(path)
    return dict(torch.load(path, map_location="cpu", weights_only=True))
