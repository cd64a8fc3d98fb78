"""Models of the paper's repository, against its equations on plain tensors."""

from itertools import product

import pytest
import torch
from torch.nn import functional

import bilens
from bilens.convert import open_model, process
from bilens.errors import CheckpointError
from bilens.transformer import ResidualModel
from tests.convert.foreign import IMAGES, PAPER, TOLERANCE, some_ids, state_of, write
from tests.nightly import nightly

GATES = {name: getattr(functional, name) for name in ("relu", "silu", "gelu")}
GATES[None] = lambda z: z
KINDS = [*product([True], GATES), (False, "relu"), (False, "gelu")]


def turned(x):
    """Turn by half-split rotary positions, with angles in float32 as in that code."""
    time, width = x.shape
    speeds = 1.0 / 10_000 ** (torch.arange(0, width, 2).float() / width)
    angles = torch.arange(time).float()[:, None] * speeds
    cos, sin = angles.cos(), angles.sin()
    a, b = x.chunk(2, -1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)


def reference(settings, state, ids):
    width = settings["d_model"] // settings["n_head"]

    def norm(x):
        if not settings["normalization"]:
            return x
        return x * (x.square().mean(-1, keepdim=True) + 1e-8).rsqrt()

    x = state["transformer.wte.weight"][ids]
    future = torch.ones(len(ids), len(ids)).triu(1).bool()
    for layer in range(settings["n_layer"]):
        name, y = f"transformer.h.{layer}", []
        q, k, v = (norm(x) @ state[f"{name}.attn.qkv.weight"].T).chunk(3, -1)
        for h in range(settings["n_head"]):
            head = slice(h * width, (h + 1) * width)
            scores = turned(q[:, head]) @ turned(k[:, head]).T / width**0.5
            y.append(scores.masked_fill(future, -torch.inf).softmax(-1) @ v[:, head])
        scale = 1 / (2 * settings["n_layer"]) ** 0.5
        x = x + scale * (torch.cat(y, -1) @ state[f"{name}.attn.o.weight"].T)
        read = norm(x) @ state[f"{name}.mlp.w.weight"].T + state.get(f"{name}.mlp.w.bias", 0)
        left, right = read.chunk(2, -1) if settings["bilinear"] else (read, 1)
        hidden = GATES[settings["gate"]](left) * right
        x = x + hidden @ state[f"{name}.mlp.p.weight"].T + state.get(f"{name}.mlp.p.bias", 0)
    return norm(x) @ state["lm_head.weight"].T


@pytest.mark.parametrize("dtype", nightly(TOLERANCE, [torch.float64]), ids=str)
@pytest.mark.parametrize("normalization", [False, True])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("bilinear", "gate"), KINDS)
def test_logits_are_those_of_the_equations(tmp_path, bilinear, gate, bias, normalization, dtype):
    settings = PAPER | {"bilinear": bilinear, "gate": gate}
    settings |= {"bias": bias, "normalization": normalization}
    # Without norms the stream grows with the square of every layer's weights.
    state = {k: v / 2 for k, v in state_of(settings, dtype).items()}
    model = bilens.load(write(tmp_path, settings, state, "model.safetensors")).model
    assert model.dtype == dtype
    logits = model(some_ids()[None]).logits[0]
    expected = reference(settings, state, some_ids())
    torch.testing.assert_close(logits, expected, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


def test_the_epsilon_of_the_norm_is_theirs(tmp_path):
    state = state_of(PAPER)
    state["transformer.wte.weight"] *= 1e-4
    logits = bilens.load(write(tmp_path, PAPER, state)).logits(some_ids()[None])[0]
    torch.testing.assert_close(logits, reference(PAPER, state, some_ids()))


def test_speeds_of_rotary_positions_may_be_there(tmp_path):
    state, shares = state_of(PAPER, torch.float32), torch.arange(0, 8, 2) / 8
    name = "transformer.h.{}.attn.rotary.inv_freq"
    state |= {name.format(layer): 1.0 / 10_000**shares for layer in range(3)}
    bilens.load(write(tmp_path, PAPER, state, "model.safetensors"))
    write(tmp_path, PAPER, state | {name.format(1): 1.0 / 500**shares}, "model.safetensors")
    with pytest.raises(CheckpointError, match="h.1.attn.rotary.inv_freq holds other frequencies"):
        bilens.load(tmp_path)


def test_a_language_model_is_processed_and_read(tmp_path):
    state = state_of(PAPER)
    processed, report = process(open_model(write(tmp_path, PAPER, state)))
    assert report.change < 1e-9
    x = torch.randn(5, 16, dtype=torch.float64)
    left, right = (x @ state["transformer.h.2.mlp.w.weight"].T).chunk(2, -1)
    expected = (left * right) @ state["transformer.h.2.mlp.p.weight"].T
    torch.testing.assert_close(ResidualModel(processed).mlp(2)(x), expected)


def image_reference(settings, state, x):
    x = x @ state["embed.weight"].T
    for layer in range(settings["n_layer"]):
        both = x @ state[f"blocks.{layer}.weight"].T + state.get(f"blocks.{layer}.bias", 0)
        left, right = both.chunk(2, -1)
        x = left * right + (x if settings["residual"] else 0)
    return x @ state["head.weight"].T


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("residual", [False, True])
@pytest.mark.parametrize("n_layer", [1, 2])
def test_image_classifiers(tmp_path, n_layer, residual, bias):
    settings = IMAGES | {"n_layer": n_layer, "residual": residual, "bias": bias}
    state = state_of(settings)
    model = bilens.load(write(tmp_path / "theirs", settings, state))
    x = torch.randn(6, 25, dtype=torch.float64)
    expected = image_reference(settings, state, x)
    torch.testing.assert_close(model(x), expected, rtol=1e-10, atol=1e-10)
    assert model.config.image_shape == (5, 5)
    if n_layer == 1:
        torch.testing.assert_close(model.tensor()(x), expected)
    model.save_pretrained(tmp_path / "ours")
    again = bilens.load(tmp_path / "ours").double()
    torch.testing.assert_close(again(x), expected, rtol=1e-5, atol=1e-5)


def test_pixels_that_are_no_square_are_no_picture(tmp_path):
    settings = IMAGES | {"d_input": 24}
    assert bilens.load(write(tmp_path, settings, state_of(settings))).config.image_shape is None
    with pytest.raises(CheckpointError, match="holds ImageClassifier, expected a language model"):
        open_model(tmp_path)
