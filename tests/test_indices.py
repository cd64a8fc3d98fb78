"""Numbers of every type that say which row, token or layer: one answer, or one refusal."""

from dataclasses import fields, is_dataclass, replace

import numpy as np
import pytest
import torch
from torch import Tensor

import bilens
from bilens.circuits import patch
from bilens.errors import BilensError
from bilens.images.classifier import read_explanation
from bilens.language import read_ngrams
from tests.families import family_view, some_text
from tests.models import digit_model, digits
from tests.tensor.factors import random_matrix, random_tensor

TENSOR = random_tensor(4, 5, 3, 0)
MATRIX, MATRICES = random_matrix(4, 4, 2), random_matrix(4, 4, 2, (3,))
FORMS = TENSOR.interaction(output=[0, 1, 2])
VIEW, TEXT = family_view("llama"), some_text(1)[0]

ONE = {
    "matrices": lambda number: MATRICES[number],
    "forms": lambda number: FORMS[number],
    "spectra": lambda number: FORMS.eigh()[number],
    "output": lambda number: TENSOR.interaction(output=number),
    "layer": VIEW.ov,
    "token": lambda number: VIEW.direction(number, minus=3),
    "minus": lambda number: VIEW.direction(3, minus=number),
    "n-grams": lambda number: read_ngrams(VIEW, number, layer=1),
    "image": lambda number: read_explanation(digit_model(), digits(), number),
}
SEVERAL = {
    "rows": MATRIX.rows,
    "entries": lambda numbers: MATRIX.entries(numbers, numbers),
    "eigenpairs": FORMS[0].eigh().select,
    "outputs": lambda numbers: TENSOR.interaction(output=numbers),
    "texts": lambda numbers: VIEW.logits(numbers[None]),
    "flow": lambda numbers: bilens.flow(VIEW, numbers, VIEW.direction(5)).value,
    "inputs": lambda numbers: VIEW.mlp_inputs(1, numbers[None]),
    "against": lambda numbers: patch(VIEW, TEXT[:3], VIEW.direction(5), against=numbers).noising,
}


def tensors_of(result):
    """Return the tensors of a result, or the result itself."""
    if not is_dataclass(result):
        return result
    parts = {field.name: getattr(result, field.name) for field in fields(result)}
    return {name: part for name, part in parts.items() if isinstance(part, Tensor)}


@pytest.mark.parametrize("name", ONE)
def test_one_number(name):
    expected = tensors_of(ONE[name](1))
    for number in (np.int64(1), np.uint8(1)):
        torch.testing.assert_close(tensors_of(ONE[name](number)), expected)
    for wrong in (True, np.bool_(True), 1.0, np.float64(1), None, [1.5], torch.tensor(True)):
        with pytest.raises(BilensError):
            ONE[name](wrong)


@pytest.mark.parametrize("name", SEVERAL)
def test_several_numbers(name):
    numbers = torch.tensor([1, 0, 1])
    expected = tensors_of(SEVERAL[name](numbers))
    for dtype in (torch.int32, torch.int16, torch.int8):
        torch.testing.assert_close(tensors_of(SEVERAL[name](numbers.to(dtype))), expected)
    for wrong in (numbers > 0, numbers.double(), numbers - 1, numbers + 99):
        with pytest.raises(BilensError):
            SEVERAL[name](wrong)


def test_batches_are_iterables():
    """Which an IndexError ends."""
    assert [len(list(batch)) for batch in (MATRICES, FORMS, FORMS.eigh())] == [3, 3, 3]


def test_tensors_made_for_inference_are_read_outside_of_it():
    with torch.inference_mode():
        direction = torch.ones(3, dtype=torch.float64)
    trained = replace(TENSOR, out=TENSOR.out.clone().requires_grad_())
    trained.interaction(direction).dense().sum().backward()
    assert trained.out.grad is not None
