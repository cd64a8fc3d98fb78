"""The models that came with the post on tensor-transformer variants.

Source: the facts of the post's code: RMS norm without gain of the embedding, before attention, MLP
and unembedding; queries and keys divided by their size and turned by rotary positions in the other
sense, with cosines and sines in bfloat16; values mixed with those of the first block, the input of
each block with the embedding; logits capped.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from einops import rearrange
from torch import Tensor
from torch.nn import functional

from bilens.convert.weights import Row
from bilens.nn import ATTENTIONS, MlpName
from bilens.nn.language import LanguageConfig, LanguageModel

__all__ = ["tensor_transformer"]

CAP = 30.0
N_CTX = 512
"""Not among the settings. The largest of these models is reported to fail beyond."""
ATTENTION = {
    (False, False): "softmax",
    (True, False): "squared",
    (True, True): "bilinear",
    (False, True): "differential",
}
"""By `squared_attn` and `bilinear_attn`."""


def tensor_transformer(
    settings: Mapping[str, Any], weights: Mapping[str, Tensor]
) -> tuple[LanguageModel, list[Row]]:
    """An empty model by its settings, and the key table of its weights.

    The embedding is normalised once and for all. Rotary positions turn the other way round when the
    halves of each query and key change places, and an MLP that squares is bilinear with both
    factors alike, so neither needs a setting.

    Raises:
        BilensError: a setting is out of range.
    """
    heads, width = settings["n_head"], settings["n_embd"]
    attention = ATTENTION[bool(settings["squared_attn"]), bool(settings["bilinear_attn"])]
    mlp: MlpName = "bilinear" if settings["bilinear"] or settings["squared_mlp"] else "relu2"
    if settings["bilinear"] and settings["gated"]:
        mlp = "swiglu"
    config = LanguageConfig(
        vocab_size=settings["vocab_size"],
        d_model=width,
        n_layers=settings["n_layer"],
        n_heads=heads,
        d_hidden=(settings["expansion_factor"] if settings["bilinear"] else 4) * width,
        n_ctx=N_CTX,
        mlp=mlp,
        mlp_bias="out",
        norm="rms",
        attention=attention,
        attention_scale=heads / width if attention == "differential" else None,
        qk_norm=True,
        rope_bfloat16=True,
        value_mix=True,
        embed_mix=True,
        logit_cap=CAP,
    )
    with torch.device("meta"):
        model = LanguageModel(config)
    rows = [
        Row("transformer.wte.weight", ("embed.weight",), _normalised),
        Row("lm_head.weight", ("unembed.weight",)),
    ]
    for layer in range(config.n_layers):
        rows += _attention(layer, attention, _swapped(config.n_heads))
        rows += _mlp(layer, settings)
    return model, rows


def _attention(layer: int, attention: str, swapped: Callable[[Tensor], Tensor]) -> Iterator[Row]:
    theirs, ours = f"transformer.h.{layer}", f"blocks.{layer}"
    yield Row(f"{theirs}.lambdas", (f"{ours}.residual_mix",))
    yield Row(f"{theirs}.attn.lamb", (f"{ours}.attn.value_mix_share",))
    yield Row(f"{theirs}.attn.c_v.weight", (f"{ours}.attn.value.weight",))
    yield Row(f"{theirs}.attn.c_proj.weight", (f"{ours}.attn.out.weight",))
    for number in ("", "2")[: ATTENTIONS[attention].pairs]:
        for letter, name in (("q", "query"), ("k", "key")):
            yield Row(
                f"{theirs}.attn.c_{letter}{number}.weight",
                (f"{ours}.attn.{name}{number}.weight",),
                swapped,
            )
    if attention == "differential":
        yield Row(f"{theirs}.attn.bilinear_lamb", (f"{ours}.attn.diff_lambda",))


def _mlp(layer: int, settings: Mapping[str, Any]) -> Iterator[Row]:
    theirs, ours = f"transformer.h.{layer}.mlp", f"blocks.{layer}.mlp"
    if settings["bilinear"]:
        # Their gate is on Left, that of bilens on the right.
        left, right = ("right", "left") if settings["gated"] else ("left", "right")
        yield Row(f"{theirs}.Left.weight", (f"{ours}.{left}.weight",))
        yield Row(f"{theirs}.Right.weight", (f"{ours}.{right}.weight",))
        yield Row(f"{theirs}.Down.weight", (f"{ours}.out.weight",))
        yield Row(f"{theirs}.Down_bias", (f"{ours}.out.bias",))
        return
    yield Row(f"{theirs}.c_proj.weight", (f"{ours}.out.weight",))
    yield Row(f"{theirs}.bias", (f"{ours}.out.bias",))
    for part in ("left", "right") if settings["squared_mlp"] else ("inner",):
        yield Row(f"{theirs}.c_fc.weight", (f"{ours}.{part}.weight",), torch.clone)


def _normalised(table: Tensor) -> Tensor:
    return functional.rms_norm(table, table.shape[-1:])


def _swapped(heads: int) -> Callable[[Tensor], Tensor]:
    def swapped(weight: Tensor) -> Tensor:
        halves = rearrange(weight, "(h two i) d -> h two i d", h=heads, two=2)
        return rearrange(halves.flip(1), "h two i d -> (h two i) d")

    return swapped
