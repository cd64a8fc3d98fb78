import math

import pytest
import torch

from bilens.errors import BilensError
from bilens.read import loss_recovered, sparsity


def test_sparsity_counts():
    activations = torch.tensor([[1.0, 0, 0, 2], [0, 0, 0, 3]])
    y = torch.tensor([[3.0, 4.0], [0.0, 5.0]])
    report = sparsity(activations, y, y + torch.tensor([1.0, 0.0]))
    assert report.l0 == 1.5
    assert (report.active, report.dead) == (2, 2)
    assert math.isclose(report.relative_error, 2 / 50, rel_tol=1e-6)


def test_nothing_to_measure_is_an_error():
    y, x = torch.ones(2, 2), torch.ones(2, 3)
    for wrong in (torch.zeros(2, 2), torch.zeros(0, 2)):
        with pytest.raises(BilensError, match="y has no sample, or is all zero"):
            sparsity(x[: len(wrong)], wrong, wrong)
    with pytest.raises(BilensError, match="rebuilt holds NaN"):
        sparsity(x, y, y * torch.nan)
    with pytest.raises(BilensError, match="rebuilt_logits holds NaN"):
        loss_recovered(x, x * torch.nan, torch.tensor([0, 1]))
    with pytest.raises(BilensError, match="labels holds 0 to 3, expected .* 0 to 2"):
        loss_recovered(x, x, torch.tensor([0, 3]))


def test_recovered_loss_runs_from_guessing_to_the_model():
    labels = torch.tensor([0, 1, 2, 1])
    logits = 3 * torch.nn.functional.one_hot(labels, 3).float()
    assert math.isclose(loss_recovered(logits, logits, labels), 1.0)
    assert math.isclose(loss_recovered(logits, torch.zeros(4, 3), labels), 0.0, abs_tol=1e-6)
    assert 0 < loss_recovered(logits, 0.3 * logits, labels) < 1
    assert loss_recovered(logits, -logits, labels) < 0
    with pytest.raises(BilensError, match="no better than guessing"):
        loss_recovered(-logits, logits, labels)
