"""What the models of `bilens.nn` refuse."""

import json
from functools import partial
from pathlib import Path
from typing import get_args

import torch
from safetensors.torch import load_file, save_file

import bilens
from bilens.errors import CheckpointError, NotBilinearError
from bilens.nn import ClassifierConfig, Gate, GatedLayer, ImageClassifier
from bilens.nn.language.attention import rotation
from bilens.nn.layers import make_mlp, make_norm
from bilens.nn.settings import GateName, MlpName
from bilens.tensor import bonds
from tests.models import random_model, random_text
from tests.refusals import refused

X = torch.randn(1, 3, 16).double()
MIXED = random_model(value_mix=True, embed_mix=True)
LEARNED = random_model(positions="learned")
MASK = torch.ones(1, 1, 9, 9, dtype=torch.bool)
GATES = [gate for gate in get_args(GateName) if gate != "identity"]
MLPS = [mlp for mlp in get_args(MlpName) if mlp != "bilinear"]
NAN = {"unembed.weight": torch.full((2, 3), torch.nan)}


def classifier(*sizes, **parts):
    return ImageClassifier(ClassifierConfig(*(sizes or (4, 2, 3)), **parts))


def accuracy(*labels):
    classifier(4, 3, 5).accuracy(torch.randn(5, 4), torch.tensor(labels))


def cut_to_other_sizes():
    cut = bonds(classifier(n_layers=2).tensors(), torch.eye(2)).cut(2)
    ImageClassifier.from_cut(cut, ClassifierConfig(5, 2, 3))


def run(attention, cached=None, **options):
    """Run a model of one kind, with the cache of another."""
    if cached is not None:
        options["past_key_values"] = run(cached, use_cache=True).past_key_values
    return random_model(attention=attention)(random_text()[None], **options)


MISUSE = {
    r"labels is a tensor of shape \(4,\)": lambda: accuracy(0, 0, 0, 0),
    "labels holds the number 3, expected 0 to 2, numbers of classes": lambda: accuracy(
        0, 1, 2, 3, 0
    ),
    "cut has 4 inputs and 2 outputs; expected 5 and 2": cut_to_other_sizes,
    "d_in and d_out to be equal; they are 3 and 4": lambda: GatedLayer(3, 4, residual=True),
    "name='tanh', expected one of identity, sigmoid, relu": lambda: Gate("tanh"),
    "name='batch', expected one of none, scalar, rms": lambda: make_norm("batch", 4),
    "name='cubic', expected one of bilinear": lambda: make_mlp("cubic", 4, 4, bias=False),
    "heads of even width": lambda: rotation(X[:, :, 0], 5, 100.0, torch.zeros(1)),
    "attention without softmax, which keeps no keys": lambda: run("softmax", "squared"),
    "keeps a DynamicLayer for layer 0, expected a StateLay": lambda: run("squared", "softmax"),
    "squared attention can mask tokens, not pairs": lambda: run("squared", attention_mask=MASK),
    "x0=None, but with embed_mix a block reads a x": lambda: MIXED.blocks[0](X),
    "v_first=None, but with value_mix the values of the fir": lambda: MIXED.blocks[0].attn(X),
    "reaches position 12; learned positions end at n_ctx=12": lambda: LEARNED(
        random_text(13)[None]
    ),
    "layer=1, expected 0 to 0": lambda: LEARNED.mlp(1),
}
test_misuse_of_a_model_is_said = refused(MISUSE)
test_what_has_no_tensor_says_so = refused(
    {
        r"2 layers.*degree 4.*model.tensors\(\)": lambda: classifier(n_layers=2).tensor(),
        r"layers\[0\] has the gate relu": lambda: classifier(gate="relu").tensor(),
        r"norm='rms'.*model.layers\[0\].tensor\(\)": lambda: classifier(norm="rms").tensor(),
        **{
            rf"layers\[1\] has the gate {gate}.*[Aa]nnealing it makes it bilinear": (
                lambda gate=gate: GatedLayer(3, 3, gate=gate).tensor("layers[1]")
            )
            for gate in GATES
        },
        r"blocks\[3\].mlp": [
            lambda mlp=mlp: make_mlp(mlp, 6, 10, bias=True).tensor("blocks[3].mlp") for mlp in MLPS
        ],
    },
    NotBilinearError,
)


def edit(path, **changes):
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def spoil(path, **instead):
    """Write weights without an unembedding, or with another one."""
    state = load_file(path)
    del state["unembed.weight"]
    save_file({**state, **instead}, path)


def damaged(name, damage):
    """Return ways to open a folder with one file damaged."""

    def opened(tmp_path, way):
        classifier().save_pretrained(tmp_path)
        damage(tmp_path / name)
        way(tmp_path)

    return [partial(opened, way=way) for way in (bilens.load, ImageClassifier.from_pretrained)]


CONFIG, WEIGHTS = "config.json", "model.safetensors"
test_a_damaged_model_is_refused = refused(
    {
        "holds no config.json": damaged(CONFIG, Path.unlink),
        "holds no model.safetensors": damaged(WEIGHTS, Path.unlink),
        "damaged and cannot be read as JSON": damaged(CONFIG, lambda p: p.write_text("{")),
        "config.json: unknown settings: colour": damaged(CONFIG, lambda p: edit(p, colour=1)),
        "cannot be used: n_layers=10000000": damaged(CONFIG, lambda p: edit(p, n_layers=10**12)),
        "does not fit its config.json": damaged(CONFIG, lambda p: edit(p, d_model=2**20)),
        "model (of )?type .other": damaged(CONFIG, lambda p: edit(p, model_type="other")),
        "damaged.*safetensors": damaged(WEIGHTS, lambda p: p.write_bytes(b"\0" * 20)),
        "unembed.weight holds NaN or infinite": damaged(WEIGHTS, lambda p: spoil(p, **NAN)),
        "unembed.weight": damaged(WEIGHTS, spoil),
    },
    CheckpointError,
)
