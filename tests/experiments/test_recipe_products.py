"""The recipe of products, tensors, autoencoders and norms, against forms that are written out."""

from functools import partial
from pathlib import Path

import pytest
import torch
from experiments.products import WIDTH, Encoders, Full

from experiments import products
from tests.experiments.test_recipes_single_layer import TinyContext
from tests.experiments.tiny import check_outcome

pytestmark = pytest.mark.long

STORY = "once upon a time there was a little girl named lily . she loved to play {} in the park ."


@pytest.fixture
def context(monkeypatch):
    monkeypatch.setattr(products, "held_out_stories", lambda _: map(STORY.format, range(90)))
    monkeypatch.setattr(products, "TOKENS", 16)
    return TinyContext("small", Path("nowhere"))


def test_the_recipe_runs(context):
    outcome = check_outcome(products.run(context), set())
    assert len(outcome.rows) == 3 + 6 + 1 + 1 + 2 * len(products.DEGREES)
    for row in outcome.rows:
        assert row.low <= row.value <= row.high


@pytest.mark.parametrize("make", [partial(Full, 5), partial(Encoders, 5, 7, 4, 2, 5.0)])
def test_a_tensor_is_the_part_of_second_degree(make):
    layer, x = make().double(), torch.randn(20, 5, dtype=torch.float64)
    even = (layer(x) + layer(-x)) / 2 - layer(0 * x)
    T = layer.tensor()
    assert torch.allclose(T, T.mT)
    assert torch.allclose(torch.einsum("oij,bi,bj->bo", T, x, x), even)


def test_three_encoders_multiply_three_maps():
    layer, x = Encoders(5, 7, 4, 3, 5.0), torch.randn(20, 5)
    a, b, c = (x @ encoder.weight.T + encoder.bias for encoder in layer.encoders)
    assert torch.allclose(layer(x), (a * b * c) @ layer.out.weight.T + layer.out.bias, atol=1e-6)


def test_layers_that_are_compared_are_as_large():
    def size(model):
        return sum(p.numel() for p in model.parameters())

    two, three, relu = (
        size(Encoders(784, hidden, 10, k, 1.0)) for hidden, k in ((150, 2), (100, 3), (300, 1))
    )
    assert max(two, three, relu) / min(two, three, relu) < 1.01
    factors = Encoders(WIDTH, WIDTH**2 // 3, WIDTH, 2, WIDTH)
    assert size(factors) == pytest.approx(size(Full(WIDTH)), rel=0.03)


def test_the_rank_is_that_of_the_outputs():
    directions = torch.linalg.qr(torch.randn(6, 6))[0]
    forms = torch.randn(6, 4, 4) * torch.tensor([1.0, 1, 1, 0.01, 0, 0])[:, None, None]
    assert products.rank(torch.einsum("on,nij->oij", directions, forms)) <= 3
    assert products.rank(torch.eye(9).view(9, 3, 3)) == 9


def test_polynomials_of_high_degree_are_the_norms(context, monkeypatch):
    monkeypatch.setattr(products, "DEGREES", (1, 60))
    spread, line, _, many, above = products.norm_rows(context)
    assert spread.low > 1
    assert line.value > 10 * many.value
    assert abs(above.value) < 1e-3
