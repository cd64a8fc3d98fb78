"""The strongest paths of a model in a file, which says what model and search they are of."""

import hashlib
from collections.abc import Sequence
from pathlib import Path

import safetensors
import torch
from safetensors import SafetensorError

from bilens.files import write_safetensors
from bilens.tensor import BilinearTensor, Paths, TopPaths
from bilens.tensor.exact import exact

__all__ = ["PATHS_NAME", "load_paths", "save_paths"]

PATHS_NAME = "paths.safetensors"
"""Of the file in a run directory."""

FIELDS = {
    "directions": "directions",
    "roots": "classes",
    "indices": "indices",
    "eigenvalues": "eigenvalues",
    "vectors": "vectors",
}
"""Names in `Paths`, and in the file."""


@exact
def save_paths(path: Path, search: TopPaths, tensors: Sequence[BilinearTensor]) -> None:
    """Write what a search has found: safetensors, with the effective eigenvalues beside it.

    Raises:
        CheckpointError: the system refuses.
    """
    paths = search.paths
    found = {name: getattr(paths, field) for field, name in FIELDS.items()}
    metadata = {
        "of": _fingerprint(tensors),
        "constant": str(paths.constant),
        "expanded": str(search.expanded),
        "total": str(search.total),
    }
    write_safetensors(path, {**found, "effective": paths.effective}, metadata)


@exact
def load_paths(path: Path, tensors: Sequence[BilinearTensor], k: int) -> TopPaths | None:
    """The k first paths that `save_paths` has written, or None.

    None where there is no file, it is of another model, or has fewer.
    """
    try:
        with safetensors.safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            if metadata.get("of") != _fingerprint(tensors):
                return None
            device = tensors[0].left.device
            found = {field: file.get_tensor(name).to(device) for field, name in FIELDS.items()}
    except (OSError, SafetensorError):
        return None
    paths = Paths(**found, constant=metadata["constant"] == "True")
    if len(paths) < k:
        return None
    return TopPaths(paths.truncate(k), int(metadata["expanded"]), int(metadata["total"]))


def _fingerprint(tensors: Sequence[BilinearTensor]) -> str:
    """Of the weights, to the bit."""
    digest = hashlib.sha256()
    for tensor in tensors:
        for factor in (tensor.left, tensor.right, tensor.out):
            digest.update(f"{tuple(factor.shape)} {factor.dtype} {tensor.constant}".encode())
            digest.update(factor.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
