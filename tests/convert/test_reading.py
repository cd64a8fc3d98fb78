"""The layers of other people's models as tensors, against the modules themselves."""

import pytest
import torch
from torch import nn

from bilens.convert import (
    give_swish,
    make_bilinear,
    mlp_tensor,
    process,
    reading_directions,
    unembedding_directions,
)
from bilens.errors import BilensError, CheckpointError, NotBilinearError
from tests.families import GATED, WIDTH, tiny
from tests.language import random_model


def bilinear(name):
    model = tiny(name)
    give_swish(model).beta = 0.0
    return model


def norm_of(model, layer):
    block = model.model.layers[layer]
    return getattr(block, "pre_feedforward_layernorm", block.post_attention_layernorm)


def scaled(x):
    return x / x.square().mean(-1, keepdim=True).sqrt()


@pytest.mark.parametrize("name", GATED)
def test_the_tensor_is_the_mlp_behind_its_scaled_input(name):
    model = bilinear(name)
    generator = torch.Generator().manual_seed(0)
    x = 1e3 * torch.randn(5, WIDTH, dtype=torch.float64, generator=generator)  # eps is nothing
    for layer in range(2):
        expected = model.model.layers[layer].mlp(norm_of(model, layer)(x))
        assert torch.allclose(mlp_tensor(model, layer)(scaled(x)), expected, atol=1e-5)


@pytest.mark.parametrize("name", GATED)
def test_export_and_processing_leave_the_tensor(name):
    model = bilinear(name)
    before = mlp_tensor(model, 1)
    make_bilinear(model)
    exported = mlp_tensor(model, 1)
    processed = mlp_tensor(process(model)[0], 1)
    assert (before.cosine(exported) - 1).abs() < 1e-12
    assert torch.allclose(before.norm(), exported.norm())
    assert torch.allclose(before.norm(), processed.norm())
    assert (before.cosine(processed) - 1).abs() < 1e-12


@pytest.mark.parametrize("bias", [False, True])
def test_own_models_with_layer_norms(bias):
    model = random_model(norm="layer", bias=bias, n_layers=2)
    generator = torch.Generator().manual_seed(0)
    x = 1e3 * torch.randn(5, 16, dtype=torch.float64, generator=generator)
    block = model.blocks[1]
    found = mlp_tensor(model, 1)(scaled(x - x.mean(-1, keepdim=True)))
    assert torch.allclose(found, block.mlp(block.mlp_norm(x)), atol=1e-7)


def test_directions_have_the_norm_folded_in():
    model = bilinear("gemma2")
    gain = 1 + model.model.norm.weight
    assert torch.allclose(unembedding_directions(model), model.lm_head.weight * gain)
    model = bilinear("phi3")
    gate = model.model.layers[1].mlp.gate_up_proj.weight[:20]
    assert torch.allclose(reading_directions(model, 1), gate * norm_of(model, 1).weight)
    own = random_model(norm="none")
    assert torch.equal(unembedding_directions(own), own.W_U.T)


def test_what_is_no_tensor_is_refused():
    model = tiny("llama")
    with pytest.raises(NotBilinearError, match=r"layers.0.mlp has an activation that is no"):
        mlp_tensor(model, 0)
    with pytest.raises(BilensError, match="layer=2, expected 0 to 1"):
        mlp_tensor(model, 2)
    model = bilinear("llama")
    nn.init.constant_(model.model.layers[0].mlp.down_proj.weight, torch.nan)
    with pytest.raises(CheckpointError, match="0.mlp.down_proj.weight holds NaN or infinite"):
        mlp_tensor(model, 0)
