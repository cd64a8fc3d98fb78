"""What the weights of a classifier of several layers say about its classes."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import safetensors
import torch
from safetensors import SafetensorError

from bilens.checks import full_precision
from bilens.data import ImageData
from bilens.errors import BilensError
from bilens.files import write_safetensors
from bilens.lazy_imports import pd
from bilens.nn import ImageClassifier
from bilens.read.shared import SharedFeatures, shared_by_paths
from bilens.reading import Fact, Percent, Reading
from bilens.tensor import BilinearTensor, LazyTree, Paths, TopPaths, top_paths
from bilens.tensor.chain import make_chain

__all__ = ["PATHS_NAME", "DeepReading", "load_paths", "path_accuracies", "read_deep", "save_paths"]

PATHS_NAME = "paths.safetensors"
"""Of the file in a run directory."""

FIELDS = ("directions", "roots", "indices", "eigenvalues", "vectors")
"""What of `Paths` is in the file."""

STOPS = (1, 3, 10, 30, 100, 300, 1000, 3000, 10_000, 30_000, 100_000)


@dataclass(frozen=True, eq=False, repr=False)
class DeepReading(Reading):
    """The strongest eigenvector paths of a classifier, and how far they go on a test set.

    Attributes:
        search: the best paths over all classes, and how much of the tree finding them took.
        tree: of the model, whose nodes are decomposed when they are asked for.
        accuracy: of the model on the test images.
        by_paths: (number of paths, accuracy of the pruned tree), ascending.
        shared: features that paths of more than one class end at.
    """

    model: ImageClassifier
    data: ImageData
    search: TopPaths
    tree: LazyTree
    accuracy: float
    by_paths: tuple[tuple[int, float], ...]
    shared: SharedFeatures

    axes: ClassVar[dict[str, str]] = TopPaths.axes

    def facts(self) -> list[Fact]:
        """Return data, accuracy and the paths."""
        return [
            ("data", self.data.name),
            ("test accuracy", Percent(self.accuracy)),
            ("width", self.model.config.d_model),
            *self.search.facts(),
        ]

    def frame(self) -> "pd.DataFrame":
        """A row for each path."""
        return self.search.frame()

    def record(self) -> dict[str, Any]:
        """The numbers, for JSON."""
        return {
            "data": self.data.name,
            "accuracy": self.accuracy,
            "accuracy_by_paths": [list(pair) for pair in self.by_paths],
            "nodes_expanded": self.search.expanded,
            "nodes_total": self.search.total,
            "shared_features": len(self.shared.features),
            "shared_weight": self.shared.weight,
        }


@full_precision
@torch.no_grad()
def path_accuracies(
    paths: Paths, data: ImageData, counts: Sequence[int]
) -> tuple[tuple[int, float], ...]:
    """Test accuracy of the tree pruned to its best 1, 3, 10, ... paths over all classes.

    Raises:
        BilensError: the paths are not of one direction for each class.
    """
    if paths.batch_shape != (data.n_classes,):
        raise BilensError(
            f"paths have directions of batch shape {tuple(paths.batch_shape)}; expected one for "
            f"each of the {data.n_classes} classes"
        )
    found = []
    for k in counts:
        right = paths.truncate(k)(data.test_images).argmax(-1) == data.test_labels
        found.append((k, float(right.double().mean())))
    return tuple(found)


@full_precision
@torch.no_grad()
def read_deep(
    model: ImageClassifier, data: ImageData, k: int = 1000, saved: Path | None = None
) -> DeepReading:
    """Find the k best eigenvector paths over all classes, and measure the model that they make.

    On the device of the model, which the data is moved to, or on the CPU if that has no float64.
    Where there are fewer paths, all of them are found; where `saved` is a file of `save_paths` that
    is of this model and holds enough of them, it is taken instead of a search.

    Raises:
        NotBilinearError: a gate is not linear, or there is a norm.
        BilensError: the model is not a classifier of bilens, or k is not positive.
    """
    model = model.readable()
    data, directions = data.to(model.device), torch.eye(data.n_classes, device=model.device)
    tensors = model.tensors()
    k = min(k, make_chain(tensors, directions).n_leaves)
    search = (saved and load_paths(saved, tensors, k)) or top_paths(tensors, directions, k)
    found = len(search.paths)
    counts = [stop for stop in STOPS if stop < found] + [found]
    return DeepReading(
        model=model,
        data=data,
        search=search,
        tree=LazyTree(tensors, directions),
        accuracy=model.accuracy(data.test_images, data.test_labels),
        by_paths=path_accuracies(search.paths, data, counts),
        shared=shared_by_paths(search.paths),
    )


@full_precision
def save_paths(path: Path, search: TopPaths, tensors: Sequence[BilinearTensor]) -> None:
    """Write what a search has found: safetensors, with the effective eigenvalues beside it.

    Raises:
        CheckpointError: the system refuses.
    """
    paths = search.paths
    found = {name: getattr(paths, name) for name in FIELDS}
    metadata = {
        "of": _fingerprint(tensors),
        "constant": str(paths.constant),
        "expanded": str(search.expanded),
        "total": str(search.total),
    }
    write_safetensors(path, {**found, "effective": paths.effective}, metadata)


@full_precision
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
            found = {name: file.get_tensor(name).to(device) for name in FIELDS}
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
