"""Models of bilinear layers, opened for reading: their tensors, their embedding, their accuracy."""

from collections.abc import Sequence
from contextlib import nullcontext

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from bilens.checks import check_finite, check_labels, check_sum
from bilens.data import ImageData
from bilens.errors import BilensError, NotBilinearError
from bilens.hooks import evaluating
from bilens.sections import Columns, Fact
from bilens.tensor import BilinearTensor, TensorChain
from bilens.tensor.chain import check_chain
from bilens.tensor.factors import affine, fit_input, wide_device

BATCH = 8192
"""Samples that a model classifies at once."""
COMPARED, UNITS = 64, 10.0
"""Samples on which a reading is compared with its model, and the terms' size in largest logits."""


def open_chain(model: TensorChain) -> tuple[list[BilinearTensor], Float[Tensor, "n n_in"]]:
    """Return a model's layer tensors and its embedding, on a device that has float64.

    Raises:
        BilensError: there are no layers, one is not finite, or they do not fit one another.
    """
    tensors = list(model.layer_tensors())
    check_chain(tensors, "layer_tensors()")
    embedding = _embedding(model, tensors[0])
    device = wide_device(tensors[0].left.device)
    return [tensor.to(device) for tensor in tensors], embedding.to(device)


def open_layer(model: TensorChain) -> tuple[BilinearTensor, Float[Tensor, "n n_in"]]:
    """Return the only layer of a model and its embedding, as `open_chain` does.

    Raises:
        NotBilinearError: the model has several layers.
    """
    tensors, embedding = open_chain(model)
    if len(tensors) > 1:
        raise NotBilinearError(
            f"The model has {len(tensors)} layers, so its logits are of degree "
            f"{2 ** len(tensors)} in the inputs, not one bilinear tensor. `bilens bonds` and "
            "`bilens paths` read deep models, in Python bilens.images.read_bonds and read_deep."
        )
    return tensors[0], embedding


def input_tensors(model: TensorChain) -> list[BilinearTensor]:
    """Return a model's layer tensors with the embedding folded into the first."""
    (first, *others), embedding = open_chain(model)
    return [first.change_basis(inputs=embedding), *others]


def _embedding(model: TensorChain, first: BilinearTensor) -> Float[Tensor, "n n_in"]:
    """Return the embedding with the constant coordinate of the first tensor, if that has one."""
    embedding = model.embedding()
    if embedding is None:
        return torch.eye(first.n_in, dtype=first.left.dtype, device=first.left.device)
    if first.constant and embedding.shape[0] == first.n_in - 1:
        return affine(embedding, None)
    if embedding.shape[0] != first.n_in:
        raise BilensError(
            f"embedding() has shape {tuple(embedding.shape)}, expected {first.n_in} rows, one for "
            "each input of the first layer, the constant among them"
        )
    return embedding


@torch.no_grad()
def predict(
    model: TensorChain, x: Float[Tensor, "samples n_in"]
) -> Float[Tensor, "samples classes"]:
    """Return the model's logits of samples, computed in batches on the model's device."""
    first = model.layer_tensors()[0]
    embedding = _embedding(model, first)
    # The constant coordinate is the tensors' own: the model is called on the inputs only.
    rows = fit_input(x, embedding[:, : embedding.shape[1] - first.constant], constant=False)
    # In batches, since test sets may not fit on a device.
    with evaluating(model) if isinstance(model, nn.Module) else nullcontext():
        logits = torch.cat([model(batch) for batch in rows.split(BATCH)])
    check_finite(logits=logits)
    return logits


def accuracy(
    model: TensorChain, x: Float[Tensor, "samples n_in"], labels: Int[Tensor, " samples"]
) -> float:
    """Return the share of samples whose largest logit is that of their label."""
    logits = predict(model, x)
    check_labels(labels, logits.shape[1])
    return share_right(logits, labels)


def share_right(logits: Float[Tensor, "samples classes"], labels: Int[Tensor, " samples"]) -> float:
    """Return the share of samples whose largest logit is that of their label."""
    return int((logits.argmax(-1) == labels.to(logits.device)).sum()) / len(labels)


def check_reproduces(
    model: TensorChain, tensors: Sequence[BilinearTensor], data: ImageData
) -> None:
    """Raise BilensError if a chain of tensors, from inputs to logits, differs from its model.

    They are compared on test images, which have to be of the model's size and classes.
    """
    n_inputs, n_classes = tensors[0].n_in - tensors[0].constant, tensors[-1].n_out
    if (data.n_inputs, data.n_classes) != (n_inputs, n_classes):
        raise BilensError(
            f"data={data.name!r} has images of {data.shape[0]}x{data.shape[1]} pixels in "
            f"{data.n_classes} classes, but the model reads {n_inputs} pixels and tells "
            f"{n_classes} classes apart; expected the data of its training, or other data like it"
        )
    check_outputs(model, tensors, data.test_images)


def check_outputs(
    model: TensorChain, tensors: Sequence[BilinearTensor], x: Float[Tensor, "samples n_in"]
) -> None:
    """Raise BilensError if a chain of tensors, from inputs to logits, differs from its model.

    They are compared on the first of some inputs.
    """
    x = x[:COMPARED].to(tensors[0].left.device)
    logits, outputs = predict(model, x), x
    for tensor in tensors:
        outputs = tensor(outputs)
    # The terms of a logit are larger than their sum, and so is its rounding.
    size = UNITS * float(logits.abs().max())
    try:
        check_sum("layer_tensors()", outputs, logits, size=size, dtype=logits.dtype)
    except BilensError as error:
        raise BilensError(
            f"model(x) and its layer_tensors() differ, expected the same function: {error}. Check "
            "that layer_tensors() and embedding() include every norm, bias and residual connection"
        ) from None


def chance_sentence(accuracy: float, data: ImageData) -> str:
    """Return a sentence about a model that cannot be told from chance."""
    name, chance = data.commonest
    return (
        f"This model cannot be told from chance with {len(data.test_labels):,} test images, so "
        f"that its parts show nothing: it has {accuracy:.1%} right, and always naming {name} has "
        f"{chance:.1%}."
    )


def size_facts(model: TensorChain) -> list[Fact]:
    """Return the number of layers, their width and, of a module, the number of parameters."""
    tensors = model.layer_tensors()
    facts: list[Fact] = [("layers", len(tensors)), ("width", tensors[0].n_in - tensors[0].constant)]
    if isinstance(model, nn.Module):
        facts.append(("parameters", sum(p.numel() for p in model.parameters())))
    return facts


def accuracy_columns(unit: str, rows: Sequence[tuple[int | str, float]], full: float) -> Columns:
    """Return a table of (count of the unit, accuracy), and the points that each is below `full`."""
    counts, accuracies = zip(*rows, strict=True)
    # In points, which a reader can subtract from the accuracy.
    drops = [100 * (full - share) for share in accuracies]
    return {unit: counts, "accuracy": accuracies, "drop (points)": drops}
