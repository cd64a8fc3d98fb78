"""The recipe of leading eigenvectors, on what can be counted by hand."""

from functools import cache
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from bilens.tensor import Spectrum
from experiments import leading
from tests.experiments.test_recipes_deep import DeepContext
from tests.experiments.tiny import check_outcome
from tests.models import digit_model, digits

pytestmark = pytest.mark.long


class Context(DeepContext):
    """The tiny context, with the width of models whose paths are counted."""

    def classifiers(self, data, training, seeds, *, d_model=300, layers=1):
        return super().classifiers(digits(), training, seeds, d_model=128, layers=layers)


def test_the_recipe_runs(monkeypatch):
    monkeypatch.setattr(leading, "STRONGEST", 3)
    outcome = check_outcome(leading.run(Context("small", Path("nowhere"))), set())
    rows = {row.claim: row for row in outcome.rows}
    assert len(rows) == len(outcome.rows) == 14
    for row in outcome.rows:
        assert row.low <= row.value <= row.high


def test_quarters_are_counted():
    data = digits()
    pictures = torch.zeros(3, 8, 8)
    pictures[0, :4, 4:] = 2.0
    pictures[1, 4:] = -1.0
    pictures[2] = 1.0
    assert leading.quarters(pictures.flatten(1), data).tolist() == pytest.approx([1, 2, 4])
    moved = leading.in_quadrants(data)
    assert (leading.quarters(moved.train_images, data) == 1).all()
    assert torch.allclose(moved.train_images.sum(1), data.train_images.sum(1) / 4)


def test_the_largest_correlation_is_that_of_two_columns():
    columns = torch.randn(500, 3, generator=torch.Generator().manual_seed(0))
    columns[:, 2] = -3 * columns[:, 0] + 1
    assert leading.largest_correlation(columns) == pytest.approx(1)
    assert leading.largest_correlation(columns[:, :2]) < 0.2


def test_negative_activations_are_compared_on_images_that_are_alike(monkeypatch):
    """Two digits along two axes: N1 of the first is on the second's images, P1 on its own."""
    x = torch.tensor([[2.0, 0.0], [0.0, 3.0], [1.0, 1.0]])
    labels = torch.tensor([0, 1, 1])
    data = SimpleNamespace(
        train_images=x, train_labels=labels, test_images=x + 0.5, test_labels=labels
    )
    spectrum = Spectrum(torch.tensor([2.0, -1.0]), torch.eye(2), torch.zeros(2))
    monkeypatch.setattr(leading, "by_digit", lambda _: [spectrum])
    monkeypatch.setattr(leading, "NEAREST", 1)
    activation, away = leading.negative_rows([None], data)
    # The nearest of another digit is (1.5, 1.5), the digit's own image (2.5, 0.5).
    assert activation.value == pytest.approx(1.5**2 / 0.5**2)
    assert activation.baselines["of P1"] == pytest.approx(1.5**2 / 2.5**2)
    assert away.value == pytest.approx(1 / 2)
    assert away.baselines["on the digit itself"] == pytest.approx(0.5**2 / (2 * 2.5**2))


@cache
def model():
    return digit_model().requires_grad_(False)


def test_the_share_that_logits_read_is_of_a_projection():
    data = digits()
    row = leading.read_row([model()], data, "noise")
    out = model().layers[0](model().embed(data.test_images))
    read = torch.linalg.lstsq(model().unembed.weight.T, out.T).solution
    kept = (model().unembed.weight.T @ read).square().sum() / out.square().sum()
    assert row.value == pytest.approx(float(kept), rel=1e-4)
    dense = model().layers[0].tensor().dense().double()
    weights = torch.linalg.lstsq(model().unembed.weight.T.double(), dense.flatten(1)).solution
    share = (model().unembed.weight.T.double() @ weights).square().sum() / dense.square().sum()
    assert row.baselines["of the weights' squares"] == pytest.approx(float(share), rel=1e-4)
