import math

import pytest
import torch

from bilens.errors import BilensError
from bilens.read import sparsity


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
