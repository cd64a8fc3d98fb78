"""Models of the post on tensor-transformer variants, against its equations on plain tensors."""

from itertools import product

import pytest
import torch
from torch.nn import functional

import bilens
from bilens.convert import open_model, process
from bilens.nn.language import LanguageModel
from bilens.transformer import ResidualModel
from tests.convert.foreign import RELEASED, TOLERANCE, some_ids, state_of, write
from tests.models import check_same_model
from tests.nightly import nightly

FLAGS = ("bilinear", "gated", "squared_mlp", "squared_attn", "bilinear_attn")
ALL = [dict(zip(FLAGS, values, strict=True)) for values in product([False, True], repeat=5)]


def rms(x):
    return x / (x.square().mean(-1, keepdim=True) + torch.finfo(x.dtype).eps).sqrt()


def rotary(time, width):
    speeds = 1.0 / 10_000 ** (torch.arange(0, width, 2).float() / width)
    angles = torch.arange(time).float()[:, None] * speeds
    return angles.cos().bfloat16(), angles.sin().bfloat16()


def mix(settings, state, name, scores, width):
    """Return a pattern from the scores of one head, one or two of them."""
    seen = torch.ones_like(scores[0]).tril().bool()
    if settings["squared_attn"]:
        return (scores[0] / width * scores[-1] / width).where(seen, 0)
    scale = width if settings["bilinear_attn"] else width**0.5
    looks = [(score / scale).masked_fill(~seen, -torch.inf).softmax(-1) for score in scores]
    if settings["bilinear_attn"]:
        return looks[0] - state[f"{name}.bilinear_lamb"] * looks[1]
    return looks[0]


def attention(settings, state, name, x, first):
    width = settings["n_embd"] // settings["n_head"]
    cos, sin = rotary(len(x), width)

    def turned(head):
        a, b = rms(head).chunk(2, -1)
        return torch.cat([a * cos + b * sin, b * cos - a * sin], -1)

    v = x @ state[f"{name}.c_v.weight"].T
    first = v if first is None else first
    v = (1 - state[f"{name}.lamb"]) * v + state[f"{name}.lamb"] * first
    out = []
    for h in range(settings["n_head"]):
        rows, scores = slice(h * width, (h + 1) * width), []
        for number in ("", "2") if settings["bilinear_attn"] else ("",):
            maps = (state[f"{name}.c_{letter}{number}.weight"] for letter in "qk")
            q, k = (turned(x @ weight[rows].T) for weight in maps)
            scores.append(q @ k.T)
        out.append(mix(settings, state, name, scores, width) @ v[:, rows])
    return torch.cat(out, -1) @ state[f"{name}.c_proj.weight"].T, first


def mlp(settings, state, name, x):
    if settings["bilinear"]:
        left, right = (x @ state[f"{name}.{part}.weight"].T for part in ("Left", "Right"))
        left = functional.silu(left) if settings["gated"] else left
        return (left * right) @ state[f"{name}.Down.weight"].T + state[f"{name}.Down_bias"]
    hidden = x @ state[f"{name}.c_fc.weight"].T
    hidden = hidden.square() if settings["squared_mlp"] else functional.relu(hidden).square()
    return hidden @ state[f"{name}.c_proj.weight"].T + state[f"{name}.bias"]


def reference(settings, state, ids):
    x = start = rms(state["transformer.wte.weight"][ids])
    first = None
    for layer in range(settings["n_layer"]):
        name = f"transformer.h.{layer}"
        plain, embedded = state[f"{name}.lambdas"]
        x = plain * x + embedded * start
        y, first = attention(settings, state, f"{name}.attn", rms(x), first)
        x = x + y
        x = x + mlp(settings, state, f"{name}.mlp", rms(x))
    return 30 * torch.tanh(rms(x) @ state["lm_head.weight"].T / 30)


@pytest.mark.parametrize("dtype", nightly(TOLERANCE, [torch.float64]), ids=str)
@pytest.mark.parametrize(
    "flags", nightly(ALL, ALL[::3]), ids=lambda flags: "-".join(k for k, v in flags.items() if v)
)
def test_logits_are_those_of_the_equations(tmp_path, flags, dtype):
    settings = RELEASED | flags
    state = state_of(settings, dtype)
    model = bilens.load(write(tmp_path, settings, state)).model
    assert isinstance(model, LanguageModel)
    assert model.dtype == dtype
    logits = model(some_ids()[None]).logits[0]
    expected = reference(settings, state, some_ids())
    assert expected.abs().max() > 0.5
    torch.testing.assert_close(logits, expected, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])
    # Decoding with what is kept of earlier tokens gives the same.
    start = model(some_ids()[None, :7], use_cache=True)
    others = model(some_ids()[None, 7:8], past_key_values=start.past_key_values)
    torch.testing.assert_close(others.logits[0, 0], expected[7], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("flags", nightly(ALL[::5], ALL[5:10]))
def test_a_converted_model_is_saved_as_one_of_bilens(tmp_path, flags):
    settings = RELEASED | flags
    model = bilens.load(write(tmp_path, settings, state_of(settings, torch.float32))).model
    model.save_pretrained(tmp_path / "ours")
    check_same_model(bilens.load(tmp_path / "ours").model, model)


@pytest.mark.parametrize("flags", [{}, {"bilinear": False, "squared_mlp": True}])
def test_layers_are_read_as_tensors(tmp_path, flags):
    settings = RELEASED | flags
    state = state_of(settings)
    model = open_model(write(tmp_path, settings, state))
    x = torch.randn(5, settings["n_embd"], dtype=torch.float64)
    expected = mlp(settings, state, "transformer.h.1.mlp", x)
    torch.testing.assert_close(ResidualModel(model).mlp(1)(x), expected)
    torch.testing.assert_close(model.mlp(1).tensor()(x), expected)
    folded, _ = process(model, ["fold_norms"])
    torch.testing.assert_close(folded(some_ids()[None]).logits, model(some_ids()[None]).logits)


def test_a_half_precision_embedding_widens_to_the_other_weights(tmp_path):
    state = state_of(RELEASED, torch.float32)
    state["transformer.wte.weight"] = state["transformer.wte.weight"].bfloat16()
    write(tmp_path, RELEASED, state)
    assert bilens.load(tmp_path).model.dtype == torch.float32
    assert open_model(tmp_path, dtype=torch.float64).dtype == torch.float64
