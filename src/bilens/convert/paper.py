"""The models of the repository that came with the paper: language models, and image classifiers.

Source: the facts of that repository: softmax attention with rotary positions, its output divided by
sqrt(2 n_layer); RMS norm without gain, epsilon 1e-8; left and right factor in one matrix, the gate
on the left one.
"""

from collections.abc import Iterator, Mapping
from math import isqrt
from typing import Any

import torch
from torch import Tensor

from bilens.convert.weights import Row
from bilens.errors import CheckpointError
from bilens.nn import ClassifierConfig, ImageClassifier, MlpName
from bilens.nn.language import LanguageConfig, LanguageModel

__all__ = ["paper_classifier", "paper_model"]

EPS = 1e-8
EMBED = "transformer.wte.weight"
SPEEDS = ".attn.rotary.inv_freq"
MLPS: dict[tuple[bool, str | None], MlpName] = {
    (True, None): "bilinear",
    (True, "relu"): "reglu",
    (True, "silu"): "swiglu",
    (True, "gelu"): "geglu",
    (False, "relu"): "relu",
    (False, "gelu"): "gelu",
}
"""By `bilinear` and `gate`."""


def paper_model(
    settings: Mapping[str, Any], weights: dict[str, Tensor]
) -> tuple[LanguageModel, list[Row]]:
    """An empty language model by its settings, and the key table of its weights.

    The scale of attention's output goes into its weights. The size of the vocabulary is not among
    the settings, so it is that of the embedding.

    Raises:
        BilensError: a setting is out of range.
        CheckpointError: no MLP of bilens computes theirs, or rotary positions have other speeds.
    """
    mlp = MLPS.get((bool(settings["bilinear"]), settings["gate"]))
    if mlp is None:
        raise CheckpointError(
            f"bilinear={settings['bilinear']} with gate={settings['gate']!r} in config.json: "
            "bilens has no such MLP; expected bilinear with gate None, relu, silu or gelu, or not "
            "bilinear with gate relu or gelu"
        )
    config = LanguageConfig(
        vocab_size=weights[EMBED].shape[0] if EMBED in weights else 1,
        d_model=settings["d_model"],
        n_layers=settings["n_layer"],
        n_heads=settings["n_head"],
        d_hidden=settings["d_hidden"],
        n_ctx=settings.get("n_ctx", 256),
        mlp=mlp,
        mlp_bias="all" if settings.get("bias") else "none",
        norm="rms" if settings["normalization"] else "none",
        norm_eps=EPS,
    )
    _take_speeds(weights, config)
    with torch.device("meta"):
        model = LanguageModel(config)
    rows = [Row(EMBED, ("embed.weight",)), Row("lm_head.weight", ("unembed.weight",))]
    for layer in range(config.n_layers):
        rows += _block(layer, config)
    return model, rows


def _block(layer: int, config: LanguageConfig) -> Iterator[Row]:
    theirs, ours = f"transformer.h.{layer}", f"blocks.{layer}"
    scale = (2 * config.n_layers) ** -0.5
    stacked = tuple(f"{ours}.attn.{name}.weight" for name in ("query", "key", "value"))
    yield Row(f"{theirs}.attn.qkv.weight", stacked)
    yield Row(f"{theirs}.attn.o.weight", (f"{ours}.attn.out.weight",), lambda w: scale * w)
    # Their gate is on the left factor, that of bilens on the right.
    factors = {"bilinear": ("left", "right"), "relu": ("inner",), "gelu": ("inner",)}
    names = factors.get(config.mlp, ("right", "left"))
    for kind in ("weight", "bias") if config.mlp_bias == "all" else ("weight",):
        yield Row(f"{theirs}.mlp.w.{kind}", tuple(f"{ours}.mlp.{name}.{kind}" for name in names))
        yield Row(f"{theirs}.mlp.p.{kind}", (f"{ours}.mlp.out.{kind}",))


def _take_speeds(weights: dict[str, Tensor], config: LanguageConfig) -> None:
    """Take the speeds of rotary positions from the weights: bilens works them out."""
    d_head = config.d_model // config.n_heads
    expected = config.rope_base ** -(torch.arange(0, d_head, 2) / d_head)
    for name in [name for name in weights if name.endswith(SPEEDS)]:
        found = weights.pop(name).float()
        if found.shape != expected.shape or not torch.allclose(found, expected, rtol=1e-2):
            raise CheckpointError(
                f"{name} holds other speeds than rotary positions of base {config.rope_base:,.0f} "
                f"and heads of width {d_head} have"
            )


def paper_classifier(
    settings: Mapping[str, Any], weights: Mapping[str, Tensor]
) -> tuple[ImageClassifier, list[Row]]:
    """An empty image classifier by its settings, and the key table of its weights.

    Its pictures are square where the number of their pixels is a square.

    Raises:
        BilensError: a setting is out of range.
    """
    pixels, side = settings["d_input"], isqrt(settings["d_input"])
    config = ClassifierConfig(
        n_inputs=pixels,
        n_classes=settings["d_output"],
        d_model=settings["d_hidden"],
        n_layers=settings["n_layer"],
        bias=settings["bias"],
        residual=settings["residual"],
        image_shape=(side, side) if side**2 == pixels else None,
    )
    with torch.device("meta"):
        model = ImageClassifier(config)
    rows = [Row("embed.weight", ("embed.weight",)), Row("head.weight", ("unembed.weight",))]
    for layer in range(config.n_layers):
        for kind in ("weight", "bias") if config.bias else ("weight",):
            both = tuple(f"layers.{layer}.{name}.{kind}" for name in ("left", "right"))
            rows.append(Row(f"blocks.{layer}.{kind}", both))
    return model, rows
