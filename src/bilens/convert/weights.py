"""Files of weights: safetensors, or dictionaries of tensors that torch wrote; and damaged files."""

import json
import os.path
from collections.abc import Iterator
from contextlib import contextmanager
from math import prod
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import safetensors
import torch
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor
from transformers.utils.hub import cached_file

from bilens.checks import FLOATS
from bilens.errors import CheckpointError, is_panic
from bilens.files import check_downloaded
from bilens.memory import MemoryLimitError, is_out_of_memory
from bilens.progress import no_progress

WEIGHT_FILES = (
    "model.safetensors",
    "model.safetensors.index.json",
    "pytorch_model.bin",
    "pytorch_model.bin.index.json",
)
"""Files of weights, in the order of preference; an index names the files that share them."""


def read_weights(source: str | Path, **place: Any) -> dict[str, Tensor]:
    """Return all weights of a checkpoint under the names in its files.

    Files that torch wrote are read with `weights_only=True`: tensors, and nothing that runs.

    Raises:
        CheckpointError: a file is missing or damaged, or holds something else.
    """
    path = _weights_file(source, **place)
    if path is None:
        expected = ", ".join(WEIGHT_FILES)
        raise CheckpointError(f"{source} holds no weights; expected one of {expected}")
    weights: dict[Any, Any] = {}
    for file in _shards(source, path, **place):
        weights |= _read(file)
    for key, value in weights.items():
        is_dense = isinstance(value, Tensor) and value.layout == torch.strided and not value.is_meta
        if not isinstance(key, str) or not is_dense or value.dtype not in FLOATS:
            raise CheckpointError(
                f"{path} holds {key!r}, {_described(value)}, expected names and dense tensors of "
                "floating-point numbers only. Save the model's state_dict() and nothing more."
            )
    return weights


def _read(path: Path) -> dict[Any, Any]:
    # What safetensors and torch.load raise for a damaged file.
    damage: tuple[type[Exception], ...] = (SafetensorError, UnpicklingError, EOFError)
    damage += (RuntimeError, LookupError, TypeError, ValueError, AttributeError)
    try:
        if path.suffix == ".safetensors":
            content: Any = load_file(path)
        else:
            content = torch.load(path, map_location="cpu", weights_only=True)
    except damage as error:
        if is_out_of_memory(error):
            raise
        raise CheckpointError(f"{path}: the weights cannot be read: {error}") from error
    if not isinstance(content, dict):
        raise CheckpointError(
            f"{path}: the weights cannot be read: a {type(content).__name__}, expected a "
            "dictionary of tensors"
        )
    return content


def _described(value: Any) -> str:
    if not isinstance(value, Tensor):
        return f"a {type(value).__name__}"
    kind = str(value.layout).removeprefix("torch.").replace("strided", "dense")
    return f"a {'meta' if value.is_meta else kind} tensor of {value.dtype}"


def stored_weights(source: str | Path, **place: Any) -> dict[str, tuple[int, str]] | None:
    """Return how many numbers each tensor of the safetensors files of a model has, and their type.

    They are those of the headers, such as "BF16". None if the model has no such files; opening it
    then raises.
    """
    path = _weights_file(source, **place)
    if path is None or not path.name.startswith("model.safetensors"):
        return None
    entries: dict[str, tuple[int, str]] = {}
    for shard in _shards(source, path, **place):
        with safetensors.safe_open(shard, "pt") as file:
            for key in file.keys():  # noqa: SIM118
                entry = file.get_slice(key)
                entries[key] = prod(entry.get_shape()), str(entry.get_dtype())
    return entries


def stored_tensors(
    source: str | Path, names: set[str] | None = None, **place: Any
) -> dict[str, Tensor]:
    """Return tensors of the safetensors files of a model by their names, or all of them."""
    path, tensors = _weights_file(source, **place), dict[str, Tensor]()
    for shard in [] if path is None else _shards(source, path, **place):
        with safetensors.safe_open(shard, "pt") as file:
            keys = set(file.keys())
            selection = keys if names is None else names & keys
            tensors |= {name: file.get_tensor(name) for name in selection}
    return tensors


def shard_names(index: Path) -> list[str]:
    """Return the names of the files that an index lists, which are in its folder.

    Raises:
        CheckpointError: it names a file elsewhere, or is damaged.
    """
    check_downloaded(index)
    try:
        names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
        elsewhere = [name for name in names if Path(name).name != name or name in ("", "..")]
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{index} is damaged and names no files: {error!r}") from error
    if elsewhere:
        raise CheckpointError(
            f"{index} names {elsewhere[0]!r}, expected files beside itself and none elsewhere"
        )
    return names


def _shards(source: str | Path, path: Path, **place: Any) -> list[Path]:
    """Return the files of an index, or the file itself."""
    if path.suffix != ".json":
        return [check_downloaded(path)]
    names = shard_names(path)
    try:
        paths = [Path(str(cached_file(str(source), name, **place))) for name in names]
    except OSError as error:
        raise CheckpointError(f"{source}: weights are missing: {error}") from error
    return [check_downloaded(path) for path in paths]


def _weights_file(source: str | Path, **place: Any) -> Path | None:
    for name in WEIGHT_FILES:
        try:
            path = stored_file(source, name, **place)
        except OSError as error:
            raise CheckpointError(f"{source}: weights are missing: {error}") from error
        if path is not None:
            return path
    return None


def stored_file(source: str | Path, name: str, **place: Any) -> Path | None:
    """Return the path of a file of a model, here or in the hub's cache; None if it has none."""
    path = cached_file(str(source), name, _raise_exceptions_for_missing_entries=False, **place)
    return None if path is None else Path(path)


MODEL = "language model"


@contextmanager
def reading_files(source: str | Path, what: str = MODEL) -> Iterator[None]:
    """Say that a file is damaged where transformers fails to read it; only around its calls."""
    try:
        with no_progress():
            yield
    except (CheckpointError, MemoryLimitError):
        raise
    except BaseException as error:
        # Errors that transformers raises for a damaged file: those of its libraries, of which
        # tokenizers has no class of its own, and those of its own code on values that do not fit.
        of_libraries = SafetensorError | StrictDataclassError | OSError | RuntimeError | ImportError
        of_values = ArithmeticError | ValueError | LookupError | TypeError | AttributeError
        tells_damage = isinstance(error, of_libraries | of_values | AssertionError)
        tells_damage |= type(error) is Exception or is_panic(error)
        if not tells_damage or is_out_of_memory(error):
            raise
        # Names of folders and of repositories look alike.
        is_here = os.path.exists(source)  # noqa: PTH110  pathlib raises for names that are too long
        where = "" if is_here else ", and none could be fetched from the hub by this name"
        message = " ".join(str(error).split())  # those of transformers have several lines
        raise CheckpointError(f"{source} holds no complete {what}{where}: {message}") from error


def complaints(report: dict[str, Any]) -> str:
    """Return the names in a loading report of transformers as text; empty if all weights fit."""
    wrong = {complaint: sorted(map(str, names)) for complaint, names in report.items() if names}
    return "; ".join(f"{complaint}: {names}" for complaint, names in wrong.items())
