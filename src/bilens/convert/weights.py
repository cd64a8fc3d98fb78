"""The weights of other people's checkpoints: read as they were saved, put under bilens's names."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers.utils.hub import cached_file

from bilens.checks import check_weights
from bilens.errors import CheckpointError

__all__ = ["WEIGHT_FILES", "Row", "fill", "out_of_memory", "read_weights", "shard_names"]

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
        if out_of_memory(error):
            raise
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


def out_of_memory(error: Exception) -> bool:
    """Whether an error says that the machine is too small, and nothing of a file."""
    return isinstance(error, torch.OutOfMemoryError) or "allocate memory" in str(error)


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


@dataclass(frozen=True)
class Row:
    """A row of a key table.

    Attributes:
        theirs: name of one of their weights.
        ours: names of its parts in bilens, which stand in it one above the other.
        change: what becomes of each part, its shape aside.
    """

    theirs: str
    ours: tuple[str, ...]
    change: Callable[[Tensor], Tensor] = lambda weight: weight


def fill(
    model: nn.Module, weights: Mapping[str, Tensor], rows: Sequence[Row], source: str | Path
) -> None:
    """Give a model other people's weights, all of them and nothing else.

    The model is on the meta device. What they lack does nothing here: gains of norms are 1,
    biases 0. All are in the widest dtype among them.

    Raises:
        CheckpointError: a weight is missing, unknown, of another shape, NaN or infinite.
    """
    known = {row.theirs for row in rows}
    for complaint, names in (
        ("unknown", weights.keys() - known),
        ("missing", known - weights.keys()),
    ):
        if names:
            raise CheckpointError(
                f"{source}: {complaint} weights: {', '.join(sorted(names))}. They do not fit "
                "config.json, or the model is of another kind."
            )
    dtype = reduce(torch.promote_types, (weight.dtype for weight in weights.values()))
    shapes = {name: weight.shape for name, weight in model.state_dict().items()}
    state = {
        name: part
        for row in rows
        for name, part in _parts(row, weights[row.theirs].to(dtype), shapes, source).items()
    }
    for name in shapes.keys() - state.keys():
        if name.endswith(("norm.weight", ".bias")):
            value = 0.0 if name.endswith("bias") else 1.0
            state[name] = torch.full(shapes[name], value, dtype=dtype)
    model.load_state_dict(state, assign=True)
    check_weights(model)


def _parts(
    row: Row, weight: Tensor, shapes: Mapping[str, torch.Size], source: str | Path
) -> dict[str, Tensor]:
    # A number of its own is saved without an axis.
    whole = weight[None] if weight.ndim == 0 else weight
    first, rows = shapes[row.ours[0]], [shapes[name][0] for name in row.ours]
    if whole.shape != (sum(rows), *first[1:]):
        raise CheckpointError(
            f"{source}: {row.theirs} has shape {tuple(weight.shape)}, expected "
            f"{(sum(rows), *first[1:])}"
        )
    # Parts of one matrix are copied, so that no two weights share their memory.
    parts = [part.clone() for part in whole.split(rows)] if len(rows) > 1 else [whole]
    return {name: row.change(part) for name, part in zip(row.ours, parts, strict=True)}
