"""Eigenvector paths of a classifier of several layers, and the accuracy that they reach."""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import safetensors
import torch
from jaxtyping import Float
from safetensors import SafetensorError
from torch import Tensor

from bilens.analysis import Reading, analysis
from bilens.checks import detached, full_precision
from bilens.data import ImageData
from bilens.errors import BilensError
from bilens.figures.canvas import tree_figure
from bilens.figures.plots import path_figure
from bilens.files import write_safetensors
from bilens.lazy_imports import go, pd
from bilens.read import chain
from bilens.read.explanation import (
    SharedFeatures,
    explain_deep,
    explanation_figures,
    shared_by_paths,
    shared_figure,
    shared_section,
)
from bilens.sections import Fact, Percent, Picture, Section
from bilens.settings import Count
from bilens.tensor import BilinearTensor, LazyTree, Paths, TensorChain, TopPaths, top_paths
from bilens.tensor.chain import make_chain

DRAWN, SEEN = 6, 2000
"""Paths of a class that are drawn, and test images that the images beside them are chosen from."""

PATHS_NAME = "paths.safetensors"
"""Name of the file of saved paths in a run directory."""

FIELDS = ("directions", "roots", "indices", "eigenvalues", "vectors")
"""Fields of `Paths` in that file."""

STEPS = (1, 3, 10, 30, 100, 300, 1000, 3000, 10_000, 30_000, 100_000)
"""Numbers of paths at which accuracy is measured."""


@dataclass(frozen=True, eq=False, repr=False)
class DeepReading(Reading):
    """The strongest eigenvector paths of a classifier, and their accuracy on a test set.

    Attributes:
        model: the classifier.
        data: its images, on the device of the paths.
        search: the best paths over all classes, and the size of the search.
        tree: tree of the model, whose nodes are decomposed on demand.
        accuracy: accuracy of the model on the test images.
        by_paths: (number of paths, accuracy of the pruned tree), ascending.
        shared: features at the ends of paths of several classes.
    """

    model: TensorChain
    data: ImageData
    search: TopPaths
    tree: LazyTree
    accuracy: float
    by_paths: tuple[tuple[int, float], ...]
    shared: SharedFeatures

    axes: ClassVar[dict[str, str]] = TopPaths.axes
    formats: ClassVar[dict[str, str]] = chain.ACCURACY_FORMATS

    def facts(self) -> list[Fact]:
        """Return the data, the accuracy, sizes and the paths."""
        return [
            ("data", self.data.name),
            ("test accuracy", Percent(self.accuracy)),
            *chain.size_facts(self.model),
            *self.search.facts(),
        ]

    def frame(self) -> "pd.DataFrame":
        """Return a row for each path."""
        return self.search.frame()

    def tables(self) -> "dict[str, pd.DataFrame]":
        """Return the accuracy with few paths."""
        return {"few paths": chain.accuracy_frame("paths", self.by_paths, self.accuracy)}

    def figures(self) -> "dict[str, go.Figure]":
        """Draw every figure of paths, by the name of the file that it is saved as."""
        shape = self.data.shape
        names, x = self.data.class_names, self.data.test_images
        figures = {"paths": path_figure(self.by_paths, self.accuracy)}
        figures |= explanation_figures(self.model, self.data, partial(explain_deep, self.tree))
        for label, name in enumerate(names):
            paths = self.search.paths.of(label)
            if len(paths):
                drawn = class_paths(self.tree, paths.truncate(min(DRAWN, len(paths))), x[:SEEN])
                title = f"Strongest paths of {name}"
                figures[f"tree-{label}"] = tree_figure(
                    drawn.paths, shape, title=title, root=name, inputs=drawn.inputs
                )
        if self.shared.features:
            figures["shared"] = shared_figure(self.shared, shape, names)
        return figures

    def sections(self) -> list[Section]:
        """Return the sections on the paths of a classifier of several layers."""
        figures = self.figures()
        return [
            Section(
                "Why these logits",
                "One row for each of the three highest logits of an image. Each logit is a sum of "
                "activations λ (v·h)², one for each eigenvector v of the last layer, where h is "
                "the output of the layer below for the image and λ the eigenvalue. The bold "
                "number is the activation: blue raises the logit, red lowers it; rest is the sum "
                "over all other eigenvectors. The input of such an eigenvector is itself a sum "
                "over eigenvectors of the layer below, down to the pixels. The pictures are those "
                "that weigh most for this image, each with its share; blue pixels are positive, "
                "red ones negative.",
                chain.picture_rows(figures, "explanation"),
            ),
            Section(
                "How few paths are enough",
                "Each logit is a tree: an eigenvector of the last layer is a direction in the one "
                "before, with eigenvectors of its own, down to the pixels. The paths are ranked "
                "over all classes by effective eigenvalue, and the tree is cut to the best k.",
                [[*chain.accuracy_tables(self), Picture("paths", lambda: figures["paths"])]],
            ),
            Section(
                "The strongest paths of each class",
                "From the logit on the left to the pixels on the right. An edge is an "
                "eigenvector, and carries its eigenvalue, blue where positive and red where "
                "negative. Beside each are the test images that it reacts to most. A picture on "
                "the right is an eigenvector of the first layer, blue where it is positive and "
                "red where it is negative; below it is the effective eigenvalue of the whole "
                "path, which says how much it can weigh. A path through a red edge of the last "
                "layer lowers the logit. Further down a sign says less: with the eigenvector "
                "above turned around, all below it change theirs.",
                chain.picture_rows(figures, "tree"),
                folded=True,
            ),
            shared_section(self.shared, figures.get("shared"), "ends of paths"),
        ]

    def record(self) -> dict[str, Any]:
        """Return the numbers for JSON."""
        return {
            "data": self.data.name,
            "accuracy": self.accuracy,
            "accuracy_by_paths": [list(pair) for pair in self.by_paths],
            "nodes_expanded": self.search.expanded,
            "nodes_total": self.search.total,
            "shared_features": len(self.shared.features),
            "shared_weight": self.shared.weight,
        }


@detached
def path_accuracies(
    paths: Paths, data: ImageData, counts: Sequence[int]
) -> tuple[tuple[int, float], ...]:
    """Return (k, test accuracy) of the tree pruned to its best k paths, for each k of `counts`."""
    if paths.batch_shape != (data.n_classes,):
        raise BilensError(
            f"paths have directions of batch shape {tuple(paths.batch_shape)}; expected one for "
            f"each of the {data.n_classes} classes"
        )
    x, labels = data.test_images, data.test_labels
    return tuple((k, chain.share_right(paths.truncate(k)(x), labels)) for k in counts)


@analysis("paths")
@detached
def read_deep(
    model: TensorChain, data: ImageData, k: int = 1000, saved: Path | None = None
) -> DeepReading:
    """Find the k best eigenvector paths over all classes, and measure the pruned model.

    The data is moved to the device of the model, or to the CPU if that device has no float64. A
    model with fewer paths is read completely. If `saved` is a file of `save_paths` of this model
    with at least k paths, it replaces the search.

    Args:
        model: the classifier.
        data: its images.
        k: number of paths.
        saved: file of `save_paths`.

    Raises:
        NotBilinearError: a gate is not linear, or a norm divides by the input's length.
        BilensError: the model differs from its tensors.
    """
    tensors = chain.input_tensors(model)
    data = data.to(tensors[0].left.device)
    chain.check_reproduces(model, tensors, data.test_images)
    directions = torch.eye(data.n_classes, device=tensors[0].left.device)
    # A small model has fewer paths than asked for, and is read completely.
    k = min(k, make_chain(tensors, directions).n_leaves)
    # The search takes minutes for wide models, so that of an earlier run is used again.
    search = (saved and load_paths(saved, tensors, k)) or top_paths(tensors, directions, k)
    n_paths = len(search.paths)
    # The last point is always that of all paths, however many there are.
    counts = [step for step in STEPS if step < n_paths] + [n_paths]
    return DeepReading(
        model=model,
        data=data,
        search=search,
        tree=LazyTree(tensors, directions),
        accuracy=chain.accuracy(model, data.test_images, data.test_labels),
        by_paths=path_accuracies(search.paths, data, counts),
        shared=shared_by_paths(search.paths),
    )


@dataclass(frozen=True, eq=False)
class ClassPaths:
    """Paths of one class, with the inputs that activate their eigenvectors most.

    Attributes:
        paths: the paths; each last eigenvector has the sign that makes it resemble its inputs.
        inputs: inputs of largest |v . h| for every eigenvector, the largest first; the keys are the
            eigenvectors' numbers from the output down.
    """

    paths: Paths
    inputs: Mapping[tuple[int, ...], Float[Tensor, "k n_in"]]


@detached
def class_paths(
    tree: LazyTree, paths: Paths, x: Float[Tensor, "samples n_in"], k: Count = 3
) -> ClassPaths:
    """Find the inputs of largest overlap with each eigenvector on paths of a single class.

    Nodes that the tree has not decomposed yet are decomposed.
    """
    vectors, inputs = paths.vectors.clone(), {}
    overlaps = {}
    for row, (root, indices) in enumerate(
        zip(paths.roots.tolist(), paths.indices.tolist(), strict=True)
    ):
        for length in range(paths.depth):
            node, name = (root, *indices[:length]), tuple(indices[: length + 1])
            # Paths share their first eigenvectors, whose overlaps are computed once.
            if node not in overlaps:
                overlaps[node] = tree.overlaps(node, x)
            # Inputs that react strongly, whatever the sign: overlaps are squared.
            strength = overlaps[node][:, indices[length]].abs()
            best = strength.topk(min(k, len(x))).indices
            inputs[name] = x[best]
        # The overlaps are those of the tree's eigenvector; the path's may have the opposite sign.
        sides = torch.sign(x[best] @ vectors[row, : x.shape[1]].to(x))
        vectors[row] *= 1 if sides.sum() >= 0 else -1
    return ClassPaths(replace(paths, vectors=vectors), inputs)


@full_precision
def save_paths(path: Path, search: TopPaths, tensors: Sequence[BilinearTensor]) -> None:
    """Write the paths of a search as safetensors, together with their effective eigenvalues.

    Raises:
        CheckpointError: the file cannot be written.
    """
    paths = search.paths
    arrays = {name: getattr(paths, name) for name in FIELDS}
    metadata = {
        "of": _fingerprint(tensors),
        "constant": str(paths.constant),
        "expanded": str(search.expanded),
        "total": str(search.total),
    }
    write_safetensors(path, {**arrays, "effective": paths.effective}, metadata)


@full_precision
def load_paths(path: Path, tensors: Sequence[BilinearTensor], k: int) -> TopPaths | None:
    """Return the first k paths written by `save_paths`.

    None if the file does not exist, belongs to another model or has fewer paths.
    """
    try:
        with safetensors.safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            if metadata.get("of") != _fingerprint(tensors):
                return None
            device = tensors[0].left.device
            arrays = {name: file.get_tensor(name).to(device) for name in FIELDS}
    except (OSError, SafetensorError):
        return None
    paths = Paths(**arrays, constant=metadata["constant"] == "True")
    # A shorter search would silently leave paths out.
    if len(paths) < k:
        return None
    # Paths are sorted, so a longer search begins with the result of a shorter one.
    return TopPaths(paths.truncate(k), int(metadata["expanded"]), int(metadata["total"]))


def _fingerprint(tensors: Sequence[BilinearTensor]) -> str:
    """Return a hash of the exact bits of all weights."""
    # Bits and not values: rounded weights have slightly other paths.
    digest = hashlib.sha256()
    for tensor in tensors:
        for factor in (tensor.left, tensor.right, tensor.out):
            digest.update(f"{tuple(factor.shape)} {factor.dtype} {tensor.constant}".encode())
            digest.update(factor.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
