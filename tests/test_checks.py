"""Arguments are checked in one way, with messages that name them."""

from collections.abc import Iterable, Sequence

import numpy as np
import pytest
import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from bilens.checks import (
    check_count,
    check_finite,
    check_index,
    check_labels,
    check_weights,
    checked,
)
from bilens.errors import BilensError, CheckpointError
from bilens.settings import Count


@checked
def accuracy(
    x: Float[Tensor, "samples n"],
    labels: Int[Tensor, " samples"],
    weights: Float[Tensor, "*batch n"] | Sequence[float] | None = None,
    k: Count = 1,
    blocks: Iterable[Float[Tensor, "samples n"]] = (),
) -> float:
    """Any function."""
    return float(len(x) + len(labels) + k)


class Model:
    @checked
    def read(self, x: Float[Tensor, "samples n"]) -> int:
        return len(x)


def test_what_fits_passes():
    x, labels = torch.zeros(3, 4), torch.tensor([1, 2, 3])
    assert accuracy(x, labels) == accuracy(x, labels, torch.zeros(7, 2, 4), k=1) == 7
    assert accuracy(x, labels, [0.5], blocks=[labels]) == 7
    assert Model().read(x) == Model().read(x=x) == 3


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (
            (torch.zeros(3, 4), torch.tensor([[1], [2], [3]])),
            r"labels is a tensor of shape \(3, 1\) and torch.int64, expected a tensor of "
            r"whole numbers of shape \(samples\) beside x \(3, 4\)$",
        ),
        ((torch.zeros(3, 4), torch.tensor([1, 2])), r"labels is .* \(2,\)"),
        # As a tokenizer returns ids of one text.
        ((torch.zeros(3, 4), torch.tensor([[1, 2, 3]])), r"shape \(1, 3\) .*; labels\[0\] fits$"),
        (
            (torch.zeros(3, 4), torch.zeros(3)),
            r"labels is .* torch.float32, expected a tensor of whole",
        ),
        ((np.zeros((3, 4)), torch.tensor([1])), "x is numpy.ndarray, expected a tensor of real"),
        ((3, torch.tensor([1])), "x is int, expected a tensor of real"),
        (
            (torch.zeros(3, 4), torch.tensor([1, 2, 3]), torch.zeros(2, 5)),
            r"weights is .* \(2, 5\).*expected .* of shape \(\*batch, n\) or .* or none beside x",
        ),
    ],
)
def test_an_array_that_does_not_fit_is_named(args, message):
    with pytest.raises(BilensError, match=message):
        accuracy(*args)


@pytest.mark.parametrize("k", [0, -1, 2.5, True, "3", None, 2**70])
def test_a_number_out_of_its_limits_is_named(k):
    with pytest.raises(BilensError, match=r"^k=.*, expected a whole number, at least 1 and at mos"):
        accuracy(torch.zeros(3, 4), torch.tensor([1, 2, 3]), k=k)


@checked
def selected(
    numbers: Sequence[int] | None = None,
    shape: tuple[int, int] = (1, 1),
    name: str = "",
    share: float = 0.0,
) -> None:
    """Any function of lists."""


def test_lists_of_numbers_and_texts_are_held_to_what_is_in_them():
    for numbers in ([1], (1, 2), np.arange(3), range(3), [np.int64(1)], torch.arange(3), None):
        selected(numbers, [8, 8])
    message = r"numbers=\[0.5\], expected a list, each a whole number or none"
    with pytest.raises(BilensError, match=message):
        selected([0.5])
    with pytest.raises(
        BilensError, match=r"numbers=tensor.*, expected a list, each a whole number"
    ):
        selected(torch.tensor([0.5]))
    for shape in ((8,), (8, 8, 8), (8, None), 8):
        with pytest.raises(BilensError, match=r"shape=.*, expected 2 values, each a whole number"):
            selected(shape=shape)
    with pytest.raises(BilensError, match="name=3, expected text"):
        selected(name=3)
    for share in (float("inf"), float("nan"), 10**400, True):
        with pytest.raises(BilensError, match="^share=.*, expected a finite number$"):
            selected(share=share)
    selected(share=np.float32(1))


@checked
def named(ids: Int[Tensor, " n"] | Iterable[int]) -> None:
    """Any function of an array or a list."""


def test_a_tensor_is_held_to_its_kind_where_a_list_would_do():
    named([1])
    named(torch.tensor([1]))
    with pytest.raises(BilensError, match=r"ids is a tensor of shape \(1, 1\)"):
        named(torch.tensor([[1]]))


@pytest.mark.parametrize("value", [-1, 3, 10**30, 0.0, True, None, "1"])
def test_an_index_is_one_of_its_things(value):
    check_index("layer", np.int64(2), 3)
    with pytest.raises(BilensError, match=r"^layer=.*, expected 0 to 2, those of the model$"):
        check_index("layer", value, 3, "those of the model")


def test_python_says_itself_what_is_missing():
    with pytest.raises(TypeError, match="missing 1 required positional argument: 'labels'"):
        accuracy(torch.zeros(3, 4))


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_numbers_have_to_be_finite(value):
    check_finite(left=torch.ones(3), labels=torch.ones(3).long())
    with pytest.raises(BilensError, match="right holds NaN or infinite values, expected finite"):
        check_finite(left=torch.ones(3), right=torch.tensor([1.0, value]))
    layer = nn.Linear(2, 2).requires_grad_(False)
    layer.weight[0, 0] = value
    with pytest.raises(CheckpointError, match="mlp.weight holds NaN or infinite values. Fetch"):
        check_weights(layer, "mlp")


class Quantised(Tensor):
    """A tensor like torchao's, whose numbers are not the weights."""

    __module__ = "torchao.quantization"


def test_tensors_of_other_packages_are_not_read_as_weights():
    layer = nn.Linear(2, 2)
    layer.weight = nn.Parameter(torch.ones(2, 2).as_subclass(Quantised))
    with pytest.raises(CheckpointError, match="mlp.weight is a Quantised, expected a plain te"):
        check_weights(layer, "mlp")


@pytest.mark.parametrize("value", [0, -1, 6, 2.5, True, None, torch.nan])
def test_counts_have_limits(value):
    check_count("k", 5, 5, "the number of inputs")
    with pytest.raises(
        BilensError, match=r"k=.*, expected a whole number, 1 to 5, the number of inputs"
    ):
        check_count("k", value, 5, "the number of inputs")


def test_labels_are_numbers_of_classes():
    check_labels(torch.tensor([0, 2, 1]), 3)
    for wrong in ([0, 3], [-1, 0]):
        with pytest.raises(BilensError, match="labels holds .*, expected numbers of"):
            check_labels(torch.tensor(wrong), 3)
    with pytest.raises(BilensError, match="labels is empty"):
        check_labels(torch.tensor([], dtype=torch.long), 3)


def test_counts_without_an_upper_limit():
    check_count("k", 10**9)
    with pytest.raises(BilensError, match="k=0, expected a whole number, at least 1$"):
        check_count("k", 0)
