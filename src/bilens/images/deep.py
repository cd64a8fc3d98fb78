"""Eigenvector paths of a classifier of several layers, and the accuracy that they reach."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch

from bilens.analysis import Reading
from bilens.checks import detached
from bilens.data import ImageData
from bilens.errors import BilensError
from bilens.images import chain
from bilens.images.explanation import SharedFeatures, shared_by_paths
from bilens.sections import Columns, Fact, Percent
from bilens.tensor import Paths, TensorChain, decompile
from bilens.tensor.chain import count_leaves, minimal_chain


@dataclass(frozen=True, eq=False, repr=False)
class DeepReading(Reading):
    """The strongest eigenvector paths of a classifier, and their accuracy on a test set.

    Attributes:
        model: the classifier.
        data: its images, on the device of the paths.
        paths: the best paths over all classes.
        accuracy: accuracy of the model on the test images.
        by_paths: (number of paths, accuracy of the pruned tree), ascending.
        shared: features at the ends of paths of several classes.
    """

    model: TensorChain
    data: ImageData
    paths: Paths
    accuracy: float
    by_paths: tuple[tuple[int, float], ...]
    shared: SharedFeatures

    axes: ClassVar[dict[str, str]] = Paths.axes

    title: ClassVar[str] = "How few paths does the model need?"

    def facts(self) -> list[Fact]:
        return [
            ("data", self.data.name),
            ("test accuracy", Percent(self.accuracy)),
            *chain.size_facts(self.model),
            *(fact for fact in self.paths.facts() if fact[0] != "layers"),
        ]

    def columns(self) -> Columns:
        """Return a row for each path."""
        return self.paths.columns()

    def answer(self) -> str:
        """Return the accuracy of the strongest paths, in one sentence."""
        if self.data.is_chance(self.accuracy):
            return chain.chance_sentence(self.accuracy, self.data)
        k, accuracy = self.by_paths[-1]
        return (
            f"The {k:,} strongest paths from a logit to the pixels have {accuracy:.1%} of test "
            f"images right; the model has {self.accuracy:.1%}."
        )


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


@detached
def read_deep(model: TensorChain, data: ImageData, k: int = 1000) -> DeepReading:
    """Find the k best eigenvector paths over all classes, and measure the pruned model.

    The data is moved to the device of the model, or to the CPU if that device has no float64. A
    model with fewer paths is read completely.

    Args:
        model: the classifier.
        data: its images.
        k: number of paths.

    Raises:
        NotBilinearError: a gate is not linear, or a norm divides by the input's length.
        BilensError: the model differs from its tensors, or has too many paths.
    """
    tensors = chain.input_tensors(model)
    data = data.to(tensors[0].left.device)
    chain.check_reproduces(model, tensors, data)
    directions = torch.eye(data.n_classes, device=tensors[0].left.device)
    # A small model has fewer paths than asked for, and is read completely.
    n_leaves = count_leaves(minimal_chain(tensors, directions)[0], directions)
    paths = decompile(tensors, directions, min(k, n_leaves))
    counts = [step for step in (1, 3, 10, 30, 100, 300, 1000, 3000, 10_000) if step < len(paths)]
    return DeepReading(
        model=model,
        data=data,
        paths=paths,
        accuracy=chain.accuracy(model, data.test_images, data.test_labels),
        by_paths=path_accuracies(paths, data, [*counts, len(paths)]),
        shared=shared_by_paths(paths),
    )
