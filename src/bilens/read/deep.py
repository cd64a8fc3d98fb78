"""What the weights of a classifier of several layers say about its classes."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from bilens.data import ImageData
from bilens.errors import BilensError
from bilens.nn import ImageClassifier
from bilens.read.classes import check_classifier
from bilens.read.saved_paths import load_paths
from bilens.read.shared import SharedFeatures, shared_by_paths
from bilens.tensor import LazyTree, Paths, TopPaths, top_paths
from bilens.tensor.chain import make_chain
from bilens.tensor.exact import exact

__all__ = ["DeepReading", "path_accuracies", "read_deep"]

STOPS = (1, 3, 10, 30, 100, 300, 1000, 3000, 10_000, 30_000, 100_000)


@dataclass(frozen=True, eq=False)
class DeepReading:
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


@exact
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


@exact
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
    check_classifier(model)
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
