"""Checkpoints in other people's layouts, with random weights."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

Shapes = dict[str, tuple[int, ...]]
State = dict[str, torch.Tensor]


def random_state(shapes: Shapes, dtype: torch.dtype = torch.float64) -> State:
    """Return weights of order one over the root of the number of summands."""
    generator, state = torch.Generator().manual_seed(0), {}
    for name, shape in shapes.items():
        summands = (*shape, 1)[-1 if len(shape) < 2 else 1]
        values = torch.randn(shape, generator=generator).double()
        state[name] = (values / summands**0.5).to(dtype)
    return state


def state_of(settings: dict[str, Any], dtype: torch.dtype = torch.float64) -> State:
    """Return random weights in the layout that has these settings."""
    shapes = image_shapes if "d_input" in settings else paper_shapes
    return random_state((released_shapes if "n_embd" in settings else shapes)(settings), dtype)


def write(
    folder: Path, settings: dict[str, Any], state: Any, name: str = "pytorch_model.bin"
) -> Path:
    """Return a folder with config.json and a file of weights."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(settings))
    (save_file if name.endswith(".safetensors") else torch.save)(state, folder / name)
    return folder


VOCAB, HEADS, WIDTH, LAYERS = 30, 2, 16, 3
TOLERANCE = {torch.float32: 1e-5, torch.float64: 1e-10}


def some_ids(time: int = 11) -> torch.Tensor:
    return torch.randint(VOCAB, (time,), generator=torch.Generator().manual_seed(3))


RELEASED = {"vocab_size": VOCAB, "n_layer": LAYERS, "n_head": HEADS, "n_embd": WIDTH, "step": 9726}
RELEASED |= {"bilinear": True, "gated": False, "expansion_factor": 2, "squared_mlp": False}
RELEASED |= {"squared_attn": True, "bilinear_attn": True}


def released_shapes(settings: dict[str, Any]) -> Shapes:
    """Return the saved state of a model of the post's author."""
    d, shapes = settings["n_embd"], {"transformer.wte.weight": (VOCAB, WIDTH)}
    for layer in range(settings["n_layer"]):
        name = f"transformer.h.{layer}"
        maps = ["q", "k", "v", "proj", *(["q2", "k2"] if settings["bilinear_attn"] else [])]
        shapes |= {f"{name}.attn.c_{part}.weight": (d, d) for part in maps}
        shapes |= {f"{name}.attn.lamb": (), f"{name}.lambdas": (2,)}
        if settings["bilinear_attn"] and not settings["squared_attn"]:
            shapes[f"{name}.attn.bilinear_lamb"] = ()
        if settings["bilinear"]:
            hidden = settings["expansion_factor"] * d
            shapes |= {f"{name}.mlp.{part}.weight": (hidden, d) for part in ("Left", "Right")}
            shapes |= {f"{name}.mlp.Down.weight": (d, hidden), f"{name}.mlp.Down_bias": (d,)}
        else:
            shapes |= {f"{name}.mlp.c_fc.weight": (4 * d, d), f"{name}.mlp.bias": (d,)}
            shapes[f"{name}.mlp.c_proj.weight"] = (d, 4 * d)
    return shapes | {"lm_head.weight": (VOCAB, d)}


PAPER = {"architectures": ["Transformer"], "n_layer": LAYERS, "n_head": HEADS, "n_ctx": 20}
PAPER |= {"d_model": WIDTH, "d_hidden": 24, "bilinear": True, "gate": None, "bias": False}
PAPER |= {"normalization": True, "tokenizer": "ts-4096", "repo": None, "model_type": ""}
PAPER |= {"torch_dtype": "float32", "transformers_version": "4.45.0"}


def paper_shapes(settings: dict[str, Any]) -> Shapes:
    """Return the saved state of a language model of the paper's repository."""
    d, hidden = settings["d_model"], settings["d_hidden"]
    stacked = (2 if settings["bilinear"] else 1) * hidden
    shapes = {"transformer.wte.weight": (VOCAB, d), "lm_head.weight": (VOCAB, d)}
    for layer in range(settings["n_layer"]):
        name = f"transformer.h.{layer}"
        shapes |= {f"{name}.attn.qkv.weight": (3 * d, d), f"{name}.attn.o.weight": (d, d)}
        shapes |= {f"{name}.mlp.w.weight": (stacked, d), f"{name}.mlp.p.weight": (d, hidden)}
        if settings["bias"]:
            shapes |= {f"{name}.mlp.w.bias": (stacked,), f"{name}.mlp.p.bias": (d,)}
    return shapes


IMAGES = {"lr": 1e-3, "wd": 0.5, "epochs": 100, "batch_size": 2048, "seed": 42, "n_layer": 2}
IMAGES |= {"d_input": 25, "d_hidden": 8, "d_output": 4, "bias": False, "residual": False}


def image_shapes(settings: dict[str, Any]) -> Shapes:
    """Return the saved state of an image classifier of the paper's repository."""
    d = settings["d_hidden"]
    shapes = {"embed.weight": (d, settings["d_input"]), "head.weight": (settings["d_output"], d)}
    for layer in range(settings["n_layer"]):
        shapes[f"blocks.{layer}.weight"] = (2 * d, d)
        if settings["bias"]:
            shapes[f"blocks.{layer}.bias"] = (2 * d,)
    return shapes
